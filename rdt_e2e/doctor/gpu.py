"""Checks of the GPUs and their driver."""

import re
from collections.abc import Mapping

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn

THEME = Theme("gpu", "GPU")

MAX_USED_MIB = 1024
"""Memory that a driver and its daemons may hold on a free GPU, in MiB."""

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MIN_DMABUF_KERNEL = (5, 12)


def _absent(context: Context) -> Finding | None:
    """Why a check of the GPUs has nothing to look at, or None when there are some."""
    if context.topology.gpus:
        return None
    return skip("no GPU is here" if context.wants_gpu else "the configuration runs without GPUs")


@THEME.check(
    "present",
    "Enough GPUs",
    looks_at="NVIDIA devices on the PCI bus, and nvidia-smi",
    why="A fleet takes one GPU per rank on one node; a pod that got fewer waits in Ray's queue for "
    "ever.",
    sources=("kuberay#1414", "kuberay#2528"),
)
def _present(context: Context) -> Finding:
    if not context.wants_gpu:
        return skip("the configuration runs without GPUs")
    wanted, states = context.num_gpus_wanted, context.gpu_states
    on_bus = len(context.topology.gpus)
    if not on_bus:
        fix = "docker: --gpus all\nKubernetes: limits nvidia.com/gpu, on a node with the driver"
        return fail(f"none of the {wanted} GPUs that the configuration needs here", fix)
    if states is None:
        fix = "install the NVIDIA driver, or give the container its tools: --gpus all"
        return fail(f"{on_bus} on the bus, but nvidia-smi does not answer", fix)
    text = f"{len(states)} in use here, {wanted} needed"
    if len(states) < wanted:
        return fail(
            text, "lower trainer.num_ranks or inference.data_parallel, or ask for more GPUs"
        )
    return ok(f"{text}: {states[0].name}")


@THEME.check(
    "driver",
    "Driver fits torch's CUDA",
    looks_at="CUDA release in the header of nvidia-smi, and torch's build",
    why="A driver older than the CUDA release of torch and NIXL refuses to initialise.",
    sources=("nixl#1628", "docs.nvidia.com: CUDA compatibility"),
)
def _driver(context: Context) -> Finding:
    absent = _absent(context)
    if absent is not None:
        return absent
    match = re.search(r"CUDA Version: (\d+)\.(\d+)", context.host.run(["nvidia-smi"]).stdout)
    if match is None:
        return fail("nvidia-smi names no CUDA release", "install the NVIDIA driver of this GPU")
    variants = [name for name in ("nixl-cu12", "nixl-cu13") if name in context.packages]
    wanted = max((int(name.removeprefix("nixl-cu")) for name in variants), default=0)
    text = f"the driver offers CUDA {match[1]}.{match[2]}; {', '.join(variants) or 'no NIXL build'}"
    if int(match[1]) < wanted:
        return fail(text, f"install a driver for CUDA {wanted} (580 or newer for CUDA 13)")
    return ok(text)


@THEME.check(
    "free-memory",
    "GPU memory is free",
    looks_at="memory.used of nvidia-smi",
    why="Weights, serve rings and receive rings fill a GPU almost whole; what a dead process left there "
    "ends the run in its last minute of loading.",
    sources=("marin#6335", "SkyRL#1623"),
)
def _free_memory(context: Context) -> Finding:
    absent = _absent(context)
    if absent is not None:
        return absent
    states = context.gpu_states
    if not states:
        return skip("nvidia-smi does not answer")
    busy = [state for state in states if state.used_mib > MAX_USED_MIB]
    if busy:
        used = ", ".join(f"{state.pci} {state.used_mib} MiB" for state in busy)
        fix = "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv  # then end them"
        return warn(f"in use: {used}", fix)
    return ok(f"all {len(states)} free, {states[0].total_mib} MiB each")


