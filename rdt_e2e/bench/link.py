"""Two network namespaces joined by a link of a set rate: a fabric whose speed is known.

Everything is made under a name of this process and removed by that name, also after a failure. Nothing
outside of the two namespaces is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from rdt_e2e.errors import EnvironmentCheckError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ADDRESSES = {"trainer": "198.18.0.1", "inference": "198.18.0.2"}
"""Of the block that is set aside for benchmarks (RFC 2544); seen inside the namespaces only."""
MTU = 9000
"""Jumbo frames, as data fabrics have: headers are 0.7 % of the bytes, and 4 % at 1500."""
BURST_BYTES = 256 << 10
"""What may leave at once; more than the largest packet before segmentation, 64 KiB."""
QUEUE_MS = 20
"""Longest time a packet waits in the queue before it is dropped, in milliseconds."""
END_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Link:
    """A link between the namespaces of the two fleets; made by `shaped_link`.

    Attributes:
        namespaces: Name of the network namespace by role, `trainer` and `inference`.
        devices: Name of the link's end by role.
    """

    namespaces: Mapping[str, str]
    devices: Mapping[str, str]

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Limit both directions to a rate, link-level headers included; None for no limit.

        Raises:
            EnvironmentCheckError: The kernel has no token bucket filter.
        """
        for role, device in self.devices.items():
            where = ("-n", self.namespaces[role], "qdisc")
            # Deleting what is not there is an error, replacing it is not.
            _tool("tc", *where, "replace", "dev", device, "root", "pfifo_fast")
            if bytes_per_s is not None:
                bucket = ("rate", f"{bytes_per_s * 8:.0f}bit", "burst", f"{BURST_BYTES}b")
                limit = ("latency", f"{QUEUE_MS}ms")
                _tool("tc", *where, "replace", "dev", device, "root", "tbf", *bucket, *limit)

    def command(self, role: str, *arguments: str) -> list[str]:
        """The command line that runs this Python with arguments in a role's namespace."""
        return ["ip", "netns", "exec", self.namespaces[role], sys.executable, *arguments]


def check_privileges() -> None:
    """Refuse early, with what is missing.

    Raises:
        EnvironmentCheckError: Not root, or `ip` or `tc` is not installed.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise EnvironmentCheckError(
            f"the bench `wire` needs {' and '.join(missing)} to make its link; install iproute2"
        )
    if os.geteuid() != 0:
        raise EnvironmentCheckError(
            "the bench `wire` makes network namespaces and needs root for it (CAP_NET_ADMIN and "
            "CAP_SYS_ADMIN); run it as root, or in a container with both"
        )


@contextlib.contextmanager
def shaped_link() -> Iterator[Link]:
    """Make the namespaces and the link for the length of a block.

    Raises:
        EnvironmentCheckError: They cannot be made; what was made until then is removed.
    """
    check_privileges()
    mark = f"{os.getpid():x}"
    link = Link(
        {role: f"rdt-e2e-{mark}-{role}" for role in ADDRESSES},
        {role: f"rdt{mark}{role[0]}" for role in ADDRESSES},
    )
    with contextlib.ExitStack() as stack:
        for namespace in link.namespaces.values():
            _tool("ip", "netns", "add", namespace)
            stack.callback(_remove_namespace, namespace)
        near, far = ADDRESSES
        ends = [
            (("name", link.devices[role]), ("netns", link.namespaces[role])) for role in (near, far)
        ]
        # Made where they stay: the names are never those of the host.
        _tool("ip", "link", "add", *ends[0][0], *ends[0][1], "type", "veth", "peer", *ends[1][0], *ends[1][1])  # fmt: skip
        for role, address in ADDRESSES.items():
            device, inside = link.devices[role], ("-n", link.namespaces[role])
            _tool("ip", *inside, "addr", "add", f"{address}/30", "dev", device)
            _tool("ip", *inside, "link", "set", device, "mtu", str(MTU), "up")
            _tool("ip", *inside, "link", "set", "lo", "up")
            # Libraries ask the default route for the address of this node.
            _tool("ip", *inside, "route", "add", "default", "dev", device)
        yield link


def _remove_namespace(namespace: str) -> None:
    """End what runs in a namespace, by id, and remove it; its end of the link goes with it."""
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    alive = []
    for pid in listed.stdout.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            alive.append(psutil.Process(int(pid)))
    for signal in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                signal(process)
        _, alive = psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentCheckError(
            f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}; the bench `wire` needs "
            "CAP_NET_ADMIN, CAP_SYS_ADMIN and a kernel with veth and sch_tbf"
        )
