"""What perftest prints, read and worded."""

from tests.ansible_modules import load

perftest = load("filter_plugins/perftest.py")

OUTPUT = """
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8388608    29410            0.00               394.72             0.005882
---------------------------------------------------------------------------------------
"""


def test_the_average_is_read():
    assert perftest.perftest_gbps(OUTPUT) == 394.72


def test_a_run_without_a_table_is_zero():
    assert perftest.perftest_gbps("Unable to find the Infiniband/RoCE device\n") == 0.0


def test_other_units_are_not_taken_for_gigabits():
    assert perftest.perftest_gbps(OUTPUT.replace("Gb/sec", "MB/sec")) == 0.0


def row(**changes):
    return {
        "rail": 3,
        "operation": "read",
        "memory": "gpu",
        "client": "trainer-0/mlx5_3",
        "server": "inference-0/mlx5_4",
        "gbps": 120.0,
        "rate_gbps": 400.0,
        "error": "",
    } | changes


def test_a_slow_rail_is_named_with_its_threshold():
    assert perftest.fabric_rail_failure(row(), 0.85) == (
        "rail 3 read from gpu memory between trainer-0/mlx5_3 and inference-0/mlx5_4 reached 120.0 of "
        "400 Gb/s (verify_min_rate_share is 0.85)"
    )


def test_a_failed_measurement_is_quoted():
    assert perftest.fabric_rail_failure(row(error="exit status 1"), 0.85).endswith(
        "failed: exit status 1"
    )