@THEME.check(
    "expandable-segments",
    "No expandable segments",
    looks_at=", ".join(_ALLOCATOR_VARIABLES),
    why="Memory of expandable segments cannot be registered for RDMA, or is and then goes over TCP at "
    "0.3 GB/s, with correct data and no error.",
    sources=("nixl#1754", "vllm#52607"),
)
def _expandable_segments(context: Context) -> Finding:
    name = expandable_segments(context.environ)
    if name is None:
        return ok("off")
    fix = f"unset {name}  # in the image, pod or unit, on both nodes"
    return fail(f"{name}={context.environ[name]}", fix)


def expandable_segments(environ: Mapping[str, str]) -> str | None:
    """The variable that turns expandable segments on in an environment, or None."""
    for name in _ALLOCATOR_VARIABLES:
        if re.search(r"expandable_segments\s*:\s*true", environ.get(name, ""), re.IGNORECASE):
            return name
    return None


@THEME.check(
    "direct-rdma",
    "NICs can reach GPU memory",
    looks_at="/sys/module/nvidia_peermem, /proc/driver/nvidia/version, the kernel's release",
    why="Without peermem or dma-buf the NIC cannot read GPU memory: registration fails with `Bad "
    "address`, or bytes are staged through the CPU.",
    sources=("nccl#1939", "libfabric#12409", "ucx#11002", "Mooncake#281", "nv_peer_memory#27"),
)
def _direct_rdma(context: Context) -> Finding:
    absent = _absent(context)
    if absent is not None:
        return absent
    if not context.topology.ports and not context.wants_rdma:
        return skip("no RDMA device is here, and none is needed")
    paths = []
    if "nvidia_peermem" in context.names("/sys/module"):
        paths.append("nvidia_peermem is loaded")
    release = context.text("/proc/sys/kernel/osrelease") or ""
    kernel = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    is_open = "Open Kernel Module" in (context.text("/proc/driver/nvidia/version") or "")
    if is_open and kernel >= _MIN_DMABUF_KERNEL:
        paths.append(f"dma-buf (open driver, kernel {release})")
    if paths:
        return ok(" and ".join(paths))
    text = f"no nvidia_peermem; {'open' if is_open else 'closed'} driver on kernel {release or '?'}"
    return fail(
        text, "modprobe nvidia_peermem  # on the host\nthe open driver, on kernel 5.12 or newer"
    )


@THEME.check(
    "register",
    "A CUDA buffer registers with NIXL",
    looks_at="a process that builds an agent and registers 1 MiB of the first GPU",
    why="It is the one test that covers the wheel's CUDA, the UCX modules, peermem or dma-buf, and the "
    "limits, as the run will meet them.",
    sources=("nixl#1628", "nixl#1385", "nixl#1393", "Mooncake#351", "CE#34", "ucx#8049"),
)
def _register(context: Context) -> Finding:
    absent = _absent(context)
    if absent is not None:
        return absent
    if "error" in context.probe:
        return skip("there is no NIXL agent; see nixl.agent")
    error = context.probe["registered"].get("cuda")
    if error is not None:
        fix = (
            "rdt-e2e doctor --group gpu --group nixl  # nixl-variant, direct-rdma, memlock, UCX_TLS"
        )
        return fail(f"1 MiB of the first GPU: {error}", fix)
    return ok("1 MiB of the first GPU")


@THEME.check(
    "one-visible",
    "Ray may narrow each worker to its GPU",
    looks_at="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES",
    why="Each trainer rank takes the first GPU it sees. Where Ray must not set CUDA_VISIBLE_DEVICES, "
    "all ranks take the same one; a container with `void` sees none.",
    sources=("docs.ray.io: accelerators", "KubeRay sample ray-cluster.overwrite-command.yaml"),
)
def _one_visible(context: Context) -> Finding:
    if not context.wants_gpu:
        return skip("the configuration runs without GPUs")
    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    if context.environ.get(name, "0") not in {"", "0"}:
        return fail(f"{name}={context.environ[name]}", f"unset {name}")
    visible = context.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if visible in {"void", "none"}:
        fix = "run the doctor, and the fleets, in a pod with GPUs; `void` belongs on the head alone"
        return fail(f"NVIDIA_VISIBLE_DEVICES={visible}", fix)
    return ok("Ray sets CUDA_VISIBLE_DEVICES")
