"""Entry point `vllm.general_plugins`: installs the consumer, and on CPU what vLLM lacks there."""

from vllm.platforms import current_platform


def register() -> None:
    """Install the consumer of the platform, and on CPU the FP8 reference layers.

    vLLM calls this once in each of its processes (driver, engine cores, workers).

    Raises:
        EnvironmentCheckError: The installed vLLM is not a release the plugin was checked against.
    """
    from rdt_e2e.fabric.agent_config import configure_agents
    from rdt_e2e.inference.plugin.internals import (
        check_release,
        install_engine,
        sleep_between_looks,
    )

    check_release()
    configure_agents()
    if not current_platform.is_cpu():
        from rdt_e2e.inference.plugin.cuda_consumer import CudaConsumer

        install_engine("sharded_rdt", CudaConsumer)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from rdt_e2e.inference.plugin.cpu_consumer import CpuConsumer
    from rdt_e2e.inference.plugin.fp8_reference import Fp8ReferenceConfig

    sleep_between_looks()
    register_quantization_config("fp8")(Fp8ReferenceConfig)
    install_engine("sharded_rdt", CpuConsumer)
