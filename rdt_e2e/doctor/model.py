"""Checks of the checkpoint, from its names, headers and sizes; no tensor is read."""

import functools
import json
from pathlib import Path

from rdt_e2e.checkpoint.index import CheckpointIndex, read_index
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.config import MINI_KIMI
from rdt_e2e.doctor.context import Context
from rdt_e2e.doctor.finding import Finding, Theme, fail, ok, skip, warn
from rdt_e2e.errors import RdtE2EError
from rdt_e2e.verify.text import read_reference

THEME = Theme("model", "Model files")

GB = 10**9
MIB = 1 << 20


def _folder(context: Context) -> Path | Finding:
    """The checkpoint folder, or why there is none to look at. Nothing is built or fetched."""
    source = context.config.model.source
    if source == MINI_KIMI:
        return skip("mini-kimi is built, and checked, by the run that needs it")
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    snapshot = _snapshot(context, source)
    if snapshot is not None:
        return snapshot
    return fail(
        f"model.source={source} (revision {context.config.model.revision}) is neither a folder nor in "
        "the local hub cache",
        f"hf download {source}  # on both nodes\n--set model.source=FOLDER",
    )


def _snapshot(context: Context, source: str) -> Path | None:
    """A hub id in the local cache: `models--ORG--NAME/snapshots/<commit>`, chosen by `refs/`."""
    environ = context.environ
    home = Path(environ.get("HF_HOME", Path(environ.get("HOME", "/root"), ".cache", "huggingface")))
    cache = Path(environ.get("HF_HUB_CACHE", home / "hub"))
    repository = cache / f"models--{source.replace('/', '--')}"
    revision = context.config.model.revision
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


@functools.cache
def _read(root: Path) -> CheckpointIndex | RdtE2EError:
    """Read once for all checks of this module; a large checkpoint has a thousand headers."""
    try:
        return read_index(root)
    except RdtE2EError as error:
        return error


@THEME.check(
    "complete",
    "The checkpoint is complete",
    looks_at="config.json, the index, and the header and size of every shard",
    why="A missing shard, or a scale that never came, is no error to a loader: the engine keeps dummy "
    "values and writes fluent nonsense.",
    sources=("sglang#32279", "TRT-LLM#16437", "CE#79", "vllm#45835", "vllm#38746"),
)
def _complete(context: Context) -> Finding:
    folder = _folder(context)
    if isinstance(folder, Finding):
        return folder
    index = _read(folder)
    if isinstance(index, RdtE2EError):
        return fail(
            str(index), f"hf download --force-download ...  # into {folder}, or copy it again"
        )
    files = len({entry.file for entry in index.entries.values()})
    return ok(f"{len(index.entries)} tensors, {index.num_bytes / GB:.1f} GB in {files} files")


@THEME.check(
    "layout",
    "It can be laid out for a sync",
    looks_at="names, shapes and dtypes of all tensors",
    why="Every tensor needs a gather group and an owner; one that fits none would stop the run after "
    "both fleets are up.",
    sources=("vllm#43375",),
)
def _layout(context: Context) -> Finding:
    folder = _folder(context)
    index = _read(folder) if isinstance(folder, Path) else None
    if not isinstance(index, CheckpointIndex):
        return skip("there is no checkpoint to look at; see model.complete")
    try:
        layout = build_layout(index)
    except RdtE2EError as error:
        return fail(
            str(error), "export the checkpoint in the form that its model's own release has"
        )
    return ok(f"{len(layout.groups)} gather groups")


@THEME.check(
    "memory",
    "A trainer rank's share fits its GPU",
    looks_at="bytes of the checkpoint, trainer.num_ranks, memory.total of nvidia-smi",
    why="A fleet that does not fit fails after minutes of loading, on the rank that was unlucky.",
    sources=("marin#6335", "SkyRL#1623", "vllm#43375"),
)
def _memory(context: Context) -> Finding:
    folder = _folder(context)
    index = _read(folder) if isinstance(folder, Path) else None
    if not isinstance(index, CheckpointIndex):
        return skip("there is no checkpoint to look at; see model.complete")
    if not context.gpu_states:
        return skip("no GPU is here")
    share = index.num_bytes / context.config.trainer.num_ranks
    memory = min(state.total_mib for state in context.gpu_states) * MIB
    text = f"{share / GB:.1f} GB of weights per rank, GPUs of {memory / GB:.1f} GB"
    fix = "raise trainer.num_ranks, take larger GPUs or a smaller model"
    if share > memory:
        return fail(text, fix)
    return ok(text) if share < 0.8 * memory else warn(f"{text}: no room for rings and groups", fix)


@THEME.check(
    "reference",
    "The recorded text is there",
    looks_at="expected.json beside the checkpoint, and verify.prompts",
    why="A run compares the engine's text with it; without it, the run ends before it starts.",
    sources=("rdt-e2e config --keys",),
)
def _reference(context: Context) -> Finding:
    if context.config.verify.reference == "none":
        return skip("verify.reference=none compares no text")
    folder = _folder(context)
    if isinstance(folder, Finding):
        return skip("there is no checkpoint to look at; see model.complete")
    verify = context.config.verify
    try:
        reference = read_reference(folder, verify.prompts, verify.max_tokens)
    except RdtE2EError as error:
        return fail(str(error), "--set verify.reference=none, or record it beside the checkpoint")
    return ok(f"{len(reference.token_ids)} prompts, from {reference.source}")


@THEME.check(
    "remote-code",
    "Code in the checkpoint is allowed",
    looks_at="auto_map in config.json and tokenizer_config.json, model.trust_remote_code",
    why="A tokenizer that is Python code in the checkpoint (Kimi K2's) is refused by vLLM, late and with "
    "a prompt that nobody can answer.",
    sources=("docs.vllm.ai: trust_remote_code",),
)
def _remote_code(context: Context) -> Finding:
    folder = _folder(context)
    if isinstance(folder, Finding):
        return skip("there is no checkpoint to look at; see model.complete")
    for name in ("config.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and "auto_map" in content:
            if context.config.model.trust_remote_code:
                return ok(f"{name} needs it, and it is allowed")
            return warn(f"{name} names code of its own", "--set model.trust_remote_code=true")
    return ok("none is needed")
