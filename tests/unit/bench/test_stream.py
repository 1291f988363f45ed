import sys

import pytest

from rdt_e2e.bench.stream import PIECE_BYTES, measure_stream


def test_every_byte_arrives():
    assert measure_stream("127.0.0.1", [sys.executable], 3 * PIECE_BYTES + 5) > 0


def test_a_sender_that_ends_early_is_an_error():
    script = (
        "import socket, sys; c = socket.create_connection((sys.argv[3], int(sys.argv[4])));"
        "c.sendall(b'x' * 10); c.close()"
    )
    # The module that would send comes after the script, as arguments of its own.
    with pytest.raises(ConnectionError, match="90 bytes early"):
        measure_stream("127.0.0.1", [sys.executable, "-c", script], 100)
