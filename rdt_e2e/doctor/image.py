"""Checks of what an image or a virtual environment holds."""

import platform

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn

THEME = Theme("image", "Image and packages")

PINS = {"ray": "2.60.0", "nixl": "1.5.1", "torch": "2.13.0"}
"""Releases this package was run with; a test compares them with requirements/*.in."""

PYTHONS = ((3, 11), (3, 12))
NIXL_VARIANTS = ("nixl-cu12", "nixl-cu13")
_TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
_REINSTALL = "make setup  # installs the whole lock file"


@THEME.check(
    "python",
    "Python release",
    looks_at="the interpreter",
    why="The lock files and the wheels of vLLM and NIXL are for Python 3.11 and 3.12; Ray refuses to "
    "join nodes whose Python differs.",
    sources=("kuberay#1265", "ray#44063"),
    at_build=True,
)
def _python(context: Context) -> Finding:
    """Ask the interpreter itself: another one may run the doctor in a test."""
    command = [context.host.python, "-c", "import platform; print(platform.python_version())"]
    version = context.host.run(command).stdout.strip() or platform.python_version()
    if tuple(int(part) for part in version.split(".")[:2]) in PYTHONS:
        return ok(f"Python {version}")
    return fail(f"Python {version}, not 3.11 or 3.12", "PYTHON=python3.12 make setup")


@THEME.check(
    "packages",
    "Ray, NIXL and torch releases",
    looks_at="metadata of the installed packages",
    why="What was tested is one set of releases. A Ray without the RDT fixes crashes on a cold start, "
    "and a torch that vLLM was not built against fails at its first import.",
    sources=("ray#64558", "ray#44063"),
    at_build=True,
)
def _packages(context: Context) -> Finding:
    found = {name: context.packages.get(name) for name in PINS}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        return fail(f"not installed: {', '.join(missing)}", _REINSTALL)
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    # A local version (2.13.0+cpu) is the same source.
    if all(str(found[name]).partition("+")[0] == pin for name, pin in PINS.items()):
        return ok(text)
    pins = ", ".join(f"{name} {pin}" for name, pin in PINS.items())
    return warn(f"{text}; run with {pins}", _REINSTALL)


@THEME.check(
    "nixl-variant",
    "One NIXL build, of torch's CUDA",
    looks_at="metadata of nixl-cu12, nixl-cu13 and torch",
    why="`pip install nixl` brings a build per CUDA release. The wrong one takes GPU memory for host "
    "memory and stages every byte through the CPU, or fails with NIXL_ERR_BACKEND.",
    sources=("vllm#41048", "nixl#1628"),
    at_build=True,
)
def _nixl_variant(context: Context) -> Finding:
    found = [name for name in NIXL_VARIANTS if name in context.packages]
    if not found:
        return fail("neither nixl-cu12 nor nixl-cu13 is installed", _REINSTALL)
    cuda = _cuda_major(context)
    wanted = f"nixl-cu{cuda}" if cuda else found[0]
    fix = f"pip uninstall -y {' '.join(NIXL_VARIANTS)} && pip install --no-deps {wanted}==1.5.1"
    if len(found) > 1:
        return fail(f"both {' and '.join(found)} are installed", fix)
    if wanted not in found:
        return fail(f"{found[0]} beside a torch for CUDA {cuda}", fix)
    return ok(f"{found[0]} alone{f', as torch for CUDA {cuda}' if cuda else ''}")


@THEME.check(
    "torch-extras",
    "No torch add-ons of another build",
    looks_at="metadata of torch, torchvision, torchaudio and torchcodec",
    why="The index's torchvision, torchaudio and torchcodec are built against the CUDA torch; beside a "
    "CPU torch they do not load, and `import transformers` fails with them.",
    sources=("requirements/cpu-exclude.txt",),
    at_build=True,
)
def _torch_extras(context: Context) -> Finding:
    if not context.packages.get("torch", "").endswith("+cpu"):
        return skip("torch is not a CPU build")
    extras = [name for name in _TORCH_EXTRAS if name in context.packages]
    if extras:
        return fail(
            f"{', '.join(extras)} beside a CPU torch", f"pip uninstall -y {' '.join(extras)}"
        )
    return ok("none beside the CPU torch")


@THEME.check(
    "programs",
    "bash and wget are there",
    looks_at="PATH",
    why="KubeRay starts Ray through bash, and its probes call wget; without them a pod is restarted "
    "for ever.",
    sources=("kuberay#2063",),
    at_build=True,
)
def _programs(context: Context) -> Finding:
    missing = [name for name in ("bash", "wget") if context.host.which(name) is None]
    if missing:
        return warn(f"missing: {', '.join(missing)}", f"apt-get install -y {' '.join(missing)}")
    return ok("both on PATH")


@THEME.check(
    "bytecode",
    "Ray is compiled ahead",
    looks_at="__pycache__ beside ray's modules",
    why="KubeRay's wait container has 0.2 CPU and 256 MiB for `ray health-check`; compiling Ray's "
    "modules there takes a minute more, or ends it for lack of memory.",
    sources=("kuberay#2735", "kuberay#5138", "kuberay#5145"),
    at_build=True,
)
def _bytecode(context: Context) -> Finding:
    folder = context.host.package_folder("ray")
    if folder is None:
        return skip("ray is not installed")
    if context.config.cluster.target == "local" and not context.at_build:
        return skip("no KubeRay is needed for a local cluster")
    if (folder / "__pycache__").is_dir() and (folder / "_private" / "__pycache__").is_dir():
        return ok(f"compiled in {folder}")
    return warn(
        "ray's modules are not compiled", f"{context.host.python} -m compileall -q {folder}"
    )


def _cuda_major(context: Context) -> str:
    """CUDA release that torch was built for, such as `13`; empty for a CPU build or none.

    The version alone is silent for wheels of the index, so the CUDA runtime it depends on is asked.
    """
    version = context.packages.get("torch", "")
    if version.endswith("+cpu"):
        return ""
    if "+cu" in version:
        return version.partition("+cu")[2][:2]
    # Wheels of the index carry no local version; the runtime package that they need tells.
    runtime = context.packages.get("nvidia-cuda-runtime")
    if runtime is not None:
        return runtime.partition(".")[0]
    return "12" if "nvidia-cuda-runtime-cu12" in context.packages else ""
