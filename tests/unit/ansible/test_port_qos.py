"""PFC and DSCP trust: what the tools print, and what is asked of them."""

import pytest

from tests.ansible_modules import load

qos = load("library/port_qos.py")

PFC = "prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off\n"
MLNX = """DCBX mode: OS controlled
Priority trust state: dscp
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0
\tbuffer      0   0   0   1   0   0   0   0
"""


@pytest.fixture
def asked(monkeypatch):
    """Commands that were run; none is."""
    commands = []

    def note(*command):
        commands.append(" ".join(command))
        return ""

    monkeypatch.setattr(qos, "_run", note)
    return commands


def test_dcb_is_read():
    assert qos.parse_dcb(PFC, "dscp-prio 26:3 46:6\n", 26) == qos.Qos((3,), 3)


def test_dcb_without_a_mapping():
    assert qos.parse_dcb(PFC, "", 26).dscp_priority == -1


def test_dcb_that_names_no_priorities_is_an_error():
    with pytest.raises(qos.ToolError, match="names 0 of 8 priorities"):
        qos.parse_dcb("Operation not supported\n", "", 26)


def test_mlnx_qos_is_read():
    assert qos.parse_mlnx_qos(MLNX, 26) == qos.Qos((3,), 3, "dscp")


def test_mlnx_qos_without_pfc_is_an_error():
    with pytest.raises(qos.ToolError, match="no PFC or no trust state"):
        qos.parse_mlnx_qos("Interface not found\n", 26)


def test_dcb_is_asked_for_what_differs(asked):
    qos.write_qos("dcb", "ens1", qos.Qos((), 1), qos.Qos((3,), 3), 26)
    assert asked == [
        "dcb pfc set dev ens1 prio-pfc all:off 3:on",
        "dcb app del dev ens1 dscp-prio 26:1",
        "dcb app add dev ens1 dscp-prio 26:3",
    ]


def test_dcb_is_asked_nothing_more(asked):
    qos.write_qos("dcb", "ens1", qos.Qos((3,), -1), qos.Qos((3,), 3), 26)
    assert asked == ["dcb app add dev ens1 dscp-prio 26:3"]


def test_dcb_puts_back_no_mapping(asked):
    qos.write_qos("dcb", "ens1", qos.Qos((3,), 3), qos.Qos((), -1), 26)
    assert asked == [
        "dcb pfc set dev ens1 prio-pfc all:off",
        "dcb app del dev ens1 dscp-prio 26:3",
    ]


def test_mlnx_qos_is_asked_once(asked):
    qos.write_qos("mlnx_qos", "ens1", qos.Qos((), 3, "pcp"), qos.Qos((3,), 3, "dscp"), 26)
    assert asked == ["mlnx_qos -i ens1 --trust dscp --pfc 0,0,0,1,0,0,0,0"]


def test_the_first_record_stays(tmp_path):
    record = tmp_path / "before/qos.json"
    qos.write_record(record, qos.Qos((1,), -1, "pcp"))
    qos.write_record(record, qos.Qos((3,), 3, "dscp"))
    assert qos.read_record(record) == qos.Qos((1,), -1, "pcp")


def test_a_failing_tool_is_quoted():
    with pytest.raises(qos.ToolError, match=r"false a failed \(1\)"):
        qos._run("false", "a")


def test_a_missing_tool_is_named():
    with pytest.raises(qos.ToolError, match="no-such-tool"):
        qos._run("no-such-tool")
