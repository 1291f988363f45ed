"""Faults of the network between the two nodes in the middle of a sync, made in their namespaces.

Each test gives a named error in bounded time, or a sync that passes; the deployment can sync again
afterwards. The trainer's link is slow throughout, so that a sync lasts long enough to be met.
"""

import contextlib
import json
import re
import threading
import time

import pytest

from tests.containers.project import output

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

SLOW = "16mbit"
SHORT_S = 10.0
"""Of a link that is down and comes back; the limit of silence is 20 s in the profile `local`."""
ENDS_S = 300.0


@pytest.fixture(scope="module")
def up(project):
    """The deployment, put back into order after whatever a test did."""
    project.deploy()
    return project


def cause(error):
    """A job's error without what vLLM says around one of its workers' errors."""
    found = re.search(r"Worker failed with error '(.*)', please check", error)
    return found[1] if found else error


def host_end(project, service):
    """This machine's end of a container's link: what a cable would be, for the container."""
    (link,) = json.loads(project.in_network_of(service, "ip", "-j", "link", "show", "eth0"))
    here = json.loads(output("ip", "-j", "link", environment=project.environment))
    (end,) = [one["ifname"] for one in here if one["ifindex"] == link["link_index"]]
    return end


@contextlib.contextmanager
def link_down(project, service):
    end = host_end(project, service)
    output("ip", "link", "set", end, "down", environment=project.environment)
    try:
        yield
    finally:
        output("ip", "link", "set", end, "up", environment=project.environment)


@contextlib.contextmanager
def one_direction_dropped(project):
    rule = ("OUTPUT", "-d", project.address("inference"), "-j", "DROP")
    project.in_network_of("trainer", "iptables", "-w", "10", "-A", *rule)
    try:
        yield
    finally:
        project.in_network_of("trainer", "iptables", "-w", "10", "-D", *rule)


@contextlib.contextmanager
def address_gone(project):
    shown = project.in_network_of("trainer", "ip", "-j", "-4", "address", "show", "eth0")
    (held,) = json.loads(shown)[0]["addr_info"]
    address = f"{held['local']}/{held['prefixlen']}"
    route = project.in_network_of("trainer", "ip", "route", "show", "default").split()
    project.in_network_of("trainer", "ip", "address", "del", address, "dev", "eth0")
    try:
        yield
    finally:
        project.in_network_of("trainer", "ip", "address", "add", address, "dev", "eth0")
        project.in_network_of("trainer", "ip", "route", "replace", *route)


def test_a_short_outage_and_a_slow_link_are_survived(up, network_table):
    with up.limited("trainer", SLOW), up.job("--iters", "3") as job:
        up.await_pulls(job)
        with contextlib.ExitStack() as stack:
            down = stack.enter_context(contextlib.ExitStack())
            down.enter_context(link_down(up, "trainer"))
            timer = threading.Timer(SHORT_S, down.close)
            timer.start()
            stack.callback(timer.join)
            job.await_line(r"\] sync 2 \(warm\): ", ENDS_S)
        # In place of the other limit: the third sync is never without one.
        with up.limited("trainer", "100mbit"):
            assert job.end(ENDS_S) == 0, job.output
    assert job.seconds_of("sync 2 (warm)") > SHORT_S
    network_table.add(
        f"trainer's link down for {SHORT_S:.0f} s, limit of silence 20 s",
        None,
        "the sync waits",
        "as ever",
    )
    network_table.add(
        "link limited to 100 Mbit/s (`tc tbf`)", None, "the sync is slower", "as ever"
    )


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("trainer's link down beyond the limit of 20 s", lambda up: link_down(up, "trainer")),
        ("packets from trainer to inference dropped, the others pass", one_direction_dropped),
        ("trainer's address gone", address_gone),
    ],
    ids=["link", "direction", "address"],
)
def test_beyond_the_limit_it_ends_with_a_name(up, network_table, what, fault):
    started = up.started_at("trainer")
    with up.job() as job, up.limited("trainer", SLOW):
        up.await_pulls(job)
        with fault(up):
            began = time.monotonic()
            job.await_line(r"^rdt-e2e: error: ", ENDS_S)
            seconds = time.monotonic() - began
        assert job.end(ENDS_S) != 0
    said = cause(job.error)
    assert re.search(r"(trainer rank|producer|consumer) \d", said), job.error
    # The next test's job, or the last one, syncs first.
    up.deploy()
    again = ", on a trainer node that was started again"
    after = again if up.started_at("trainer") != started else ""
    network_table.add(what, seconds, said, f"passes{after}")


def test_it_syncs_again(up):
    with up.job("--iters", "1") as job:
        assert job.end() == 0, job.output


def test_delay_and_loss(up, network_table):
    discipline = ("netem", "delay", "50ms", "10ms", "loss", "1%")
    try:
        with up.shaped("trainer", *discipline):
            pass
    except AssertionError as error:
        pytest.skip(f"no netem in this kernel: {error}")
    with up.shaped("trainer", *discipline), up.job("--iters", "1") as job:
        assert job.end() == 0, job.output
    network_table.add("50 ms delay, 1 % loss (`tc netem`)", None, "the sync is slower", "as ever")
