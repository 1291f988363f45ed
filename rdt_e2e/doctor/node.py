"""Checks of the node: limits, memory, disks, clock and ports."""

from pathlib import Path

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn

THEME = Theme("node", "Node")

GB = 10**9
MIB = 1 << 20

LOCK_TRIAL_BYTES = 64 * MIB
MIN_MEMLOCK_BYTES = 64 * GB
"""Below this a finite limit is too small for any model worth two nodes."""
MIN_NOFILE = 4096
GOOD_NOFILE = 65536
"""What KubeRay gives its containers (RAY_START_ULIMIT_OPEN_FILES)."""
GOOD_MAP_COUNT = 262_144
MIN_SHM_SHARE = 0.3
"""Share of the memory that Ray sizes its object store by."""
MIN_CACHE_BYTES = 1 * GB
MIN_RUNS_BYTES = 100 * 10**6
RAY_PORTS = {6379: "the Ray head", 8265: "the dashboard", 10001: "Ray clients", 52365: "the agent"}

_CAP_IPC_LOCK = 14
_LISTEN = "0A"


@THEME.check(
    "memlock",
    "Memory can be locked",
    looks_at="the memlock limit, CAP_IPC_LOCK and the uid in /proc/self/status, a 64 MiB lock",
    why="Registering memory for RDMA locks it. Kubernetes gives a container that is not root no use of "
    "IPC_LOCK, so the limit of containerd itself counts.",
    sources=("nvidia-container-toolkit#2037", "kubernetes#3595", "ucx#8229", "cudf-spark#7632"),
)
def _memlock(context: Context) -> Finding:
    if not context.wants_rdma and not context.topology.ports:
        return skip("no RDMA device is here, and none is needed")
    limit, status = context.host.limit("memlock"), context.text("/proc/self/status") or ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    capable = int(fields.get("CapEff", "0").strip() or "0", 16) >> _CAP_IPC_LOCK & 1
    uid = fields.get("Uid", "?").split()[0]
    size = "unlimited" if limit is None else f"{limit / MIB:g} MiB"
    text = f"limit {size}, uid {uid}, CAP_IPC_LOCK {'yes' if capable else 'no'}"
    fix = (
        "docker: --ulimit memlock=-1 --cap-add IPC_LOCK\n"
        "Kubernetes: run as root with IPC_LOCK, or LimitMEMLOCK=infinity for containerd.service"
    )
    if not context.host.can_lock(LOCK_TRIAL_BYTES):
        return fail(f"64 MiB cannot be locked ({text})", fix)
    if limit is not None and not capable and limit < MIN_MEMLOCK_BYTES:
        return fail(f"64 MiB can be locked, but a rank registers GB ({text})", fix)
    return ok(text)


@THEME.check(
    "map-count",
    "Memory maps per process",
    looks_at="/proc/sys/vm/max_map_count",
    why="A queue of a NIC is a mapping, and torch, Ray and UCX hold tens of thousands more; at the "
    "kernel's default `ibv_create_cq` cannot allocate memory.",
    sources=("ucx#6264", "ucx#8229"),
)
def _map_count(context: Context) -> Finding:
    count = context.number("/proc/sys/vm/max_map_count")
    if count is None:
        return skip("the kernel does not say")
    if not context.wants_rdma and not context.topology.ports:
        return skip("no RDMA device is here, and none is needed")
    if count < GOOD_MAP_COUNT:
        return warn(f"{count}", f"sysctl -w vm.max_map_count={GOOD_MAP_COUNT}")
    return ok(f"{count}")


@THEME.check(
    "open-files",
    "Open files",
    looks_at="the nofile limit of this process",
    why="Each Ray worker holds a connection to each other one; at 1024 files a cluster of two 8-GPU "
    "nodes already fails with errors that name something else.",
    sources=("KubeRay: RAY_START_ULIMIT_OPEN_FILES",),
)
def _open_files(context: Context) -> Finding:
    limit = context.host.limit("nofile")
    fix = f"ulimit -n {GOOD_NOFILE}\ndocker: --ulimit nofile={GOOD_NOFILE}"
    if limit is None:
        return ok("unlimited")
    if limit < MIN_NOFILE:
        return fail(f"{limit}", fix)
    wanted = GOOD_NOFILE if context.wants_gpu else MIN_NOFILE
    return ok(f"{limit}") if limit >= wanted else warn(f"{limit}", fix)


