"""What one plain TCP connection gets out of a link: the limit that a transfer over it is held against."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

PIECE_BYTES = 1 << 20
TIMEOUT_S = 120.0


def measure_stream(host: str, sender: Sequence[str], num_bytes: int) -> float:
    """Receive bytes from a process of the other side.

    Args:
        host: Address of this side.
        sender: Command line that runs this Python over there; this module does the sending.
        num_bytes: How many.

    Returns:
        Seconds from the first byte to the last.
    """
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        port = listener.getsockname()[1]
        command = [*sender, "-m", "rdt_e2e.bench.stream", host, str(port), str(num_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(TIMEOUT_S)
                return _receive(connection, num_bytes)
        finally:
            process.kill()
            process.wait()


def _receive(connection: socket.socket, num_bytes: int) -> float:
    buffer = bytearray(PIECE_BYTES)
    left = num_bytes - len(connection.recv(1))
    started = time.perf_counter()
    while left > 0:
        got = connection.recv_into(buffer)
        if got == 0:
            raise ConnectionError(f"the sender ended {left} bytes early")
        left -= got
    return time.perf_counter() - started


def send(host: str, port: int, num_bytes: int) -> None:
    """Send bytes to a listening `measure_stream`."""
    piece = bytes(PIECE_BYTES)
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        while num_bytes > 0:
            connection.sendall(piece[:num_bytes])
            num_bytes -= PIECE_BYTES
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # Until the receiver has all and closes.


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
