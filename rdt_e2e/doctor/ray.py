"""Checks of Ray as it is installed and as it runs here; nothing of Ray is imported."""

import os

from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn
from rdt_e2e.environment import ray_environment

THEME = Theme("ray", "Ray")

MIN_RELEASE = (2, 60)
_FETCH_TIMEOUT = "RAY_rdt_fetch_fail_timeout_milliseconds"
_RAY_DEFAULT_FETCH_MS = 60_000
_NODE_VARIABLES = ("UCX_MODULES", "UCX_RCACHE_MAX_UNRELEASED", _FETCH_TIMEOUT)
"""What every Ray node needs in its own environment, before `ray start`."""


@THEME.check(
    "release",
    "Ray's release",
    looks_at="metadata of ray",
    why="Before 2.56 there is no RDT pull by target buffer; before 2.60 about half of the cold starts on "
    "several nodes end in a crash of a worker.",
    sources=("ray#64558", "ray#62339"),
    at_build=True,
)
def _release(context: Context) -> Finding:
    version = context.packages.get("ray")
    if version is None:
        return fail("ray is not installed", "make setup")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_RELEASE:
        return fail(f"ray {version}", "pip install 'ray[default]==2.60.0'  # on every node")
    return ok(f"ray {version}")


@THEME.check(
    "head",
    "The head answers",
    looks_at="a TCP connection to cluster.address",
    why="A wrong address is waited for, not refused, once Ray has started to join.",
    sources=("kuberay#5138",),
)
def _head(context: Context) -> Finding:
    address = context.config.cluster.address
    if address is None:
        return skip("a local cluster is started by the run")
    host, _, port = address.rpartition(":")
    fix = "ray start --head --port=6379  # on that node\n--set cluster.address=HOST:PORT"
    if not port.isdigit():
        return fail(f"cluster.address={address} is not HOST:PORT", fix)
    reason = context.host.answers(host, int(port))
    return ok(address) if reason is None else fail(f"{address}: {reason}", fix)


@THEME.check(
    "token",
    "A token to join with",
    looks_at="RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token",
    why="`ray start --head` turns token authentication on by itself; a second node, a driver and vLLM's "
    "processes do not, and are refused after 20 s of retries.",
    sources=("docs.ray.io: token authentication", "KubeRay v1.7.0: authOptions"),
)
def _token(context: Context) -> Finding:
    if context.config.cluster.target == "local":
        return skip("a local cluster makes its own")
    environ = context.environ
    mode = environ.get("RAY_AUTH_MODE", "token")
    if mode == "disabled":
        return warn("RAY_AUTH_MODE=disabled: anybody on the network can run code here", "unset it")
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    default = os.path.join(environ.get("HOME", "/root"), ".ray/auth_token")
    if environ.get("RAY_AUTH_TOKEN"):
        return ok("in RAY_AUTH_TOKEN")
    if context.text(path or default):
        return ok(f"in {path or default}")
    fix = (
        "export RAY_AUTH_TOKEN_PATH=FILE  # a copy of the head's\nKubeRay: authOptions.mode: token"
    )
    return fail(f"none: {path or default} is empty or cannot be read", fix)


@THEME.check(
    "fetch-timeout",
    "A pull may wait for its gather",
    looks_at=f"{_FETCH_TIMEOUT} in the environment of the run's processes",
    why="Ray ends a pull after 60 s, waiting for the trainer's gather included: the first pull of a cold "
    "sync takes longer, and the error that names the slow rank never comes.",
    sources=("ray#58548", "ray#55512"),
)
def _fetch_timeout(context: Context) -> Finding:
    value = context.environ.get(_FETCH_TIMEOUT)
    milliseconds = int(value) if value is not None and value.isdigit() else _RAY_DEFAULT_FETCH_MS
    stall_s, seconds = context.config.sync.stall_timeout_s, milliseconds / 1000
    wanted = round(context.config.sync.rdt_fetch_timeout_s * 1000)
    fix = f"export {_FETCH_TIMEOUT}={wanted}  # before `ray start`, on both nodes"
    if seconds <= stall_s:
        return fail(f"{seconds:g} s, and a stall is named after {stall_s:g} s", fix)
    return ok(f"{seconds:g} s, above the {stall_s:g} s after which a stall is named")


@THEME.check(
    "raylet-environment",
    "The raylets have the environment",
    looks_at="/proc/<pid>/environ of the raylets that run here",
    why="Ray's workers inherit from the raylet, not from the driver: what was exported after `ray start`, "
    "or in another shell, reaches none of them.",
    sources=(
        "vllm#50413",
        "vLLM 0.32.0: RayExecutorV2 copies its environment after the worker has started",
    ),
)
def _raylet_environment(context: Context) -> Finding:
    if context.config.cluster.target == "local":
        return skip("a local cluster is started with it")
    if not context.raylets:
        return skip("no raylet runs here")
    wanted = ray_environment(context.config)
    names = [name for name in _NODE_VARIABLES if name in wanted]
    for raylet in context.raylets:
        if raylet.environ is None:
            return skip(f"the environment of raylet {raylet.pid} belongs to another user")
        lacking = [name for name in names if name not in raylet.environ]
        if lacking:
            settings = " ".join(f"{name}='{wanted[name]}'" for name in lacking)
            text = f"raylet {raylet.pid} {raylet.address} lacks {', '.join(lacking)}"
            return fail(text, f"ray stop; export {settings}; ray start ...")
        # A site may have good reasons for another value, except for what can stop a sync.
        tls = raylet.environ.get("UCX_TLS")
        if tls != context.environ.get("UCX_TLS"):
            text = f"raylet {raylet.pid} has UCX_TLS={tls}, here it is {context.environ.get('UCX_TLS')}"
            return warn(text, "start the raylet and the run from the same environment")
    return ok(f"{len(context.raylets)} raylets with {', '.join(names)}")


@THEME.check(
    "niceness",
    "Workers are not nice",
    looks_at="RAY_worker_niceness, on CPU runs",
    why="Ray runs its workers at niceness 15: beside anything else on a machine without GPUs, both "
    "fleets get what is left over.",
    sources=("rdt_e2e/environment.py",),
)
def _niceness(context: Context) -> Finding:
    if context.config.trainer.device == "cuda":
        return skip("GPU ranks wait for GPUs, not for the CPU")
    value = context.environ.get("RAY_worker_niceness")
    if value == "0":
        return ok("0")
    return warn(f"{value or 15}", "export RAY_worker_niceness=0  # before `ray start`")
