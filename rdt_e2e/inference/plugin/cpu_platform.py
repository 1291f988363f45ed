"""vLLM's CPU platform, as seen by Ray: each worker occupies one logical GPU."""

from vllm.platforms.cpu import CpuPlatform


class LogicalGpuCpuPlatform(CpuPlatform):
    """CPU platform whose workers are placed by Ray like GPU workers.

    vLLM's Ray executor refuses a platform without `ray_device_key`, which `CpuPlatform` lacks.
    With "GPU" and `ray start --num-gpus=N`, placement groups, `STRICT_PACK` and data-parallel
    ranks take the very path they take on real GPUs; the GPUs are counters only.
    """

    ray_device_key: str = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the communicator that has the collectives expert parallelism needs."""
        return "rdt_e2e.inference.plugin.communicator.ExpertParallelCpuCommunicator"
