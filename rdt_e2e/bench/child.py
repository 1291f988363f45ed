"""The process of one row: reads its task, measures, writes the result."""

import sys
from pathlib import Path

from rdt_e2e.bench.result import RowResult, Task
from rdt_e2e.console import Console
from rdt_e2e.environment import apply_environment, peer_environment
from rdt_e2e.errors import RdtE2EError


def main() -> None:
    """Run the task in the file named by the first argument."""
    task = Task.from_json(Path(sys.argv[1]).read_text())
    console = Console()
    try:
        results = measure(task, console)
    except RdtE2EError as error:
        results = [RowResult(task.row, reason=" ".join(str(error).split()))]
    lines = "[" + ",\n".join(result.to_json() for result in results) + "]\n"
    Path(task.output).write_text(lines)


def measure(task: Task, console: Console) -> list[RowResult]:
    """Measure a row with whatever it needs imported here, after its environment is set."""
    apply_environment(task.config())
    if task.row == "limit":
        from rdt_e2e.bench.limit import measure_limits

        return measure_limits(task)
    if task.row == "ours":
        from rdt_e2e.bench.ours import measure_ours

        return [measure_ours(task, console)]
    if task.row == "wire":
        from rdt_e2e.bench.wire_row import measure_wire

        return measure_wire(task, console)
    peer_environment(task.row)
    from rdt_e2e.bench.peers import measure_peer

    return [measure_peer(task, console)]


if __name__ == "__main__":
    main()
