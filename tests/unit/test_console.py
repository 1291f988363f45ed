"""The console: plain lines off a terminal, a live display on one."""

import contextlib
import io
import os
import pty

import pytest

from rdt_e2e.console import PLAIN_INTERVAL_S, Console


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


def test_steps_are_numbered_and_timed(stream, clock):
    console = Console(stream, num_steps=9, clock=clock)
    with console.step("mini-kimi"):
        clock.now += 1.25
    with console.step("local cluster"):
        console.info("two nodes")
    assert stream.getvalue().splitlines() == [
        "[1/9] mini-kimi ...",
        "[1/9] mini-kimi: 1.2 s",
        "[2/9] local cluster ...",
        "two nodes",
        "[2/9] local cluster: 0.0 s",
    ]


def test_expect_steps_counts_anew(stream, clock):
    console = Console(stream, clock=clock)
    with console.step("alone"):
        pass
    console.expect_steps(2)
    with console.step("first"):
        pass
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[1] alone ..."
    assert lines[2] == "[1/2] first ..."


def test_failed_step_says_so_and_raises(stream, clock):
    console = Console(stream, clock=clock)

    def interrupted():
        with console.step("engine"):
            clock.now += 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().splitlines()[-1] == "[1] engine: stopped after 3.0 s"


def test_plain_progress_is_a_line_now_and_then(stream, clock):
    console = Console(stream, clock=clock)
    with console.progress(40, "training") as progress:
        for _ in range(4):
            clock.now += PLAIN_INTERVAL_S / 2
            progress.advance(10)
    assert stream.getvalue().splitlines() == [
        "  training: 20/40",
        "  training: 40/40",
        "  training: 40/40 in 20.0 s",
    ]


def test_text_is_not_markup(stream):
    Console(stream).info("[bold]a[/bold] [/]")
    assert stream.getvalue() == "[bold]a[/bold] [/]\n"


def read_to_the_end(reader):
    """Everything a terminal was sent, once its other end is closed; one read returns a part of it."""
    parts = []
    # Linux ends a terminal with an error, not with an empty read.
    with contextlib.suppress(OSError):
        while part := os.read(reader, 65536):
            parts.append(part)
    os.close(reader)
    return b"".join(parts).decode()


def test_terminal_shows_steps_progress_and_lines(clock):
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        console = Console(terminal, num_steps=1, clock=clock)
        with console.step("trainer fleet [/x]"), console.progress(2, "rows") as progress:
            progress.advance()
            console.info("rank [0] is ready")
            clock.now += 2
    shown = read_to_the_end(reader)
    assert "[1/1] trainer fleet [/x] ..." in shown
    assert "rank [0] is ready" in shown
    assert "[1/1] trainer fleet [/x]: 2.0 s" in shown


def test_a_meter_appears_with_its_first_numbers():
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        console = Console(terminal)
        assert console.is_live
        with console.step("sync 1"), console.meter("groups") as meter:
            console.info("before")
            meter.show(12, 61, "8.2 GB/s, [3] s left")
            console.info("after")
    before, shown = read_to_the_end(reader).split("before")
    assert "groups" not in before
    assert "groups: 8.2 GB/s, [3] s left" in shown
    assert "12/61" in shown


def test_a_meter_is_silent_where_nobody_looks(stream):
    console = Console(stream)
    assert not console.is_live
    with console.meter("groups") as meter:
        meter.show(1, 2, "8.2 GB/s")
    assert stream.getvalue() == ""
