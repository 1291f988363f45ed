"""Make one Ethernet port lossless for RDMA: trust DSCP, and PFC on one priority.

Uses ``mlnx_qos`` where DOCA-OFED brings it and ``dcb`` of iproute2 elsewhere. What was set before the
first change is recorded, and ``state: restored`` sets it again. Standard library only, Python 3.9 or
later.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

DOCUMENTATION = r"""
module: port_qos
short_description: Trust DSCP and turn PFC on for one priority of a port
description: Reads the port with mlnx_qos or dcb, and changes it only where it differs.
options:
  interface: {description: Network interface of the port., type: str, required: true}
  record: {description: File for the settings from before., type: path, required: true}
  tool: {description: mlnx_qos or dcb., type: str, choices: [mlnx_qos, dcb], required: true}
  priority: {description: Priority with PFC; all others have none., type: int, default: 3}
  dscp: {description: DSCP that maps to the priority., type: int, default: 26}
  state:
    description: Set, or set what was recorded again.
    type: str
    choices: [present, restored]
    default: present
author: rdt-e2e
"""

EXAMPLES = r"""
- name: Priority 3 is lossless
  port_qos: {interface: ens1np0, record: /var/lib/rdt-e2e/before/qos-ens1np0.json, tool: dcb}
"""

RETURN = r"""
qos: {description: What was asked for., type: dict, returned: always}
differs: {description: Whether the port had something else., type: bool, returned: always}
"""


@dataclass(frozen=True)
class Qos:
    """What is set on a port.

    Attributes:
        pfc: Priorities with PFC.
        dscp_priority: Priority to which the DSCP maps; -1 for none of its own.
        trust: ``dscp`` or ``pcp``; empty where the tool does not say.
    """

    pfc: tuple[int, ...]
    dscp_priority: int
    trust: str = ""


class ToolError(Exception):
    """The tool failed or printed something else than expected; the message quotes it."""


def read_qos(tool: str, interface: str, dscp: int) -> Qos:
    """Read a port.

    Raises:
        ToolError: The tool failed, or its output has no PFC line.
    """
    if tool == "dcb":
        return parse_dcb(
            _run("dcb", "pfc", "show", "dev", interface, "prio-pfc"),
            _run("dcb", "-N", "app", "show", "dev", interface, "dscp-prio"),
            dscp,
        )
    return parse_mlnx_qos(_run("mlnx_qos", "-i", interface), dscp)


def parse_dcb(pfc: str, app: str, dscp: int) -> Qos:
    """Read what dcb prints: ``prio-pfc 0:off 1:off ...`` and ``dscp-prio 26:3 ...``."""
    states = re.findall(r"([0-7]):(on|off)", pfc)
    if len(states) != 8:
        raise ToolError(f"dcb pfc show names {len(states)} of 8 priorities: {pfc!r}")
    mapped = dict(re.findall(r"\b(\d+):(\d+)\b", app))
    return Qos(
        pfc=tuple(int(priority) for priority, state in states if state == "on"),
        dscp_priority=int(mapped.get(str(dscp), -1)),
    )


def parse_mlnx_qos(text: str, dscp: int) -> Qos:
    """Read what mlnx_qos prints; it maps DSCP to priority by its upper three bits by default."""
    enabled = re.search(r"^\s*enabled((?:\s+[01]){8})", text, re.MULTILINE)
    trust = re.search(r"Priority trust state:\s*(\w+)", text)
    if enabled is None or trust is None:
        raise ToolError(f"mlnx_qos names no PFC or no trust state: {text[:200]!r}")
    flags = enabled.group(1).split()
    return Qos(
        pfc=tuple(number for number, flag in enumerate(flags) if flag == "1"),
        dscp_priority=dscp >> 3,
        trust=trust.group(1),
    )


def write_qos(tool: str, interface: str, now: Qos, wanted: Qos, dscp: int) -> None:
    """Set what differs.

    Raises:
        ToolError: The tool refused.
    """
    if tool == "mlnx_qos":
        flags = ",".join("1" if number in wanted.pfc else "0" for number in range(8))
        _run("mlnx_qos", "-i", interface, "--trust", wanted.trust, "--pfc", flags)
        return
    if now.pfc != wanted.pfc:
        states = [f"{number}:on" for number in wanted.pfc]
        _run("dcb", "pfc", "set", "dev", interface, "prio-pfc", "all:off", *states)
    if now.dscp_priority != wanted.dscp_priority:
        if now.dscp_priority >= 0:
            _run_app("del", interface, dscp, now.dscp_priority)
        if wanted.dscp_priority >= 0:
            _run_app("add", interface, dscp, wanted.dscp_priority)


def _run_app(verb: str, interface: str, dscp: int, priority: int) -> None:
    _run("dcb", "app", verb, "dev", interface, "dscp-prio", f"{dscp}:{priority}")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{' '.join(command)}: {error}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ToolError(f"{' '.join(command)} failed ({done.returncode}): {said}")
    return done.stdout


def read_record(record: Path) -> Qos:
    """The recorded settings.

    Raises:
        OSError: There is no record.
    """
    raw = json.loads(record.read_text())
    return Qos(tuple(raw["pfc"]), raw["dscp_priority"], raw["trust"])


def write_record(record: Path, qos: Qos) -> None:
    """Record settings, unless older ones are recorded already."""
    if not record.exists():
        record.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        record.write_text(json.dumps(asdict(qos)) + "\n")


def run_module() -> None:
    """Answer Ansible."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "interface": {"type": "str", "required": True},
            "record": {"type": "path", "required": True},
            "tool": {"type": "str", "choices": ["mlnx_qos", "dcb"], "required": True},
            "priority": {"type": "int", "default": 3},
            "dscp": {"type": "int", "default": 26},
            "state": {"type": "str", "choices": ["present", "restored"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params
    tool, interface, dscp = given["tool"], given["interface"], given["dscp"]
    record, restoring = Path(given["record"]), given["state"] == "restored"
    try:
        if restoring and not record.exists():
            module.exit_json(changed=False, differs=False, qos={})
        now = read_qos(tool, interface, dscp)
        trust = "dscp" if tool == "mlnx_qos" else ""
        ours = Qos((given["priority"],), given["priority"], trust)
        wanted = read_record(record) if restoring else ours
        changed = now != wanted
        if not module.check_mode:
            if changed and not restoring:
                write_record(record, now)
            if changed:
                write_qos(tool, interface, now, wanted, dscp)
            if restoring:
                record.unlink()
    except (ToolError, OSError, ValueError) as error:
        module.fail_json(msg=f"{interface}: {error}")
    module.exit_json(
        changed=changed or restoring,
        differs=now != wanted,
        qos=asdict(wanted),
        diff={"before": f"{interface}: {now}\n", "after": f"{interface}: {wanted}\n"},
    )


if __name__ == "__main__":
    run_module()
