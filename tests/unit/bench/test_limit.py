from rdt_e2e.bench.k2_slice import TINY, write_slice
from rdt_e2e.bench.limit import measure_limits
from rdt_e2e.bench.result import TRANSPORT, Task


def test_limits_move_the_bytes_of_one_sync(tmp_path):
    num_bytes = write_slice(tmp_path, TINY, 2, seed=1)
    task = Task("limit", "local", {}, (str(tmp_path), str(tmp_path)), 3, "")
    copy, broadcast = measure_limits(task)
    for result in (copy, broadcast):
        assert result.reason is None
        assert result.num_bytes == num_bytes
        assert len(result.seconds[TRANSPORT]) == 3
        assert min(result.seconds[TRANSPORT]) > 0
