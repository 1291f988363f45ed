"""The end of this process: no helper of it is left running."""

import contextlib
import os
import sys
import time

WAIT_S = 5.0


def end_resource_tracker() -> None:
    """End multiprocessing's resource tracker, and wait for it, as later Pythons do at their exit.

    It removes what was left of shared memory and semaphores once its pipe is closed, and ignores signals.
    Where a service manager watches this process, such as `rdt-e2e-job.service`, it would be killed for
    being left over before it has done so. Register it with `atexit` before multiprocessing is imported:
    what multiprocessing itself does at exit then comes first, and starts no new one.

    Source: `ResourceTracker` of Python 3.11, whose `_stop` waits for ever.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    pipe, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if tracker is None or pipe is None or pid is None:
        return
    os.close(pipe)
    tracker._fd = tracker._pid = None
    deadline = time.monotonic() + WAIT_S
    # Another process that holds the pipe keeps it alive; a fork of this one is not its parent.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
