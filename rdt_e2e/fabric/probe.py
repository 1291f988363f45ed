"""A NIXL agent built and thrown away, to see what it can do here: `python -m rdt_e2e.fabric.probe`.

It runs as a process of its own: what it finds depends on the environment at its start, it may crash at
exit where two copies of a library meet, and it leaves nothing behind in the process that asked.
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from rdt_e2e.environment import trace_ucx
from rdt_e2e.fabric.agent_config import VARIANTS

NUM_BYTES = 1 << 20
"""Memory that is registered, in bytes."""

LOADED_LIBRARIES = ("libucp", "libibverbs", "libefa")
"""Libraries of which one process must hold one copy each."""


def probe(backend: str, *, cuda: bool) -> dict[str, Any]:
    """Build an agent with one backend and register memory with it.

    Args:
        backend: `UCX` or `LIBFABRIC`.
        cuda: Also register memory of the first CUDA device.

    Returns:
        Findings as plain JSON values: `module` (the build in use), `plugins`, `memory_types`,
        `registered` (device to null or the error), `libraries` (library to the files loaded),
        `ucx_modules`, `ucx_version`, `ucx_lanes`; or only `error` when there is no agent.
    """
    log = Path(tempfile.mkdtemp(prefix="rdt-e2e-probe-"), "ucx.log")
    trace_ucx(log)
    try:
        return _probe(backend, log, cuda=cuda)
    finally:
        log.unlink(missing_ok=True)
        log.parent.rmdir()


def _probe(backend: str, log: Path, *, cuda: bool) -> dict[str, Any]:
    try:
        api = importlib.import_module(_api_module(cuda=cuda))
        agent = api.nixl_agent("rdt-e2e-probe", api.nixl_agent_config(backends=[backend]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return {"error": f"{type(error).__name__}: {error}"}
    if backend not in agent.backends:
        # NIXL only warns of a plugin that is missing.
        return {"error": f"no {backend} plugin among {', '.join(agent.plugin_list)}"}
    registered = {"cpu": _register_host_memory(agent)}
    if cuda:
        registered["cuda"] = _register_cuda_memory(agent)
    text = read_ucx_log(log)
    version = re.search(r"UCX\s+INFO\s+Version (\S+)", text)
    return {
        "module": api.__name__.partition(".")[0],
        "plugins": sorted(agent.plugin_list),
        "memory_types": sorted(agent.get_backend_mem_types(backend)),
        "registered": registered,
        "libraries": loaded_libraries(),
        "ucx_modules": _bundled_modules(api),
        "ucx_version": "" if version is None else version.group(1),
        "ucx_lanes": ucx_lanes(text),
    }


def _api_module(*, cuda: bool) -> str:
    """The module to import: the build itself where the choice between builds does not matter.

    Beside a CPU torch `nixl` imports all of torch to find out its CUDA release, which takes seconds.
    """
    builds = [name for name in reversed(VARIANTS) if importlib.util.find_spec(name) is not None]
    return "nixl._api" if cuda or not builds else f"{builds[0]}._api"


def _register_host_memory(agent: Any) -> str | None:
    buffer = ctypes.create_string_buffer(NUM_BYTES)
    try:
        region = [(ctypes.addressof(buffer), NUM_BYTES, 0, "")]
        agent.deregister_memory(agent.register_memory(region, "DRAM"))
    except Exception as error:  # noqa: BLE001 - the finding
        return f"{type(error).__name__}: {error}"
    return None


def _register_cuda_memory(agent: Any) -> str | None:
    try:
        import torch

        buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
        agent.deregister_memory(agent.register_memory(buffer))
    except Exception as error:  # noqa: BLE001 - the finding
        return f"{type(error).__name__}: {error}"
    return None


def read_ucx_log(log: Path) -> str:
    """What UCX has written to `UCX_LOG_FILE` in this process; it keeps lines in a C buffer."""
    ctypes.CDLL(None).fflush(None)
    return log.read_text(errors="replace") if log.exists() else ""


def loaded_libraries() -> dict[str, list[str]]:
    """Files of each of `LOADED_LIBRARIES` that this process has mapped."""
    rows = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    files = {row[5] for row in rows if len(row) > 5 and ".so" in row[5]}
    return {
        library: sorted(file for file in files if re.match(rf"{library}[-.]", Path(file).name))
        for library in LOADED_LIBRARIES
    }


def ucx_lanes(log: str, *, to_peer: bool = False) -> list[str]:
    """Transports and devices that UCX's own log names for its endpoints, such as `rc_mlx5/mlx5_0:1`.

    Args:
        log: What UCX wrote.
        to_peer: Only those of endpoints to another process, not to the agent itself.
    """
    lanes: set[str] = set()
    for line in log.splitlines():
        before, found, after = line.partition("cfg#")
        if found and not (to_peer and before.endswith("self ")):
            lanes.update(lane for lane in re.findall(r"[\w.]+/[\w.:]+", after))
    return sorted(lanes)


def _bundled_modules(api: Any) -> list[str]:
    """Names of the UCX modules that came with the NIXL build, such as `uct_ib_mlx5`."""
    package = Path(str(api.__file__)).parent
    folder = package.parent / f"{package.name}.libs" / "ucx"
    return sorted(
        {path.name.partition(".")[0].removeprefix("lib") for path in folder.glob("*.so*")}
    )


def main() -> None:
    """Print the findings as one line of JSON, the last one of standard output."""
    parser = argparse.ArgumentParser(description="Build one NIXL agent and say what it can do.")
    parser.add_argument("--backend", default="UCX")
    parser.add_argument("--cuda", action="store_true")
    arguments = parser.parse_args()
    found = probe(arguments.backend, cuda=arguments.cuda)
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
