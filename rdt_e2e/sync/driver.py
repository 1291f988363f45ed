"""The whole run: both fleets up, text before, a job of syncs, verdict.

Read `_live` for the order of things, `job.py` for what is done then, and `session.py` for one sync.
"""

import asyncio
import contextlib
import gc
import importlib
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from rdt_e2e.checkpoint.index import CheckpointIndex, read_index
from rdt_e2e.checkpoint.layout import CheckpointLayout, build_layout
from rdt_e2e.checkpoint.source import find_checkpoint
from rdt_e2e.cluster.children import noted
from rdt_e2e.cluster.local import drivers_folder
from rdt_e2e.cluster.placement import check_driver, choose_nodes
from rdt_e2e.cluster.session import cluster_session
from rdt_e2e.config import Config
from rdt_e2e.console import Console
from rdt_e2e.errors import RdtE2EError, VerificationError
from rdt_e2e.profiling.command import write_reports
from rdt_e2e.sizing.memory import predict_memory
from rdt_e2e.sync.job import Job, LiveRun, check_text, memory, sync_job
from rdt_e2e.sync.record import RunRecord, open_run
from rdt_e2e.sync.session import SyncSession
from rdt_e2e.sync.soak import soak_job
from rdt_e2e.trainer.fleet import TrainerFleet
from rdt_e2e.verify.text import Reference, read_reference

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
    """Run the main job: `sync.iters` syncs, each of them checked; see `run_job`."""
    return run_job(config, console, sync_job, num_steps=config.sync.iters)


def run_soak(config: Config, console: Console, num_syncs: int) -> SyncOutcome:
    """Run many syncs and watch what they leave behind; see `soak_job`."""
    return run_job(config, console, lambda run: soak_job(run, num_syncs), num_steps=1)


def run_job(config: Config, console: Console, job: Job, num_steps: int) -> SyncOutcome:
    """Start what a configuration describes, run a job on it, and give the verdict.

    `rdt_e2e.environment.apply_environment` has to be called before this module is imported.

    Args:
        config: What to run.
        console: Where to say how it goes.
        job: What to do once both fleets are up and baked.
        num_steps: Steps the job will announce.

    Returns:
        The outcome; the run directory is written.

    Raises:
        VerificationError: The text is not the reference's; the run directory says so too.
        RdtE2EError: The run could not be completed; everything it started is stopped.
    """
    console.expect_steps(NUM_STEPS + num_steps)
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
                if config.cluster.target == "ray":
                    check_driver(ray.util.get_node_ip_address(), inference_node, config)
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
            run = LiveRun(config, console, record, root, trainers, reference)
            asyncio.run(_live(run, layout, job))
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
        try:
            record.write()
        finally:  # A run directory that cannot be written must not cost what was found out.
            write_reports(record.folder, console)
            console.info(record.summary())
    return SyncOutcome(record.verdict, record)


def release_trainers(config: Config, console: Console) -> None:
    """End the trainer ranks that runs left on a cluster which is not ours to stop.

    Raises:
        EnvironmentCheckError: The cluster cannot be reached, or a run is using it.
    """
    with cluster_session(config, console) as cluster:
        TrainerFleet(config, "").remove()
        console.info(f"trainer ranks on the cluster at {cluster.address} ended; the cluster stays")


async def _live(run: LiveRun, layout: CheckpointLayout, job: Job) -> None:
    """Everything that needs the engines."""
    # Here, because vLLM takes seconds to import: bad input is reported before that.
    from rdt_e2e.inference.engine import inference_fleet

    config, console, record = run.config, run.console, run.record
    node = record.facts["nodes"]["inference"]
    num_replicas = config.inference.num_replicas
    engines = "" if num_replicas == 1 else f" in {num_replicas} engines"
    async with contextlib.AsyncExitStack() as stack:
        with console.step(f"inference fleet: {config.num_consumers} ranks{engines} on {node}"):
            fleets = [
                await stack.enter_async_context(inference_fleet(config, run.root, node, replica))
                for replica in range(num_replicas)
            ]
        stack.enter_context(noted(drivers_folder()))
        run.session = SyncSession(run.trainers, fleets, layout, config)
        with console.step("text before the sync (dummy weights)"):
            await check_text(run, "before")
        with console.step("init and bake"):
            record.bake_s = await run.session.bake()
        timeout_s = config.cluster.start_timeout_s
        record.facts["nics"] = {
            "trainer": run.trainers.call("nic_choice", timeout_s=timeout_s),
            "inference": [nic for fleet in fleets for nic in fleet.nics],
        }
        await job(run)
        record.facts["memory"] = await memory(run)
    verified = run.reference is not None or config.verify.weights != "none"
    record.verdict = "PASS" if verified else "NOT VERIFIED"


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
