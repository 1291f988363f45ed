"""The whole run: both fleets up, text before, syncs, text after, verdict.

Read `_run` for the order of things, and `session.py` for one sync.
"""

import asyncio
import contextlib
import gc
import importlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rdt_e2e.checkpoint.index import CheckpointIndex, read_index
from rdt_e2e.checkpoint.layout import CheckpointLayout, build_layout
from rdt_e2e.checkpoint.source import find_checkpoint
from rdt_e2e.cluster.placement import choose_nodes
from rdt_e2e.cluster.session import cluster_session
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import EngineError, RdtE2EError, VerificationError
from rdt_e2e.sizing.memory import predict_memory
from rdt_e2e.sync.record import RunRecord, SyncTiming, open_run
from rdt_e2e.sync.session import SyncSession
from rdt_e2e.trainer.fleet import TrainerFleet
from rdt_e2e.verify.text import Reference, check_differs, check_equal, read_reference

if TYPE_CHECKING:
    from rdt_e2e.inference.engine import InferenceFleet

NUM_STEPS = 6


@dataclass(frozen=True)
class SyncOutcome:
    """What a finished run came to.

    Attributes:
        verdict: PASS, or NOT VERIFIED when the configuration asks for no reference.
        record: The run directory and its contents.
    """

    verdict: str
    record: RunRecord

    @property
    def exit_code(self) -> int:
        """Exit status of the program; a run that ends otherwise raises instead."""
        return 0


def run_sync(config: Config, console: Console) -> SyncOutcome:
    """Run the job described by a configuration, from checkpoint to verdict.

    `rdt_e2e.environment.apply_environment` has to be called before this module is imported.

    Args:
        config: What to run.
        console: Where to say how it goes.

    Returns:
        The outcome; the run directory is written.

    Raises:
        VerificationError: The text is not the reference's; the run directory says so too.
        RdtE2EError: The run could not be completed; everything it started is stopped.
    """
    console.expect_steps(NUM_STEPS + config.sync.iters)
    record = open_run(config)
    try:
        with contextlib.ExitStack() as stack:
            with console.step(f"checkpoint {config.model.source}"):
                root = find_checkpoint(config, console)
                index = read_index(root)
                layout = build_layout(index)
                reference = _reference(config, root)
                record.facts["checkpoint"] = _describe(config, index, layout)
                record.facts["predicted"] = asdict(predict_memory(layout, index.config, config))
            _import_engine_ahead()
            with console.step("Ray cluster"):
                cluster = stack.enter_context(cluster_session(config, console))
                trainer_node, inference_node = choose_nodes(ray.nodes(), config)
                record.facts["nodes"] = {"trainer": trainer_node, "inference": inference_node}
            with console.step(f"trainer fleet: {config.trainer.num_ranks} ranks on {trainer_node}"):
                trainers = TrainerFleet(config, trainer_node, resident=cluster.stays)
                stack.callback(trainers.close)
                held = trainers.attach(root)
                if held is None:
                    trainers.start()
                    held = trainers.load(root)
                else:
                    console.info("  kept from an earlier run, weights in memory")
                record.facts["trainer_bytes"] = held
            asyncio.run(_run(config, console, record, root, layout, trainers, reference))
            # At interpreter exit vLLM's engine would finalise itself with a traceback.
            gc.collect()
    except VerificationError as error:
        record.verdict, record.error = "FAIL", str(error)
        raise
    except RdtE2EError as error:
        record.error = str(error)
        raise
    except KeyboardInterrupt:
        record.error = "interrupted"
        raise
    finally:
        record.write()
        console.info(record.summary())
    return SyncOutcome(record.verdict, record)


