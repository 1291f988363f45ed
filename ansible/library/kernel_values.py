"""Set values in /proc/sys, /sys or configfs, remembering what was there before.

The kernel's settings live in small files. Before this module changes one for the first time, it
writes the old value into a record, and ``state: restored`` puts all of them back: that is the
rollback of every role that tunes the running kernel. Standard library only, Python 3.9 or later.
"""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path

DOCUMENTATION = r"""
module: kernel_values
short_description: Set values in /proc/sys, /sys or configfs, and put them back
description: >-
  Writes the values that differ, after adding their old values to a record. With state restored, it
  writes the recorded values back and removes the record.
options:
  record:
    description: File that holds the values from before the first change.
    type: path
    required: true
  values:
    description: Path below the root, or a glob of paths, to its value.
    type: dict
    default: {}
  root:
    description: Prefix of every path. Anything but / is for tests.
    type: str
    default: /
  state:
    description: Set the values, or put back what was recorded.
    type: str
    choices: [present, restored]
    default: present
author: rdt-e2e
"""

EXAMPLES = r"""
- name: Use the performance governor
  kernel_values:
    record: /var/lib/rdt-e2e/before/cpu_governor.json
    values:
      sys/devices/system/cpu/cpu*/cpufreq/scaling_governor: performance
"""

RETURN = r"""
written: {description: Path to its new value, for what differed., type: dict, returned: always}
absent: {description: Paths or globs that this kernel does not have., type: list, returned: always}
"""


def plan(root: Path, values: dict[str, str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Compare wanted values with those of the kernel.

    Args:
        root: Prefix of every path.
        values: Path below the root, or a glob, to the wanted value.

    Returns:
        Path to its (current, wanted) value, for each that differs; and what does not exist.
    """
    differ: dict[str, tuple[str, str]] = {}
    absent = []
    for pattern, value in values.items():
        found = sorted(glob.glob(str(root / pattern.lstrip("/"))))
        if not found:
            absent.append(pattern)
        for path in found:
            current = current_value(Path(path))
            if current != " ".join(str(value).split()):
                differ[path] = (current, str(value))
    return differ, absent


def current_value(path: Path) -> str:
    """The value in a file: the word in brackets where the kernel lists the choices."""
    text = " ".join(path.read_text().split())
    chosen = re.search(r"\[(\S+)\]", text)
    return chosen.group(1) if chosen else text


def apply(differ: dict[str, tuple[str, str]], record: Path) -> None:
    """Write values, after recording the old ones; a value recorded earlier stays recorded.

    Raises:
        OSError: The kernel refused a value; what was written before it stays recorded.
    """
    before = read_record(record)
    for path, (current, _) in differ.items():
        before.setdefault(path, current)
    record.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    partial = record.with_suffix(".new")
    partial.write_text(json.dumps(before, indent=2, sort_keys=True) + "\n")
    partial.replace(record)
    for path, (_, value) in differ.items():
        write_value(Path(path), value)


def restore(record: Path, check: bool) -> dict[str, tuple[str, str]]:
    """Put recorded values back and remove the record.

    Args:
        record: The record; absent when nothing was ever changed.
        check: Only say what would be written.

    Returns:
        Path to its (current, recorded) value, for each that differs and still exists.
    """
    before = read_record(record)
    differ = {}
    for path, value in before.items():
        # A device may be gone since; then there is nothing to put back.
        if Path(path).exists() and current_value(Path(path)) != value:
            differ[path] = (current_value(Path(path)), value)
    if not check:
        for path, (_, value) in differ.items():
            write_value(Path(path), value)
        record.unlink()
    return differ


def read_record(record: Path) -> dict[str, str]:
    """The recorded values; empty when nothing was recorded."""
    if not record.exists():
        return {}
    found: dict[str, str] = json.loads(record.read_text())
    return found


def write_value(path: Path, value: str) -> None:
    """Write one value the way the kernel wants it: in one write, to a file that exists."""
    handle = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(handle, f"{value}\n".encode())
    finally:
        os.close(handle)


def run_module() -> None:
    """Answer Ansible."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "values": {"type": "dict", "default": {}},
            "root": {"type": "str", "default": "/"},
            "state": {"type": "str", "choices": ["present", "restored"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params
    record = Path(given["record"])
    absent: list[str] = []
    try:
        if given["state"] == "restored":
            changed = record.exists()
            differ = restore(record, module.check_mode) if changed else {}
        else:
            differ, absent = plan(Path(given["root"] or "/"), given["values"])
            changed = bool(differ)
            if changed and not module.check_mode:
                apply(differ, record)
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"kernel_values: {error}; values changed so far are in {record}")
    module.exit_json(
        changed=changed,
        written={path: new for path, (_, new) in differ.items()},
        absent=absent,
        diff={
            "before": "".join(f"{path} = {old}\n" for path, (old, _) in differ.items()),
            "after": "".join(f"{path} = {new}\n" for path, (_, new) in differ.items()),
        },
    )


if __name__ == "__main__":
    run_module()
