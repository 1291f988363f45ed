"""The files of records: truncation, damage, a full disk, two runs at once, two nodes on one disk."""

import contextlib
import json
import os
import subprocess
import sys
import threading

from rdt_e2e.profiling.lines import MAX_LINE_BYTES, RECORD_VERSION, LineFile, read_records
from rdt_e2e.profiling.nodes import empty_folder, read_folder, remove_folder
from rdt_e2e.profiling.place import Place


def test_a_restart_empties_the_file_under_a_writer_that_goes_on(tmp_path):
    file = LineFile(tmp_path / "new" / "consumer-0.jsonl")
    file.restart()
    file.append({"iteration": 1})
    file.restart()
    file.append({"iteration": 2})
    file.close()
    text = (tmp_path / "new" / "consumer-0.jsonl").read_text()
    assert json.loads(text) == {"v": RECORD_VERSION, "iteration": 2}


def test_threads_do_not_mix_their_lines(tmp_path):
    file = LineFile(tmp_path / "one.jsonl")
    file.restart()

    def write(number):
        for _ in range(200):
            file.append({"iteration": 1, "from": number, "filler": "x" * 500})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    records, num_damaged = read_records((tmp_path / "one.jsonl").read_text().splitlines(), 1)
    assert (len(records), num_damaged, file.num_dropped) == (800, 0, 0)


def test_a_line_beyond_the_limit_is_dropped_and_counted(tmp_path):
    file = LineFile(tmp_path / "one.jsonl")
    file.restart()
    file.append({"iteration": 1, "text": "x" * MAX_LINE_BYTES})
    file.append({"iteration": 1, "text": "x" * (MAX_LINE_BYTES - 100)})
    file.close()
    assert file.num_dropped == 1
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 1


def test_a_full_disk_costs_records_and_one_warning(tmp_path, caplog):
    # Linux's device that is always full: opening it works, and no write does.
    (tmp_path / "one.jsonl").symlink_to("/dev/full")
    file = LineFile(tmp_path / "one.jsonl")
    file.restart()
    file.append({"iteration": 1})
    file.append({"iteration": 1})
    assert file.num_dropped == 2
    file.close()
    assert len(caplog.records) == 1


def test_a_disk_that_fills_up_within_a_line_costs_that_line_alone(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "one.jsonl")
    file.restart()
    write = os.write
    monkeypatch.setattr(os, "write", lambda number, line: write(number, line[: len(line) // 2]))
    file.append({"iteration": 1, "from": "the last that did not fit"})
    monkeypatch.undo()
    file.append({"iteration": 1, "from": "the first after it"})
    file.append({"iteration": 1, "from": "the second"})
    file.close()
    records, num_damaged = read_records((tmp_path / "one.jsonl").read_text().splitlines(), 1)
    assert [record["from"] for record in records] == ["the first after it", "the second"]
    assert (num_damaged, file.num_dropped) == (1, 1)


def test_two_processes_on_one_file_do_not_mix_their_lines(tmp_path):
    """Such as the ranks of a driver that was lost and of the one after it."""
    code = (
        "import sys, pathlib\n"
        "from rdt_e2e.profiling.lines import LineFile\n"
        "file = LineFile(pathlib.Path(sys.argv[1]))\n"
        "file.restart()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for number in range(300):\n"
        "    file.append({'iteration': 1, 'from': sys.argv[2], 'filler': 'x' * 700})\n"
    )
    file = tmp_path / "one.jsonl"
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, file, name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in ("a", "b")
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
    records, num_damaged = read_records(file.read_text().splitlines(), 1)
    assert (len(records), num_damaged) == (600, 0)


def test_a_folder_that_cannot_be_made_costs_records_and_one_warning(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file")
    file = LineFile(tmp_path / "taken" / "one.jsonl")
    file.restart()
    file.append({"iteration": 1})
    assert file.num_dropped == 1
    assert len(caplog.records) == 1


def test_damaged_lines_and_those_of_other_syncs_are_left_out():
    good = json.dumps({"v": RECORD_VERSION, "iteration": 2, "kind": "row"})
    late = json.dumps({"v": RECORD_VERSION, "iteration": 1, "kind": "row"})
    newer = json.dumps({"v": RECORD_VERSION + 1, "iteration": 2})
    records, num_damaged = read_records([good, good[:20], late, "", "[1]", newer, good], 2)
    assert len(records) == 2
    assert num_damaged == 3


def test_nodes_on_one_disk_and_runs_at_once_keep_apart(tmp_path):
    first, second = Place(str(tmp_path), "run-1", "summary"), Place(str(tmp_path), "run-2", "full")
    for place in (first, second):
        for node in ("a", "b"):
            empty_folder(place, node)
            (place.folder(node) / "consumer-0.jsonl").write_text(f"{place.run} {node}\nsecond\n")
    assert read_folder(first, "a")[1] == ["run-1 a", "second"]
    assert read_folder(second, "b")[1] == ["run-2 b", "second"]
    sample = empty_folder(first, "a")
    assert sample["memory_total_bytes"] > 0
    assert read_folder(first, "a")[1] == []
    assert read_folder(first, "b")[1] == ["run-1 b", "second"]
    remove_folder(first, "b")
    assert read_folder(first, "b")[1] == []
    assert read_folder(second, "b")[1]