async def _run(
    config: Config,
    console: Console,
    record: RunRecord,
    root: Path,
    layout: CheckpointLayout,
    trainers: TrainerFleet,
    reference: Reference | None,
) -> None:
    """Everything that needs the engine."""
    # Here, because vLLM takes seconds to import: bad input is reported before that.
    from rdt_e2e.inference.engine import inference_fleet

    node = record.facts["nodes"]["inference"]
    num_replicas = config.inference.num_replicas
    engines = "" if num_replicas == 1 else f" in {num_replicas} engines"
    async with contextlib.AsyncExitStack() as stack:
        with console.step(f"inference fleet: {config.num_consumers} ranks{engines} on {node}"):
            fleets = [
                await stack.enter_async_context(inference_fleet(config, root, node, replica))
                for replica in range(num_replicas)
            ]
        with console.step("text before the sync (dummy weights)"):
            await _check_text(fleets, config, console, record, reference, "before")
        session = SyncSession(trainers, fleets, layout, config)
        with console.step("init and bake"):
            record.bake_s = await session.bake()
        timeout_s = config.cluster.start_timeout_s
        record.facts["nics"] = {
            "trainer": trainers.call("nic_choice", timeout_s=timeout_s),
            "inference": [nic for fleet in fleets for nic in fleet.nics],
        }
        for iteration in range(1, config.sync.iters + 1):
            with console.step(f"sync {iteration} ({'cold' if iteration == 1 else 'warm'})"):
                record.syncs.append(await _sync(session, console, record))
                when = f"after sync {iteration}"
                await _check_text(session.replicas, config, console, record, reference, when)
                await _check_weights(session.replicas, config, console, root)
        record.facts["memory"] = {
            "trainer": trainers.call("memory", timeout_s=timeout_s),
            "inference": [await fleet.transfer_memory() for fleet in session.replicas],
        }
    verified = reference is not None or config.verify.weights != "none"
    record.verdict = "PASS" if verified else "NOT VERIFIED"


async def _sync(session: SyncSession, console: Console, record: RunRecord) -> SyncTiming:
    """One sync; when an engine was lost and others live, once more without it."""
    try:
        return await session.sync()
    except EngineError as error:
        dead = [fleet for fleet in session.replicas if fleet.is_dead]
        if not dead or len(dead) == len(session.replicas):
            raise
        for fleet in dead:
            session.drop(fleet)
            record.facts.setdefault("lost_replicas", []).append(fleet.replica)
            console.info(
                f"  inference replica {fleet.replica} is lost ({error}); going on without it"
            )
        return await session.sync()


async def _check_text(
    fleets: Sequence["InferenceFleet"],
    config: Config,
    console: Console,
    record: RunRecord,
    reference: Reference | None,
    when: str,
) -> None:
    """Ask every engine, and hold what it says against the reference."""
    for fleet in fleets:
        said = await fleet.generate(config.verify.prompts)
        label = when if config.inference.num_replicas == 1 else f"{when}, replica {fleet.replica}"
        record.texts[label] = [asdict(one) for one in said]
        for one in said:
            console.info(f"  {one.prompt!r} -> {one.text!r}")
        if reference is None:
            continue
        if when == "before":
            check_differs(said, reference)
        else:
            check_equal(said, reference, label)


async def _check_weights(
    fleets: Sequence["InferenceFleet"], config: Config, console: Console, root: Path
) -> None:
    if config.verify.weights == "disk":
        for fleet in fleets:
            await fleet.check_weights(root)
        console.info("  every tensor of every rank is what the checkpoint gives")
    elif config.verify.weights == "names":
        for fleet in fleets:
            await fleet.check_slices(root)
        console.info("  every slice that every rank received is the checkpoint's")


def _import_engine_ahead() -> None:
    """Import vLLM, some ten seconds of work, while the cluster and the trainers start."""
    threading.Thread(
        target=importlib.import_module, args=["rdt_e2e.inference.engine"], daemon=True
    ).start()


def _reference(config: Config, root: Path) -> Reference | None:
    if config.verify.reference == "none":
        return None
    return read_reference(root, config.verify.prompts, config.verify.max_tokens)


def _describe(config: Config, index: CheckpointIndex, layout: CheckpointLayout) -> dict[str, Any]:
    return {
        "source": config.model.source,
        "folder": str(index.root),
        "left_out": dict(Counter(index.excluded.values())),
        "num_names": len(layout.names),
        "num_groups": len(layout.groups),
        "num_bytes": sum(held.num_bytes for held in layout.held.values()),
    }
