from rdt_e2e.bench.result import END_TO_END, TRANSPORT, UPDATE, RowResult, Spread
from rdt_e2e.bench.table import LIMIT_COPY, OURS, format_table


def rows():
    return [
        RowResult(LIMIT_COPY, 4_000_000_000, {TRANSPORT: [0.010, 0.011, 0.009]}),
        RowResult(
            OURS,
            4_000_000_000,
            {UPDATE: [0.02], END_TO_END: [0.05, 0.04, 0.06]},
            {"pack": [0.001, 0.003]},
            {"the cold sync": "", "the last warm sync": ""},
            facts={"traced_sync": {"consumer_totals": {"issue_pull": [26, 0.2484]}}},
        ),
        RowResult("peer-rdt", 4_000_000_000, {END_TO_END: [0.1]}, checks={"the cold sync": ""}),
        RowResult(
            "peer-nccl", 4_000_000_000, {END_TO_END: [0.01]}, checks={"the cold sync": "w13"}
        ),
        RowResult("peer-ipc", reason="no GPU"),
    ]


def line_of(*words):
    (line,) = [line for line in format_table(rows()) if all(word in line for word in words)]
    return line


def test_a_line_gives_median_extremes_rate_and_share():
    assert line_of("ours", "end to end", "0.0").split()[4:] == [
        "0.0500",
        "0.0400",
        "0.0600",
        "3",
        "80.0",
        "20.0%",
    ]
    assert "400.0" in line_of(LIMIT_COPY)


def test_clocks_are_kept_apart():
    assert "200.0" in line_of("ours", "update")


def test_a_row_without_figures_says_why():
    assert line_of("peer-ipc") == f"{'peer-ipc':<22}n/a: no GPU"


def test_parts_checks_and_ratios_follow():
    assert "2.00 ms (1.00 to 3.00, n 2)" in line_of("ours, pack")
    assert "every tensor" in line_of("ours, weights after the last warm sync")
    assert "2.00 times" in line_of("peer-rdt takes")


def test_a_traced_sync_is_summed_by_stage():
    assert "26 calls, 248.4 ms in all" in line_of("ours, traced sync, consumer's issue_pull")


def test_wrong_weights_are_no_result():
    assert "WRONG: w13" in line_of("peer-nccl, weights after")
    assert line_of("peer-nccl", "end to end", "0.0").split()[-1] == "WRONG"
    assert not [line for line in format_table(rows()) if "peer-nccl takes" in line]


def test_no_share_without_a_limit():
    lines = format_table(rows()[1:])
    assert not [line for line in lines if "%" in line]


def test_spread_of_one_sample():
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)
