"""The verb `rdt-e2e plan`: from options to a plan, and its exit status."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rdt_e2e.checkpoint.described import describe
from rdt_e2e.checkpoint.index import CONFIG_FILE, read_index, read_json
from rdt_e2e.checkpoint.settings import layers_beyond
from rdt_e2e.checkpoint.source import find_folder
from rdt_e2e.config import MINI_KIMI, load_config
from rdt_e2e.errors import CheckpointError, ConfigError
from rdt_e2e.sizing.catalog import CATALOG, find_model
from rdt_e2e.sizing.deployment import Deployment
from rdt_e2e.sizing.gpus import find_gpu
from rdt_e2e.sizing.plan import as_json, make_plan
from rdt_e2e.sizing.render import render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdt_e2e.checkpoint.index import CheckpointIndex

EXIT_DOES_NOT_FIT = 1


@dataclass(frozen=True)
class PlanOptions:
    """The command line of `plan`; none leaves a setting to the profile, or to its default.

    Attributes:
        model: A name of the catalogue, a folder, or a hub id in the local cache.
        trainers: Trainer ranks.
        inference: Inference ranks.
        data_parallel: Data-parallel engine ranks.
        tensor_parallel: Tensor-parallel ranks within each.
        expert_parallel: Experts whole on one rank each.
        gather: `owner` or `full`.
        gpu: GPU class.
        nic_gbps: Rate of the one NIC of each GPU, in Gbit/s.
        max_chunk_bytes: Limit on one pull in bytes.
        profile: Profile name or YAML file.
        overrides: Dotted keys with their values, over the profile.
    """

    model: str | None
    trainers: int | None
    inference: int | None
    data_parallel: int | None
    tensor_parallel: int | None
    expert_parallel: bool | None
    gather: str | None
    gpu: str
    nic_gbps: float
    max_chunk_bytes: int | None
    profile: str | None
    overrides: Mapping[str, object]


def run_plan(options: PlanOptions, stream: TextIO, *, as_json_text: bool) -> int:
    """Work out a plan and write it.

    Args:
        options: The command line.
        stream: Where to write.
        as_json_text: Write JSON instead of tables.

    Returns:
        Exit status: 0 it fits, 1 it does not.

    Raises:
        ConfigError: An option or a combination of options makes no sense.
        CheckpointError: The model is not known, not there or damaged.
    """
    if options.nic_gbps <= 0:
        raise ConfigError(f"command line: --nic-gbps is {options.nic_gbps:g}; it must be above 0")
    gpu = find_gpu(options.gpu)
    deployment, source, revision = _settings(options)
    origin, index = _find_index(source, revision)
    plan = make_plan(source, origin, index, deployment, gpu, options.nic_gbps)
    if as_json_text:
        json.dump(as_json(plan), stream, indent=2)
        stream.write("\n")
    else:
        render(plan, stream)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _settings(options: PlanOptions) -> tuple[Deployment, str, str]:
    """The deployment, the model and its revision: the profile's, with the options over it."""
    source, revision = options.model, "main"
    if options.profile is not None:
        # No cluster is touched, so a profile may lack what its cluster would need.
        no_cluster = {"cluster.target": "local", "cluster.address": None}
        config = load_config(options.profile, {**options.overrides, **no_cluster})
        deployment = Deployment.of(config)
        source = source if source is not None else config.model.source
        revision = config.model.revision
    else:
        if options.overrides:
            raise ConfigError("command line: --set changes a profile; add --config NAME|FILE")
        if source is None:
            raise ConfigError(
                f"command line: give --model ({', '.join(CATALOG)}, a folder or a hub id), or --config"
            )
        if options.trainers is None or not (options.inference or options.data_parallel):
            raise ConfigError(
                "command line: give --trainers and --inference (ranks of each side), or --config"
            )
        deployment = Deployment(num_trainers=options.trainers, data_parallel=1)
    return _with_options(deployment, options), source, revision


def _with_options(deployment: Deployment, options: PlanOptions) -> Deployment:
    changes: dict[str, Any] = {}
    if options.trainers is not None:
        changes["num_trainers"] = options.trainers
    if options.expert_parallel is not None:
        changes["expert_parallel"] = options.expert_parallel
    if options.gather is not None:
        if options.gather not in ("owner", "full"):
            raise ConfigError(
                f"command line: --gather is {options.gather!r}; it must be owner or full"
            )
        changes["gather"] = options.gather
    if options.max_chunk_bytes is not None:
        changes["max_chunk_bytes"] = options.max_chunk_bytes
    tensor = options.tensor_parallel
    if tensor is None:
        tensor = deployment.tensor_parallel
    data = options.data_parallel
    if options.inference is not None:
        # Ranks that come and go together, one for each TP rank of each engine.
        unit = tensor * deployment.num_replicas
        if unit < 1 or options.inference < 1 or options.inference % unit:
            raise ConfigError(
                f"command line: --inference {options.inference} is not a multiple of TP {tensor} times "
                f"{deployment.num_replicas} engines"
            )
        if data is not None and data * unit != options.inference:
            raise ConfigError(
                f"command line: --dp {data} and --tp {tensor} make {data * unit} inference ranks, but "
                f"--inference is {options.inference}"
            )
        data = options.inference // unit
    changes["tensor_parallel"] = tensor
    changes["data_parallel"] = data if data is not None else deployment.data_parallel
    return replace(deployment, **changes)


def _find_index(source: str, revision: str) -> tuple[str, CheckpointIndex]:
    """The checkpoint on this machine if it is here, else what the catalogue says; and which it is."""
    known = find_model(source)
    # Mini-kimi is described rather than built, which takes a minute.
    if known is not None and (source == MINI_KIMI or not _is_here(source, revision)):
        extra = len(layers_beyond(known.config))
        without = f", without {extra} layer for multi-token prediction" if extra else ""
        origin = f"as {known.hub_id} has them (its config.json){without}"
        return origin, describe(known.config, Path(known.name))
    try:
        folder = find_folder(source, revision)
    except CheckpointError as missing:
        raise CheckpointError(
            f"--model {source}: not one of {', '.join(CATALOG)}, and {missing}"
        ) from missing
    if not any(folder.glob("*.safetensors*")):
        config = read_json(folder / CONFIG_FILE, "Copy it from the model's repository.")
        return f"from {folder / CONFIG_FILE} alone", describe(config, folder)
    return f"headers of the files in {folder}", read_index(folder)


def _is_here(source: str, revision: str) -> bool:
    try:
        find_folder(source, revision)
    except CheckpointError:
        return False
    return True
