"""Reads on their own: real agents in processes of their own, and the table."""

import pytest

from rdt_e2e.bench import reads
from rdt_e2e.bench.reads import ReadOptions, ReadTimes, measure_reads, reads_table
from rdt_e2e.errors import BackendUnavailableError, WeightMismatchError


def test_both_ways_of_progress_are_measured(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_MODULES", "^efa")
    rows = measure_reads(ReadOptions(1 << 20, 3, "cpu"))
    assert [row.progress_thread for row in rows] == list(reads.DELAYS_US)
    assert [len(row.seconds) for row in rows] == [3, 3]
    assert all(second > 0 for row in rows for second in row.seconds)


def test_other_bytes_are_an_error(monkeypatch):
    monkeypatch.setattr(reads, "_measure", lambda *_options: (False, [1.0, 1.0]))
    with pytest.raises(WeightMismatchError, match="4096 bytes read over NIXL are not those"):
        measure_reads(ReadOptions(4096, 2, "cpu"))


def test_a_process_that_ends_before_its_result_is_an_error(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "no such transport")
    with pytest.raises(BackendUnavailableError, match="a process ended before"):
        measure_reads(ReadOptions(4096, 2, "cpu"))


def test_the_table_keeps_the_first_read_apart():
    rows = [ReadTimes("polls, as released", 10**9, [0.005, 0.010, 0.009, 0.016])]
    assert reads_table(rows) == [
        "progress thread        first ms   others ms       min       max     GB/s",
        "polls, as released         5.00       10.00      9.00     16.00    100.0",
    ]
