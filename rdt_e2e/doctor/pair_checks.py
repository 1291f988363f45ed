"""Checks of the two nodes together, from what `pair.py` measured through Ray."""

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn
from rdt_e2e.doctor.gpu import expandable_segments
from rdt_e2e.doctor.pair_facts import PairFacts
from rdt_e2e.environment import ray_environment

THEME = Theme("pair", "Trainer and inference node together")

MAX_CLOCK_OFFSET_S = 0.05
FLOOR_GB_PER_S = {"cpu": 0.05, "cuda": 5.0}
"""Least bandwidth per pair of ranks, in GB/s: far below any fabric, far above memory that fell to TCP."""
RDMA_FLOOR_GB_PER_S = 5.0
MIN_TRAFFIC_SHARE = 0.5
"""A port that sent less than this share of the mean was not used as the others were."""

_NOT_MEASURED = "was not measured; add --pair"
_COMPARED = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_GID_INDEX", "UCX_MODULES", "NCCL_IB_HCA")


def _facts(context: Context) -> PairFacts | Finding:
    if isinstance(context.pair, PairFacts):
        return context.pair
    return skip(_NOT_MEASURED if context.pair is None else "was not measured; see pair.nodes")


@THEME.check(
    "nodes",
    "Two nodes for two fleets",
    looks_at="the nodes that the fleets would be placed on, their host names and boot ids",
    why="On one host NVLink or shared memory stands in for the fabric: such a run proves nothing about "
    "RDMA.",
    sources=("vllm#43375", "nixl#1909"),
)
def _nodes(context: Context) -> Finding:
    if isinstance(context.pair, str):
        return fail(context.pair, "rdt-e2e doctor --group ray  # on both nodes")
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    text = f"trainer {facts.trainer.address}, inference {facts.inference.address}"
    if facts.trainer.host != facts.inference.host:
        return ok(text)
    if context.config.cluster.target == "local":
        return ok(f"{text}, on this machine as the configuration says")
    return warn(f"{text}: one machine", "add a second host to the Ray cluster")


