"""Checks of NIXL and UCX: libraries, settings, and an agent that is built for the purpose."""

import re

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn

THEME = Theme("nixl", "NIXL and UCX")

_RDMA_TRANSPORTS = frozenset(
    {
        "rc",
        "rc_x",
        "rc_v",
        "rc_mlx5",
        "rc_verbs",
        "dc",
        "dc_x",
        "dc_mlx5",
        "ud",
        "ud_x",
        "ib",
        "all",
    }
)
_CUDA_TRANSPORTS = frozenset({"cuda_copy", "cuda", "all"})
_SEGFAULT = (-11, 139)
_LOADER_FOLDERS = ("/usr/lib", "/usr/local/lib", "/opt/ucx/lib", "/opt/hpcx/ucx/lib")


@THEME.check(
    "agent",
    "An agent can be built",
    looks_at="a process that imports nixl, builds one agent and registers 1 MiB of host memory",
    why="Ray builds the agent inside the first pull, where the same failure reads `tensor transport "
    "not available`.",
    sources=("vllm#56687", "nixl#334", "nixl#177", "nixl#503"),
    at_build=True,
)
def _agent(context: Context) -> Finding:
    found = context.probe
    fix = f"{context.host.python} -m rdt_e2e.fabric.probe  # shows the whole error"
    if "error" in found:
        return fail(str(found["error"]), fix)
    if found["registered"]["cpu"] is not None:
        return fail(f"1 MiB of host memory: {found['registered']['cpu']}", fix)
    return ok(f"{found['module']}, backend {context.backend}")


@THEME.check(
    "exit",
    "Its process ends cleanly",
    looks_at="exit status of that process, UCX_MODULES, and its copies of libibverbs",
    why="The wheels' EFA module loads the system's libibverbs beside their own: every process that used "
    "NIXL then crashes at exit, after correct results.",
    sources=("seen running: nixl 1.5.1 wheels beside ibverbs-providers 44 of Debian 12",),
    at_build=True,
)
def _exit(context: Context) -> Finding:
    modules = context.environ.get("UCX_MODULES", "")
    is_aws = any(port.is_efa for port in context.topology.ports)
    fix = "export UCX_MODULES=^efa  # in the image, before `ray start`"
    code = context.probe_result.code
    if code in _SEGFAULT:
        return fail(f"it crashed at exit (status {code}) with UCX_MODULES={modules!r}", fix)
    if "error" in context.probe:
        return skip("there is no NIXL agent; see nixl.agent")
    copies = context.probe["libraries"].get("libibverbs", [])
    if len(copies) > 1:
        return fail(f"two libibverbs in one process: {' and '.join(copies)}", fix)
    if is_aws and "^efa" in modules:
        return fail(f"UCX_MODULES={modules} on a machine with EFA", "unset UCX_MODULES")
    return ok(f"status {code}, one libibverbs")


@THEME.check(
    "one-ucx",
    "One UCX, and NIXL's own",
    looks_at="libraries that the agent's process has loaded",
    why="A second libucp, of the system or of HPC-X, mixes with the wheel's: `UCP version is "
    "incompatible`, or a crash in the first transfer.",
    sources=("nixl#170", "nixl#386", "sglang#5709", "ml-containers#173"),
    at_build=True,
)
def _one_ucx(context: Context) -> Finding:
    if "error" in context.probe:
        return skip("there is no NIXL agent; see nixl.agent")
    copies = context.probe["libraries"].get("libucp", [])
    if len(copies) > 1:
        fix = "remove the folder of the other one from LD_LIBRARY_PATH and LD_PRELOAD"
        return fail(f"{len(copies)} copies: {' and '.join(copies)}", fix)
    if copies and "nixl_cu" not in copies[0]:
        return warn(f"{copies[0]}, not the one that NIXL's wheel carries", "unset LD_LIBRARY_PATH")
    return ok(copies[0] if copies else "NIXL's own, linked in")


