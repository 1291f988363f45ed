import pytest

from rdt_e2e.bench.k2_slice import TINY
from rdt_e2e.bench.load import (
    LoadOptions,
    LoadTimes,
    drop_cache,
    measure_load,
    read_plainly,
    write_files,
)
from rdt_e2e.checkpoint.index import read_index
from rdt_e2e.checkpoint.stream import ShardReader
from rdt_e2e.errors import ConfigError, EnvironmentCheckError


def options(folder, **changes):
    return LoadOptions(**({"layers": 2, "num_ranks": 2, "repeats": 1, "folder": folder} | changes))


def test_the_files_are_a_checkpoint_with_bytes_on_the_disk(tmp_path):
    write_files(tmp_path / "one", options(tmp_path, widths=TINY))
    index = read_index(tmp_path / "one")
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size  # No holes.
    with ShardReader(index) as reader:
        assert reader.read_whole("lm_head.weight").float().abs().sum() > 0
    drop_cache(tmp_path / "one")
    read_plainly(tmp_path / "one")


def test_both_ways_of_reading_are_measured(tmp_path):
    found = measure_load(options(tmp_path, widths=TINY))
    assert list(found.seconds) == ["plain, cold", "load, cold", "plain, cached", "load, cached"]
    assert found.num_bytes > 1_000_000
    assert list(tmp_path.iterdir()) == []


def test_the_table_holds_loads_against_plain_reads():
    times = LoadTimes(2_000_000_000, 3.0, {"plain, cold": [1.0], "load, cold": [2.0, 2.5, 4.0]})
    lines = times.table()
    assert lines[1].split()[-2:] == ["2.00", "100%"]
    assert lines[2].split()[-2:] == ["0.80", "40%"]
    assert LoadTimes.from_json(times.to_json()) == times


def test_counts_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="--repeats"):
        measure_load(options(tmp_path, repeats=0))


def test_a_rank_that_fails_is_an_error(tmp_path, monkeypatch):
    from rdt_e2e.bench import load

    monkeypatch.setattr(load, "write_files", lambda root, _options: root.mkdir())
    with pytest.raises(EnvironmentCheckError, match="ended with"):
        measure_load(options(tmp_path))