@THEME.check(
    "versions",
    "Same releases on both",
    looks_at="Python, ray, nixl, torch and vllm of a worker on each node",
    why="Pickles, NIXL metadata and vLLM's own messages cross between the nodes; other releases read "
    "them wrongly or refuse.",
    sources=("ray#44063", "kuberay#1265"),
)
def _versions(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    left, right = facts.trainer.versions, facts.inference.versions
    names = sorted({*left, *right})
    differ = [n for n in names if left.get(n) != right.get(n)]
    if differ:
        text = ", ".join(f"{n} {left.get(n)} and {right.get(n)}" for n in differ)
        return fail(text, "run the same image on both nodes")
    return ok(", ".join(f"{n} {left[n]}" for n in names))


@THEME.check(
    "clock",
    "Clocks agree",
    looks_at="time on both nodes against the driver's, the fastest of several calls",
    why="Spans of both nodes are laid over one another in the profile.",
    sources=("rdt-e2e config --keys",),
)
def _clock(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    text = f"{facts.clock_offset_s * 1e3:+.1f} ms, give or take {facts.clock_error_s * 1e3:.1f} ms"
    if abs(facts.clock_offset_s) - facts.clock_error_s > MAX_CLOCK_OFFSET_S:
        return warn(text, "systemctl enable --now chrony  # on both hosts")
    return ok(text)


@THEME.check(
    "environment",
    "The environment reaches Ray's workers",
    looks_at="the environment of a worker on each node",
    why="Workers inherit from their raylet. What was set after `ray start`, or in one pod alone, is "
    "missing on one side, and that side's pulls fail or crawl.",
    sources=(
        "vllm#50413",
        "ome#837",
        "vLLM 0.32.0: RayExecutorV2 copies its environment after the worker has started",
    ),
)
def _environment(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    wanted = ray_environment(context.config)
    names = [n for n in wanted if n.startswith(("UCX_", "RAY_rdt"))]
    for role, node in (("trainer", facts.trainer), ("inference", facts.inference)):
        lacking = [name for name in names if name not in node.environ]
        if lacking:
            settings = " ".join(f"{name}='{wanted[name]}'" for name in lacking)
            text = f"{', '.join(lacking)} not set on the {role} node {node.address}"
            return fail(text, f"export {settings}  # before `ray start` there")
        segments = expandable_segments(node.environ)
        if segments is not None:
            text = f"{segments}={node.environ[segments]} on the {role} node {node.address}"
            return fail(text, f"unset {segments}  # before `ray start` there")
    for name in _COMPARED:
        left, right = facts.trainer.environ.get(name), facts.inference.environ.get(name)
        if left != right:
            text = f"{name} is {left!r} on the trainer, {right!r} on the inference node"
            return warn(text, f"set {name} alike on both nodes, before `ray start`")
    return ok(f"{', '.join(names)} on both")


@THEME.check(
    "gid",
    "GID indices of both nodes",
    looks_at="RoCE v2 GID index of every usable port on both nodes",
    why="A fixed UCX_IB_GID_INDEX is only right where the tables of all ports and nodes agree.",
    sources=("ucx#7785", "ucx#2501"),
)
def _gid(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    indices = sorted({*facts.trainer.gids.values(), *facts.inference.gids.values()})
    if not indices:
        return skip("no RoCE port on either node")
    fixed = facts.trainer.environ.get("UCX_IB_GID_INDEX")
    if len(indices) > 1 and fixed is not None:
        text = f"UCX_IB_GID_INDEX={fixed}, but the ports need {', '.join(map(str, indices))}"
        return fail(text, "unset UCX_IB_GID_INDEX  # on both nodes")
    return ok(f"index {', '.join(map(str, indices))}")


@THEME.check(
    "nics",
    "Each rank has a NIC of its own",
    looks_at="UCX_NET_DEVICES of every rank's process, as a run sets it by its GPU",
    why="UCX chooses for each rank as if it were alone on the node, and several take the same NIC.",
    sources=("ucx#11680", "ray#64542", "modelexpress#255"),
)
def _nics(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    text = "\n".join(f"{name}: {nic}" for name, nic in facts.nics.items())
    if not facts.num_unpinned:
        return ok(text)
    if not context.wants_rdma:
        return skip("the weights cross no fabric here: UCX chooses")
    fix = "rdt-e2e doctor --group rdma  # on both nodes: fabric, affinity"
    return warn(text, fix)


@THEME.check(
    "read-cpu",
    "Host memory can be read, both ways",
    looks_at="a NIXL read of host memory in each direction, checksum and time",
    why="It is the whole path without GPUs: agents, metadata, routes, firewalls.",
    sources=("ucx#10939", "nixl#2109", "dynamo#10852"),
)
def _read_cpu(context: Context) -> Finding:
    return _read(context, "cpu")


@THEME.check(
    "read-cuda",
    "GPU memory can be read, both ways",
    looks_at="a NIXL read of GPU memory by every pair of ranks at once, checksum and time",
    why="Memory that cannot be registered for RDMA still arrives, correctly, at 0.3 GB/s: only the "
    "bandwidth tells.",
    sources=("nixl#1754", "vllm#52607", "ucx#11680", "modelexpress#255"),
)
def _read_cuda(context: Context) -> Finding:
    return _read(context, "cuda")


def _read(context: Context, device: str) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    reads = [read for read in facts.reads if read.device == device]
    if not reads:
        return skip("the configuration runs without GPUs")
    fix = "rdt-e2e doctor  # on both nodes: links, gid, memlock, ucx-tls, expandable-segments"
    for read in reads:
        if read.error:
            return fail(f"{read.direction}: {read.error}", fix)
        if read.num_wrong:
            return fail(f"{read.direction}: {read.num_wrong} reads arrived with other bytes", fix)
    text = ", ".join(
        f"{read.direction} {min(read.gb_per_s):.2f} GB/s" + _times(len(read.gb_per_s))
        for read in reads
    )
    floor = FLOOR_GB_PER_S[device]
    if context.wants_rdma:
        floor = max(floor, RDMA_FLOOR_GB_PER_S)
    if min(min(read.gb_per_s) for read in reads) < floor:
        return fail(f"{text}; the floor is {floor:g} GB/s", fix)
    return ok(text)


def _times(num_pairs: int) -> str:
    return "" if num_pairs == 1 else f" at the slowest of {num_pairs} pairs"


@THEME.check(
    "transport",
    "Transport that UCX chose",
    looks_at="UCX's log of the processes that read",
    why="With every setting right UCX may still fall to TCP, silently.",
    sources=("dynamo#1314", "vllm#42075", "ome#837"),
)
def _transport(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    lanes = sorted({lane for read in facts.reads for lane in read.lanes})
    if not lanes:
        return skip("UCX's log names no transport")
    has_rdma = any(lane.startswith(("rc", "dc", "ud")) for lane in lanes)
    if context.wants_rdma and not has_rdma and context.backend == "UCX":
        fix = "rdt-e2e doctor --group rdma --group nixl  # on both nodes"
        return fail(f"only {', '.join(lanes)}", fix)
    return ok(", ".join(lanes))


@THEME.check(
    "traffic",
    "All NICs carried their share",
    looks_at="port_xmit_data of every usable port, before and after the reads",
    why="Half the NICs idle is half the bandwidth, and nothing else shows it.",
    sources=("ucx#11680", "ucx#11259", "modelexpress#255", "ray#64542"),
)
def _traffic(context: Context) -> Finding:
    facts = _facts(context)
    if isinstance(facts, Finding):
        return facts
    if not facts.traffic:
        return skip("no RDMA port, or none with counters")
    mean = sum(facts.traffic.values()) / len(facts.traffic)
    text = ", ".join(f"{name} {sent / 1e9:.2f} GB" for name, sent in facts.traffic.items())
    fix = "unset UCX_NET_DEVICES  # each rank is then given the NIC near its GPU; see rdma.affinity"
    if mean == 0:
        return fail(f"no bytes over any of {len(facts.traffic)} ports", fix)
    idle = [n for n, sent in facts.traffic.items() if sent < MIN_TRAFFIC_SHARE * mean]
    if idle:
        return warn(f"idle: {', '.join(idle)}; {text}", fix)
    return ok(text)
