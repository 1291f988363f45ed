"""The text rung of the verification: what the engine says before and after each sync."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rdt_e2e.errors import CheckpointError, TextMismatchError

REFERENCE_FILE = "expected.json"


class SaidText(Protocol):
    """A prompt's continuation, whoever produced it."""

    @property
    def prompt(self) -> str:
        """The prompt."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The continuation's token ids."""

    @property
    def text(self) -> str:
        """The continuation's text."""


@dataclass(frozen=True)
class Reference:
    """What the weights say, from a path that has no part in the sync.

    Attributes:
        source: How it was made.
        token_ids: Greedy continuation by prompt.
    """

    source: str
    token_ids: Mapping[str, tuple[int, ...]]


def read_reference(root: Path, prompts: Sequence[str], max_tokens: int) -> Reference:
    """Read the text recorded beside a checkpoint.

    Args:
        root: The checkpoint folder.
        prompts: Prompts that will be compared.
        max_tokens: Tokens that will be compared per prompt.

    Returns:
        The reference, cut to `max_tokens` per prompt.

    Raises:
        CheckpointError: There is none, it is damaged, or it lacks a prompt or tokens.
    """
    path = root / REFERENCE_FILE
    hint = "record it again, or set verify.reference=none (the run then proves nothing by text)"
    try:
        raw = json.loads(path.read_text())
        recorded = {entry["prompt"]: tuple(entry["token_ids"]) for entry in raw["entries"]}
        source, ended = str(raw["source"]), int(raw["max_tokens"])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {hint}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a recorded text: {error}; {hint}") from None
    for prompt in prompts:
        if prompt not in recorded:
            raise CheckpointError(f"{path} has no continuation of {prompt!r}; {hint}")
        if ended < max_tokens:
            raise CheckpointError(
                f"{path} holds {ended} tokens per prompt, verify.max_tokens is {max_tokens}; {hint}"
            )
    return Reference(source, {prompt: recorded[prompt][:max_tokens] for prompt in prompts})


def check_differs(said: Sequence[SaidText], reference: Reference) -> None:
    """Check that dummy weights do not already give the reference text.

    Raises:
        TextMismatchError: They do for every prompt, so equality after the sync would prove nothing.
    """
    if all(one.token_ids == reference.token_ids[one.prompt] for one in said):
        raise TextMismatchError(
            "the engine gives the reference text before any sync: the check cannot tell synced "
            "weights from unsynced ones. Start the engine on dummy weights"
        )


def check_equal(said: Sequence[SaidText], reference: Reference, when: str) -> None:
    """Check that the engine's text is the reference's, token by token.

    Args:
        said: Continuations.
        reference: What they have to be.
        when: For the message, such as "after sync 2".

    Raises:
        TextMismatchError: A prompt's tokens differ; the message says from which token on.
    """
    for one in said:
        expected = reference.token_ids[one.prompt]
        if one.token_ids == expected:
            continue
        pairs = enumerate(zip(one.token_ids, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(one.token_ids), len(expected)))
        raise TextMismatchError(
            f"{when}: {one.prompt!r} continues with {one.text!r}, whose token {at + 1} of "
            f"{len(expected)} differs from the reference ({_token(one.token_ids, at)} instead of "
            f"{_token(expected, at)}). The weights in the engine are not the trainer's"
        )


def _token(ids: Sequence[int], at: int) -> str:
    return str(ids[at]) if at < len(ids) else "the end"
