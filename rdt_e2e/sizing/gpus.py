"""Accelerators and the memory a process can really use on each."""

from dataclasses import dataclass

from rdt_e2e.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One accelerator class.

    Attributes:
        name: Name for `--gpu`.
        usable_bytes: What the driver gives to processes in all, with error correction on; less than
            the figure on the box, and what "total capacity" says in an out-of-memory message.
        vendor: Who makes it; another vendor's class is no replacement on the same software.
    """

    name: str
    usable_bytes: int
    vendor: str


def _gpu(name: str, gib: float, vendor: str = "nvidia") -> Gpu:
    return Gpu(name, int(gib * GIB), vendor)


# Source: "GPU 0 has a total capacity of N GiB" in out-of-memory messages of PyTorch in public logs
# and issues, the smallest common figure of each class. Above it the driver keeps 0.5 to 1 GiB, so
# nvidia-smi shows more (H100 81559 MiB, H200 143771, B200 183359, GB200 189471, B300 275040).
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 79.14),
        _gpu("h100", 79.15),
        _gpu("h200", 139.72),
        _gpu("b200", 178.35),
        _gpu("gb200", 184.31),
        _gpu("mi300x", 191.69, "amd"),
        _gpu("mi325x", 255.69, "amd"),
        _gpu("b300", 267.69),
        _gpu("gb300", 276.5),
        _gpu("mi355x", 287.98, "amd"),
    )
}


def find_gpu(name: str) -> Gpu:
    """Look an accelerator up by name, in any case.

    Raises:
        ConfigError: The name is unknown; the message lists the known ones.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"command line: --gpu is {name!r}; known are {', '.join(GPUS)}")
    return gpu


def larger_than(gpu: Gpu) -> tuple[Gpu, ...]:
    """Classes of the same vendor with more memory, smallest first."""
    larger = [
        other
        for other in GPUS.values()
        if other.vendor == gpu.vendor and other.usable_bytes > gpu.usable_bytes
    ]
    return tuple(sorted(larger, key=lambda other: other.usable_bytes))
