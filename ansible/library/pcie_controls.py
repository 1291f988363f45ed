"""Read and set a PCI Express function's Max Read Request and relaxed ordering.

Linux has no named file for either: they are bits of the Device Control register, which sysfs shows
in the function's ``config`` file. What was there before the first change is recorded. Standard
library only, Python 3.9 or later.

Source: PCI Express Base Specification, capability 0x10, Device Control at offset 8: bit 4 enables
relaxed ordering, bits 14:12 are the largest read request as 128 << n bytes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

DOCUMENTATION = r"""
module: pcie_controls
short_description: Max Read Request and relaxed ordering of PCIe functions
description: Reads the Device Control register of each function and changes what differs.
options:
  functions: {description: PCI addresses., type: list, elements: str, required: true}
  record: {description: File for the registers from before., type: path, required: true}
  root: {description: Prefix of /sys. Anything but / is for tests., type: str, default: /}
  max_read_request: {description: Bytes; 0 only reads., type: int, default: 0}
  relaxed_ordering:
    description: Leave it, or enable it.
    type: str
    choices: [keep, "on"]
    default: keep
  state:
    description: Set, or set what was recorded again.
    type: str
    choices: [present, restored]
    default: present
author: rdt-e2e
"""

EXAMPLES = r"""
- name: Read requests of 4096 bytes
  pcie_controls:
    functions: ["0000:18:00.0"]
    record: /var/lib/rdt-e2e/before/pcie_tuning.json
    max_read_request: 4096
"""

RETURN = r"""
controls: {description: What each function has., type: dict, returned: always}
"""

_STATUS, _HAS_CAPABILITIES, _FIRST_CAPABILITY = 0x06, 0x10, 0x34
_PCIE, _DEVICE_CONTROL = 0x10, 8
_RELAXED, _READ_REQUEST_SHIFT, _READ_REQUEST_MASK = 0x0010, 12, 0x7000
_CONFIG_BYTES = 256


class RegisterError(Exception):
    """A function's configuration space is not readable or has no PCI Express capability."""


def register_offset(config: bytes) -> int:
    """Where Device Control lies in a function's configuration space.

    Raises:
        RegisterError: The capability list is cut off (not root) or holds no PCI Express.
    """
    if len(config) < _CONFIG_BYTES:
        raise RegisterError(f"only {len(config)} bytes are readable; root reads all of them")
    if config[_STATUS] & _HAS_CAPABILITIES:
        place = config[_FIRST_CAPABILITY] & 0xFC
        # 48 capabilities fill the space; more is a loop in a broken list.
        for _ in range(48):
            if place == 0:
                break
            if config[place] == _PCIE:
                return place + _DEVICE_CONTROL
            place = config[place + 1] & 0xFC
    raise RegisterError("it has no PCI Express capability")


def wanted_register(register: int, max_read_request: int, relaxed_ordering: str) -> int:
    """The register with the given settings; 0 and ``keep`` leave their bits."""
    if max_read_request:
        code = max_read_request.bit_length() - 8
        register = register & ~_READ_REQUEST_MASK | code << _READ_REQUEST_SHIFT
    return register | _RELAXED if relaxed_ordering == "on" else register


def describe(register: int) -> dict[str, object]:
    """What a register says, in words."""
    return {
        "max_read_request": 128 << ((register & _READ_REQUEST_MASK) >> _READ_REQUEST_SHIFT),
        "relaxed_ordering": bool(register & _RELAXED),
        "register": f"0x{register:04x}",
    }


def read_register(config: Path) -> tuple[int, int]:
    """Offset and value of Device Control.

    Raises:
        RegisterError: See `register_offset`.
    """
    data = config.read_bytes()[:_CONFIG_BYTES]
    offset = register_offset(data)
    return offset, int.from_bytes(data[offset : offset + 2], "little")


def write_register(config: Path, offset: int, register: int) -> None:
    """Write two bytes at an offset and nothing else."""
    handle = os.open(config, os.O_WRONLY)
    try:
        os.pwrite(handle, register.to_bytes(2, "little"), offset)
    finally:
        os.close(handle)


def run_module() -> None:
    """Answer Ansible."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "functions": {"type": "list", "elements": "str", "required": True},
            "record": {"type": "path", "required": True},
            "root": {"type": "str", "default": "/"},
            "max_read_request": {
                "type": "int",
                "choices": [0, 128, 256, 512, 1024, 2048, 4096],
                "default": 0,
            },
            "relaxed_ordering": {"type": "str", "choices": ["keep", "on"], "default": "keep"},
            "state": {"type": "str", "choices": ["present", "restored"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params
    record, restoring = Path(given["record"]), given["state"] == "restored"
    recorded = json.loads(record.read_text()) if record.exists() else {}
    functions = list(recorded) if restoring else given["functions"]
    before, after = {}, {}
    for function in functions:
        config = Path(given["root"], "sys/bus/pci/devices", function, "config")
        if restoring and not config.exists():
            continue
        try:
            offset, now = read_register(config)
            wanted = recorded.get(function, now)
            if not restoring:
                wanted = wanted_register(now, given["max_read_request"], given["relaxed_ordering"])
            before[function], after[function] = describe(now), describe(wanted)
            if now == wanted or module.check_mode:
                continue
            if not restoring:
                recorded.setdefault(function, now)
                record.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                record.write_text(json.dumps(recorded) + "\n")
            write_register(config, offset, wanted)
        except (OSError, RegisterError) as error:
            module.fail_json(msg=f"PCI function {function}: {error}")
    changed = before != after or (restoring and record.exists())
    if restoring and not module.check_mode:
        record.unlink(missing_ok=True)
    module.exit_json(
        changed=changed,
        controls=after,
        diff={"before": f"{before}\n", "after": f"{after}\n"},
    )


if __name__ == "__main__":
    run_module()