@THEME.check(
    "shm",
    "Shared memory",
    looks_at="size of /dev/shm and the memory of the machine or container",
    why="Ray's object store takes 30 % of the memory in /dev/shm; where it does not fit, it falls back "
    "to disk, and NCCL to sockets.",
    sources=("docs.ray.io: object store memory", "vllm#42075"),
)
def _shm(context: Context) -> Finding:
    memory = _memory_bytes(context)
    shm = context.host.space(context.host.root / "dev/shm")
    if memory is None or shm is None:
        return fail("there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    text = f"{shm.total_bytes / GB:.1f} GB of /dev/shm, {memory / GB:.1f} GB of memory"
    needed = memory * MIN_SHM_SHARE
    if shm.total_bytes >= needed:
        return ok(text)
    if context.config.cluster.target == "local" and shm.total_bytes >= GB:
        return ok(f"{text}; a local cluster takes less than 1 GB")
    size = f"{needed / GB:.0f}g"
    fix = f"docker: --shm-size={size}\nKubernetes: an emptyDir with medium: Memory at /dev/shm"
    return warn(text, fix)


@THEME.check(
    "cache-disk",
    "Disk for the cache",
    looks_at="free space of paths.cache_dir",
    why="The embedded model is built there; a disk that fills up during the build leaves nothing.",
    sources=("rdt-e2e config --keys",),
)
def _cache_disk(context: Context) -> Finding:
    return _disk(context, context.config.paths.cache_dir, MIN_CACHE_BYTES, "paths.cache_dir")


@THEME.check(
    "runs-disk",
    "Disk for the runs",
    looks_at="free space of paths.runs_dir",
    why="Each run writes its configuration, texts, timings and profiles; a full disk ends it.",
    sources=("rdt-e2e config --keys",),
)
def _runs_disk(context: Context) -> Finding:
    return _disk(context, context.config.paths.runs_dir, MIN_RUNS_BYTES, "paths.runs_dir")


def _disk(context: Context, path: Path, needed: int, key: str) -> Finding:
    space = context.host.space(path.absolute())
    fix = f"free some space, or --set {key}=DIR on a larger disk"
    if space is None:
        return fail(f"{path} cannot be reached", fix)
    text = f"{space.free_bytes / GB:.1f} GB free at {path}"
    return ok(text) if space.free_bytes >= needed else fail(text, fix)


@THEME.check(
    "clock",
    "Clock is synchronised",
    looks_at="chronyc tracking, or timedatectl",
    why="Spans of both nodes are laid over one another; two clocks that drift apart show pulls that "
    "land before they were asked for. `--pair` measures the offset itself.",
    sources=("rdt-e2e doctor --pair",),
)
def _clock(context: Context) -> Finding:
    if context.config.cluster.target == "local":
        return skip("both Ray nodes are on this machine")
    fix = "systemctl enable --now chrony  # on the host"
    tracking = context.host.run(["chronyc", "-c", "tracking"])
    if tracking.code == 0:
        cells = tracking.stdout.strip().split(",")
        # CSV of `tracking`: the stratum is third (0 without a source), the offset in seconds fifth.
        if len(cells) > 4 and cells[2] != "0":
            return ok(f"chrony: {float(cells[4]) * 1e3:+.3f} ms from its source")
        return warn("chrony has no source", fix)
    state = context.host.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    if state.code == 0:
        synchronised = state.stdout.strip() == "yes"
        return ok("timedatectl: synchronised") if synchronised else warn("not synchronised", fix)
    return skip("neither chronyc nor timedatectl answers here; the host keeps a container's clock")


@THEME.check(
    "ports",
    "Ray's ports are free, or Ray's",
    looks_at="listening sockets in /proc/net/tcp and tcp6, and Ray's processes",
    why="With hostNetwork two pods of one host share ports: the second raylet fails to bind, or joins "
    "the first one's cluster.",
    sources=("kuberay#1738", "skypilot#9644"),
)
def _ports(context: Context) -> Finding:
    if context.config.cluster.target == "local":
        return skip("a local cluster takes ports that are free")
    listening = _listening(context)
    if listening is None:
        return skip("/proc/net/tcp cannot be read")
    taken = sorted(set(RAY_PORTS) & listening)
    if not taken:
        return ok(f"{', '.join(map(str, RAY_PORTS))} are free")
    if context.raylets:
        return ok(f"Ray runs here; in use: {', '.join(map(str, taken))}")
    names = ", ".join(f"{port} ({RAY_PORTS[port]})" for port in taken)
    fix = f"ss -ltnp 'sport = :{taken[0]}'  # then end it, or give Ray another port"
    return warn(f"in use by something that is not Ray: {names}", fix)


@THEME.check(
    "one-raylet",
    "Each Ray node has its own address",
    looks_at="--node_ip_address and --gcs-address of the raylets that run here",
    why="Ray and vLLM tell nodes apart by address: two raylets with one address collapse into one "
    "node, and both fleets land on it.",
    sources=("skypilot#9644", "kuberay#1738"),
)
def _one_raylet(context: Context) -> Finding:
    # Two clusters on one machine may well use the same loopback address.
    nodes = [(raylet.cluster, raylet.address) for raylet in context.raylets if raylet.address]
    if not nodes:
        return skip("no raylet runs here")
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if twice:
        fix = "required pod anti-affinity, one Ray pod per host; by hand: ray stop, then start one"
        return fail(f"{nodes.count(twice[0])} raylets of {twice[0][0]} at {twice[0][1]}", fix)
    return ok(f"raylets at {', '.join(sorted({address for _, address in nodes}))}")


def _memory_bytes(context: Context) -> int | None:
    """Memory of the container, or of the machine when it has no limit."""
    rows = (context.text("/proc/meminfo") or "").splitlines()
    total = next((row.split()[1] for row in rows if row.startswith("MemTotal:")), None)
    if total is None:
        return None
    memory = int(total) * 1024
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    for path in limits:
        limit = context.number(path)
        if limit is not None:
            memory = min(memory, limit)
    return memory


def _listening(context: Context) -> set[int] | None:
    tables = [context.text(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    if all(table is None for table in tables):
        return None
    rows = [line.split() for table in tables for line in (table or "").splitlines()[1:]]
    # Columns: number, local address:port in hex, remote, state.
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTEN
    }
