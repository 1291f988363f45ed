"""The playbooks as files: they parse, every knob is defaulted and explained, every change has a way back."""

import re
from pathlib import Path

import pytest
import yaml

from tests.ansible_modules import ANSIBLE

KNOB_FILES = sorted((ANSIBLE / "group_vars/all").glob("*.yml"))
YAML_FILES = sorted(path for path in ANSIBLE.rglob("*.yml") if ".ansible" not in path.parts)
ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
NO_WAY_BACK = {
    "ports_found": "changes nothing",
    "packages_present": "packages stay",
    "rdma_packages": "packages stay",
    "nvidia_stack": "packages stay",
    "time_sync": "a clock that is kept hurts nobody",
    "pending": "changes nothing",
    "cluster_package": "cluster_state=absent",
    "cluster_secret": "cluster_state=absent",
    "ray_node": "cluster_state=absent",
    "doctor_run": "changes nothing",
    "rail_bandwidth": "changes nothing",
    "nixl_read": "changes nothing",
    "fabric_report": "writes on the controller alone",
}
"""Roles that rollback.yml does not undo, and why."""


def load_yaml(path):
    return yaml.safe_load(path.read_text())


def knobs():
    return {name: path for path in KNOB_FILES for name in load_yaml(path)}


def roles_of(playbook):
    """Every (role, tags) of a playbook."""
    plays = load_yaml(ANSIBLE / playbook)
    return [
        (role["role"], role.get("tags", [])) for play in plays for role in play.get("roles", [])
    ]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ANSIBLE)))
def test_yaml_loads(path):
    assert load_yaml(path)


def test_no_knob_is_defined_twice():
    names = [name for path in KNOB_FILES for name in load_yaml(path)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", KNOB_FILES, ids=lambda path: path.name)
def test_every_knob_is_explained(path):
    """A comment stands above each knob, or above the group of knobs that it stands in."""
    explained = False
    for line in path.read_text().splitlines():
        if not line.strip():
            explained = False
        elif line.startswith("#"):
            explained = True
        elif re.match(r"[a-z]\w*:", line):
            assert explained, f"{path.name}: {line}"


def test_every_knob_is_used():
    texts = [
        path.read_text() for path in ANSIBLE.rglob("*") if path.is_file() and path.suffix != ".py"
    ]
    used = "\n".join(texts)
    for name in knobs():
        # Once is its own definition.
        assert len(re.findall(rf"\b{name}\b", used)) > 1, f"{name} is defined and never used"


def test_every_variable_is_defined_somewhere():
    """Whatever looks like a knob in a role is one: no role waits for a variable that nobody sets."""
    families = {
        "allow",
        "rdma",
        "fabric",
        "cluster",
        "verify",
        "memlock",
        "firewall",
        "nvidia",
        "pcie",
    }
    known = set(knobs()) | set(ROLES)
    for path in (ANSIBLE / "roles").rglob("*.yml"):
        text = re.sub(r"#.*", "", path.read_text())
        known |= set(re.findall(r"^\s*(?:register: )?(\w+)(?::|$)", text, re.MULTILINE))
    for path in (ANSIBLE / "roles").rglob("*.yml"):
        text = re.sub(r"#.*", "", path.read_text())
        for expression in re.findall(r"\{\{(.*?)\}\}", text, re.DOTALL):
            plain = re.sub(r"'[^']*'", "", expression)
            for name in re.findall(r"(?<![.\w])([a-z]+(?:_[a-z0-9]+)+)\b(?!\()", plain):
                if name.split("_")[0] in families:
                    assert name in known, f"{path.relative_to(ANSIBLE)}: {name}"


def test_site_groups_set_no_knob():
    """Ansible ranks group variables of an inventory file below group_vars/all: they would be ignored."""
    rdma = load_yaml(ANSIBLE / "inventory/example.yml")["all"]["children"]["rdma"]
    groups = [rdma, *rdma["children"].values()]
    assert not {name for group in groups for name in group.get("vars", {})} & set(knobs())


def test_example_inventory_has_two_hosts_of_eight_rails():
    groups = load_yaml(ANSIBLE / "inventory/example.yml")["all"]["children"]["rdma"]["children"]
    assert groups.keys() == {"trainer", "inference"}
    for group in groups.values():
        ((_, host),) = group["hosts"].items()
        assert len(set(host["fabric_rails"])) == 8


def test_every_tag_is_the_name_of_its_role():
    for playbook in ("rdma.yml", "cluster.yml", "verify.yml"):
        for role, tags in roles_of(playbook):
            assert not tags or tags == ["always"] or role in tags, f"{playbook}: {role}"


def test_every_role_can_be_undone_or_says_why_not():
    undone = set(
        re.findall(r"name: (\w+)\n\s+tasks_from: rollback", (ANSIBLE / "rollback.yml").read_text())
    )
    assert undone | set(NO_WAY_BACK) == set(ROLES)
    assert not undone & set(NO_WAY_BACK)


def test_links_are_touched_one_host_at_a_time():
    for play in load_yaml(ANSIBLE / "rdma.yml"):
        names = {role["role"] for role in play["roles"]}
        if names & {"mtu", "lossless", "pcie_tuning"}:
            assert play["serial"] == 1


def test_whatever_runs_a_command_says_whether_it_changed_something():
    for path in (ANSIBLE / "roles").rglob("tasks/*.yml"):
        for task in load_yaml(path):
            command = next(
                (task[name] for name in task if name.endswith((".command", ".shell"))), None
            )
            if command is not None:
                bounded = "creates" in command or "removes" in command
                assert bounded or "changed_when" in task, f"{path}: {task['name']}"


def test_collections_are_pinned():
    for collection in load_yaml(ANSIBLE / "requirements.yml")["collections"]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", collection["version"])


def test_private_inventories_are_ignored_by_git():
    ignored = Path(ANSIBLE.parent, ".gitignore").read_text()
    assert "ansible/inventory/*\n!ansible/inventory/example.yml" in ignored
