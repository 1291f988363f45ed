"""The text rung can fail, and says where."""

import json
from dataclasses import dataclass

import pytest

from rdt_e2e.errors import CheckpointError, TextMismatchError
from rdt_e2e.verify.text import Reference, check_differs, check_equal, read_reference


@dataclass(frozen=True)
class Said:
    prompt: str
    token_ids: tuple[int, ...]
    text: str = "..."


REFERENCE = Reference("a test", {"p": (1, 2, 3), "q": (4, 5, 6)})


def test_equal_text_passes():
    check_equal([Said("p", (1, 2, 3)), Said("q", (4, 5, 6))], REFERENCE, "after sync 1")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((1, 9, 3), r"after sync 2: 'p' .* token 2 of 3 differs .*\(9 instead of 2\)"),
        ((1, 2), r"token 3 of 3 .*\(the end instead of 3\)"),
        ((1, 2, 3, 4), r"token 4 of 3 .*\(4 instead of the end\)"),
    ],
)
def test_one_changed_token_fails(tokens, message):
    with pytest.raises(TextMismatchError, match=message):
        check_equal([Said("q", (4, 5, 6)), Said("p", tokens)], REFERENCE, "after sync 2")


def test_dummy_weights_must_not_say_the_reference():
    check_differs([Said("p", (1, 2, 3)), Said("q", (0, 0, 0))], REFERENCE)
    with pytest.raises(TextMismatchError, match="before any sync"):
        check_differs([Said("p", (1, 2, 3)), Said("q", (4, 5, 6))], REFERENCE)


def write(root, **changes):
    entries = [{"prompt": "p", "token_ids": [1, 2, 3], "text": "x"}]
    content = {"source": "s", "max_tokens": 3, "entries": entries} | changes
    (root / "expected.json").write_text(json.dumps(content))


def test_a_recorded_text_is_read_and_cut(tmp_path):
    write(tmp_path)
    assert read_reference(tmp_path, ["p"], 2).token_ids == {"p": (1, 2)}


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "changes", "message"),
    [
        (["other"], 2, {}, "no continuation of 'other'"),
        (["p"], 4, {}, r"holds 3 tokens per prompt, verify\.max_tokens is 4"),
        (["p"], 2, {"entries": 7}, "not a recorded text"),
    ],
)
def test_an_unfit_recording_is_a_clear_error(tmp_path, prompts, max_tokens, changes, message):
    write(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_reference(tmp_path, prompts, max_tokens)


def test_no_recording_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected\.json: .*verify\.reference=none"):
        read_reference(tmp_path, ["p"], 2)
