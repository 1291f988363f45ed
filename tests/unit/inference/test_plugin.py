"""The parts of the plugin that need no running engine, and the guard on vLLM's internals."""

import pytest
import torch

from rdt_e2e.errors import EnvironmentCheckError
from rdt_e2e.inference.plugin import internals
from rdt_e2e.inference.plugin.cpu_consumer import CpuConsumer, prepack_experts
from rdt_e2e.inference.plugin.fp8_reference import dequantize


def test_the_platform_is_offered_on_a_cpu_build_only(monkeypatch):
    import rdt_e2e.inference.plugin.platform as plugin

    assert plugin.platform_plugin() == (
        "rdt_e2e.inference.plugin.cpu_platform.LogicalGpuCpuPlatform"
    )
    monkeypatch.setattr(plugin, "cpu_platform_plugin", lambda: None)
    assert plugin.platform_plugin() is None


def test_vllm_picks_the_platform_up_from_the_entry_point():
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "LogicalGpuCpuPlatform"
    assert current_platform.ray_device_key == "GPU"


def test_nothing_of_the_cpu_plugin_is_installed_on_other_platforms(monkeypatch):
    from vllm.model_executor.layers import quantization
    from vllm.platforms import current_platform

    from rdt_e2e.inference.plugin.consumer import Consumer
    from rdt_e2e.inference.plugin.register import register

    def registered(*_args):
        pytest.fail("the FP8 reference layers were installed on another platform")

    installed = []
    monkeypatch.setattr(quantization, "register_quantization_config", registered)
    monkeypatch.setattr(internals, "install_engine", lambda *args: installed.append(args))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _self: False)
    register()
    ((name, consumer),) = installed
    assert name == "sharded_rdt"
    assert issubclass(consumer, Consumer)
    assert not issubclass(consumer, CpuConsumer)


def test_registering_twice_keeps_one_consumer_under_vllms_name():
    from rdt_e2e.inference.plugin.register import register

    register()
    register()
    assert internals.WeightTransferEngineFactory._registry["sharded_rdt"]() is CpuConsumer


def test_vllms_readers_sleep_between_two_looks(monkeypatch):
    """When this fails, look at `sleep_between_looks`: vLLM waits for messages in another way."""
    import time
    from types import SimpleNamespace

    from vllm.distributed.device_communicators import shm_broadcast

    waiting = SimpleNamespace(is_reader=True, last_read=float("inf"), busy_loop_s=1.0)
    yields: list[bool] = []
    sleeps: list[float] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: yields.append(True))
    shm_broadcast.SpinCondition.wait(waiting)
    assert yields == [True], "as released, a reader that has just read only yields"
    monkeypatch.setattr(time, "sleep", sleeps.append)
    internals.sleep_between_looks()
    shm_broadcast.SpinCondition.wait(waiting)
    assert (yields, sleeps) == ([True], [internals.LOOK_S])


def test_vllm_pauses_as_we_do_and_then_sleeps():
    """When this fails, look at `InferenceFleet._stop_scheduling`: what it leaves out has changed."""
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM

    source = inspect.getsource(AsyncLLM.pause_generation)
    body = source[source.index("if clear_cache:") :]
    statements = [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]
    assert statements == [
        "if clear_cache:",
        "await self.renderer.clear_mm_cache_async()",
        "await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)",
        "await asyncio.sleep(0.02)",
    ]


def test_an_untested_release_is_refused(monkeypatch):
    internals.check_release()
    monkeypatch.setattr(internals, "installed_vllm", lambda: "0.34.1")
    with pytest.raises(EnvironmentCheckError, match=r"0\.34\.1 is installed"):
        internals.check_release()


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            internals.ShardedRDTWeightTransferEngine,
            [
                "_chunk_module_scatters",
                "_complete_pull",
                "_dispatch_item",
                "_ensure_proc_worker",
                "_issue_pull",
                "_process_item",
                "_resolve_producers",
                "_run_chunk_pipeline",
                "_signal_group_done",
                "drain_pending",
                "receive_weights",
            ],
        ),
        (internals.WeightTransferEngineFactory, ["_registry", "register_engine"]),
    ],
)
def test_overridden_internals_still_exist(owner, names):
    assert [name for name in names if not hasattr(owner, name)] == []


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            internals.Chunk,
            {
                "scatters",
                "materialize",
                "quant",
                "free",
                "keys",
                "owner",
                "seq",
                "pack_bytes",
                "pack_layout",
            },
        ),
        (internals.CallPlan, {"chunks", "pre_free"}),
        (internals.PendingPull, {"ref", "keys", "targets"}),
        (internals.ProcItem, {"chunk", "results", "slot"}),
        (internals.Scatter, {"src", "shape", "stride", "offset", "dtype"}),
    ],
)
def test_fields_that_the_consumer_reads_still_exist(owner, names):
    assert names <= set(owner.__dataclass_fields__)


@pytest.mark.parametrize("shape", [(128, 128), (576, 256), (130, 300), (2, 256, 384)])
def test_dequantize_is_the_block_product(shape):
    weight = torch.randn(shape).clamp(-4, 4).to(torch.float8_e4m3fn)
    rows, cols = shape[-2:]
    scale = torch.rand(*shape[:-2], -(-rows // 128), -(-cols // 128)) + 0.5
    result = dequantize(weight, scale, [128, 128], torch.float32)
    for row, col in ((0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2)):
        expected = weight[..., row, col].float() * scale[..., row // 128, col // 128]
        assert torch.equal(result[..., row, col], expected)


def test_reloaded_experts_are_prepacked():
    """Bug in vLLM 0.32.0: experts are prepacked on the first load only."""
    packed = []

    class Experts:
        def process_weights_after_loading(self, layer):
            packed.append(layer)

    class Kernel:
        fused_experts = Experts()

    method = object.__new__(internals.UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.moe_kernel = None
    prepack_experts(method, "first load")
    assert packed == [], "vLLM itself prepacks on the first load"
    method.moe_kernel = Kernel()
    prepack_experts(method, "reload")
    assert packed == ["reload"]