@THEME.check(
    "loader-path",
    "No other UCX first on the loader's path",
    looks_at="LD_LIBRARY_PATH and LD_PRELOAD, and the folders they name",
    why="CUDA base images bring HPC-X, whose scripts put its UCX before all others; a worker that "
    "imports in another order than the doctor meets it.",
    sources=("nixl#170", "sglang#5709"),
    at_build=True,
)
def _loader_path(context: Context) -> Finding:
    folders = [f for f in context.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    hits = [f for f in folders if any(n.startswith("libucp.so") for n in context.names(f))]
    hits += [f for f in re.split(r"[ :]", context.environ.get("LD_PRELOAD", "")) if "libuc" in f]
    if hits:
        variable = "LD_LIBRARY_PATH" if hits[0] in folders else "LD_PRELOAD"
        return fail(f"UCX in {hits[0]}", f"take it out of {variable}, or remove that package")
    system = [
        f for f in _LOADER_FOLDERS if any(n.startswith("libucp.so") for n in context.names(f))
    ]
    return ok(f"none; another UCX lies in {system[0]}, behind NIXL's" if system else "none")


@THEME.check(
    "rdma-module",
    "This UCX can do RDMA and CUDA",
    looks_at="UCX modules that came with the NIXL build",
    why="A UCX that was built without verbs or CUDA works, over TCP and through host memory, and says "
    "nothing.",
    sources=("dynamo#1314", "nixl#1617"),
    at_build=True,
)
def _rdma_module(context: Context) -> Finding:
    if "error" in context.probe:
        return skip("there is no NIXL agent; see nixl.agent")
    modules = set(context.probe["ucx_modules"])
    if not modules:
        return skip("this NIXL build keeps its UCX elsewhere")
    missing = sorted({"uct_ib", "uct_ib_mlx5", "uct_cuda"} - modules)
    if missing:
        return fail(f"without {', '.join(missing)}", "install the nixl wheel again, or rebuild UCX")
    return ok("uct_ib, uct_ib_mlx5 and uct_cuda are there")


@THEME.check(
    "gpu-memory-type",
    "The backend knows GPU memory",
    looks_at="memory types of the agent's backend",
    why="A backend without VRAM_SEG takes GPU addresses for host memory; older releases only warned.",
    sources=("nixl#1385", "nixl#1393", "nixl#1617"),
    at_build=True,
)
def _gpu_memory_type(context: Context) -> Finding:
    if "error" in context.probe:
        return skip("there is no NIXL agent; see nixl.agent")
    types = context.probe["memory_types"]
    if "VRAM_SEG" in types:
        return ok(", ".join(types))
    return fail(", ".join(types) or "none", "install the nixl wheel of torch's CUDA release")


@THEME.check(
    "ucx-tls",
    "UCX_TLS leaves RDMA and CUDA on",
    looks_at="UCX_TLS",
    why="Recipes of clouds set UCX_TLS=tcp for MPI start-up; NIXL then moves every byte over TCP, or "
    "through host memory, and the run only seems slow.",
    sources=("ome#837", "nixl#1385", "nixl#1617", "docs.coreweave.com: FAQ"),
)
def _ucx_tls(context: Context) -> Finding:
    value = context.environ.get("UCX_TLS")
    if not context.wants_gpu:
        return skip("without GPUs TCP is what is meant")
    if value is None or value == "all":
        return ok("not set: UCX chooses")
    names = set(value.lstrip("^").split(","))
    fix = "unset UCX_TLS\nexport UCX_TLS=rc,cuda_copy,cuda_ipc,self,sm  # fails rather than use TCP"
    if value.startswith("^"):
        lost = names & (_RDMA_TRANSPORTS | _CUDA_TRANSPORTS)
        return (
            fail(f"UCX_TLS={value} turns {', '.join(sorted(lost))} off", fix) if lost else ok(value)
        )
    if not names & _CUDA_TRANSPORTS:
        return fail(f"UCX_TLS={value} has no cuda_copy: GPU memory is taken for host memory", fix)
    if context.wants_rdma and not names & _RDMA_TRANSPORTS:
        return fail(f"UCX_TLS={value} has no RDMA transport", fix)
    return ok(f"UCX_TLS={value}")


@THEME.check(
    "net-devices",
    "UCX_NET_DEVICES names fabric ports",
    looks_at="UCX_NET_DEVICES, against the RDMA ports of this node",
    why="One value for a whole node gives every rank the same NICs; an Ethernet interface there turns "
    "RDMA off; a management port among them breaks the connection. Unset, each rank gets the NIC near "
    "its GPU.",
    sources=("ome#837", "dynamo#10852", "smg#2520", "ucx#9727", "modelexpress#255"),
)
def _net_devices(context: Context) -> Finding:
    value = context.environ.get("UCX_NET_DEVICES")
    if value is None or value == "all":
        return ok("not set: each rank is given its own")
    if not context.topology.ports and not context.wants_rdma:
        return skip("no RDMA device is here, and none is needed")
    plan, fix = context.nic_plan, "unset UCX_NET_DEVICES  # each rank is then given its own"
    known = {port.name for port in context.topology.ports}
    names = [name if ":" in name else f"{name}:1" for name in value.split(",") if name]
    strangers = [name for name in names if name not in known]
    if strangers:
        return fail(f"UCX_NET_DEVICES={value}: {strangers[0]} is no RDMA port here", fix)
    barred = [name for name in names if name in plan.excluded]
    if barred:
        return fail(f"{barred[0]}: {plan.excluded[barred[0]]}", fix)
    if len(context.topology.gpus) > len(names):
        text = f"UCX_NET_DEVICES={value}: {len(names)} for {len(context.topology.gpus)} GPUs"
        return warn(text, fix)
    return ok(f"UCX_NET_DEVICES={value}")


@THEME.check(
    "plugin-paths",
    "No path to plugins of another build",
    looks_at="NIXL_PLUGIN_DIR and UCX_MODULE_DIR",
    why="These replace the wheels' own folders. A path that is gone leaves no backend; one of another "
    "build mixes two releases.",
    sources=("nixl#1628", "nixl#334", "vllm#41048"),
    at_build=True,
)
def _plugin_paths(context: Context) -> Finding:
    for name in ("NIXL_PLUGIN_DIR", "UCX_MODULE_DIR"):
        folder = context.environ.get(name)
        if folder is None:
            continue
        if not context.names(folder):
            return fail(f"{name}={folder} is empty or gone", f"unset {name}")
        variants = [
            v for v in ("nixl_cu12", "nixl_cu13") if v.replace("_", "-") in context.packages
        ]
        if re.search(r"nixl_cu\d+", folder) and not any(v in folder for v in variants):
            return fail(
                f"{name}={folder} is of a NIXL build that is not installed", f"unset {name}"
            )
    return ok("none, or one that exists")


@THEME.check(
    "lanes",
    "UCX would use RDMA",
    looks_at="transports that UCX's log names for the agent's own endpoint",
    why="The last word is UCX's: with all devices, limits and settings right it may still have chosen "
    "TCP, and only its log says so. `--pair` asks between the two nodes.",
    sources=("dynamo#1314", "vllm#42075"),
)
def _lanes(context: Context) -> Finding:
    if not context.nic_plan.usable:
        return skip("UCX has no RDMA port to use here; see rdma.fabric")
    if "error" in context.probe:
        return skip("there is no NIXL agent; see nixl.agent")
    lanes = context.probe["ucx_lanes"]
    if not lanes:
        return skip("UCX's log names none")
    if any(re.match(r"(rc|dc|ud)", lane) for lane in lanes):
        return ok(", ".join(lanes))
    fix = "rdt-e2e doctor --group rdma --group node  # uverbs, memlock, GIDs, UCX_TLS"
    return fail(f"only {', '.join(lanes)}", fix)
