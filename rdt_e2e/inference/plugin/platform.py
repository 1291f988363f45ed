"""Entry point `vllm.platform_plugins`: offers the logical-GPU platform on a CPU build of vLLM."""

from vllm.platforms import cpu_platform_plugin


def platform_plugin() -> str | None:
    """Name the platform class vLLM should use, or None to leave vLLM's own choice alone.

    Returns:
        The qualified class name on a CPU build of vLLM, None on every other build.

    Source: `vllm.platforms.resolve_current_platform_cls_qualname` (an out-of-tree platform that
    activates wins over the built-in ones).
    """
    if cpu_platform_plugin() is None:
        return None
    return "rdt_e2e.inference.plugin.cpu_platform.LogicalGpuCpuPlatform"
