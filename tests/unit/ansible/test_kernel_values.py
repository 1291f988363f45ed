"""Values of the running kernel: set, recorded once, put back."""

import json

import pytest

from tests.ansible_modules import load

values = load("library/kernel_values.py")


@pytest.fixture
def kernel(tmp_path):
    root = tmp_path / "root"
    for cpu in range(2):
        governor = root / f"sys/cpu{cpu}/governor"
        governor.parent.mkdir(parents=True)
        governor.write_text("powersave\n")
    (root / "sys/tcp_rmem").write_text("4096\t87380\t6291456\n")
    (root / "sys/thp").write_text("always [madvise] never\n")
    return root


@pytest.fixture
def record(tmp_path):
    return tmp_path / "before/test.json"


def test_plan_names_what_differs_and_what_is_absent(kernel):
    differ, absent = values.plan(
        kernel, {"sys/cpu*/governor": "performance", "/sys/thp": "madvise", "sys/none*": "1"}
    )
    assert differ == {
        f"{kernel}/sys/cpu{cpu}/governor": ("powersave", "performance") for cpu in range(2)
    }
    assert absent == ["sys/none*"]


def test_spaces_and_types_make_no_difference(kernel):
    (kernel / "sys/count").write_text("2\n")
    wanted = {"sys/tcp_rmem": "4096 87380 6291456", "sys/count": 2}
    assert values.plan(kernel, wanted) == ({}, [])


def test_apply_writes_and_records(kernel, record):
    values.apply(values.plan(kernel, {"sys/cpu0/governor": "performance"})[0], record)
    assert (kernel / "sys/cpu0/governor").read_text() == "performance\n"
    assert values.read_record(record) == {f"{kernel}/sys/cpu0/governor": "powersave"}


def test_the_oldest_value_stays_recorded(kernel, record):
    for value in ("performance", "ondemand"):
        values.apply(values.plan(kernel, {"sys/cpu*/governor": value})[0], record)
    assert set(values.read_record(record).values()) == {"powersave"}


def test_restore_puts_back_and_forgets(kernel, record):
    values.apply(values.plan(kernel, {"sys/cpu*/governor": "performance"})[0], record)
    assert len(values.restore(record, check=False)) == 2
    assert (kernel / "sys/cpu1/governor").read_text() == "powersave\n"
    assert not record.exists()


def test_restore_in_check_mode_changes_nothing(kernel, record):
    values.apply(values.plan(kernel, {"sys/cpu0/governor": "performance"})[0], record)
    assert len(values.restore(record, check=True)) == 1
    assert (kernel / "sys/cpu0/governor").read_text() == "performance\n"
    assert record.exists()


def test_restore_passes_over_a_device_that_is_gone(kernel, record):
    values.apply(values.plan(kernel, {"sys/cpu*/governor": "performance"})[0], record)
    (kernel / "sys/cpu0/governor").unlink()
    assert list(values.restore(record, check=False)) == [f"{kernel}/sys/cpu1/governor"]


def test_old_values_are_on_disk_before_the_first_write(kernel, record):
    # The second of two writes fails, as when a kernel refuses a value.
    differ, _ = values.plan(kernel, {"sys/cpu*/governor": "performance"})
    (kernel / "sys/cpu1/governor").unlink()
    with pytest.raises(FileNotFoundError):
        values.apply(differ, record)
    assert len(json.loads(record.read_text())) == 2
    assert (kernel / "sys/cpu0/governor").read_text() == "performance\n"
    assert not (kernel / "sys/cpu1/governor").exists(), "a missing setting must not be created"
