"""Entry point `vllm.general_plugins`: installs the CPU parts in every vLLM process."""

from vllm.platforms import current_platform


def register() -> None:
    """Install the CPU consumer and the FP8 reference layers; do nothing on any other platform.

    vLLM calls this once in each of its processes (driver, engine cores, workers).

    Raises:
        EnvironmentCheckError: The installed vLLM is not a release the plugin was checked against.
    """
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from rdt_e2e.fabric.progress import relax_progress_thread
    from rdt_e2e.inference.plugin.consumer import CpuConsumer
    from rdt_e2e.inference.plugin.fp8_reference import Fp8ReferenceConfig
    from rdt_e2e.inference.plugin.internals import check_release, install_engine

    check_release()
    relax_progress_thread()
    register_quantization_config("fp8")(Fp8ReferenceConfig)
    install_engine("sharded_rdt", CpuConsumer)
