"""What the producer lets through of what a consumer asks for."""

import pytest
import torch

from rdt_e2e.errors import SyncError
from rdt_e2e.trainer.replay import ALLOWED_OPS, MAX_OPS, check_key, replay


def test_the_allow_list_is_vllms():
    from vllm.distributed.weight_transfer.sharded_rdt_common import SUPPORTED_OPS

    assert frozenset(SUPPORTED_OPS.values()) == ALLOWED_OPS


@pytest.mark.parametrize(
    "op", ["to", "float", "item", "data", "__class__", "cuda", "set_", "storage", "as_strided", 3]
)
def test_other_ops_are_refused(op):
    with pytest.raises(SyncError, match="is not allowed"):
        check_key(("w", [(op, (), ())]))


class Odd:
    """Something that no loader records."""


@pytest.mark.parametrize(
    "argument",
    [[0, 0, 0], torch.tensor([0, 0]), torch.ones(4, dtype=torch.bool), True, "0", 1.0, Odd(), {}],
    ids=str,
)
def test_only_plain_indices_are_taken(argument):
    with pytest.raises(SyncError, match="sizes, dimensions and plain indices only"):
        check_key(("w", [("__getitem__", (argument,), ())]))
    with pytest.raises(SyncError, match="sizes, dimensions and plain indices only"):
        check_key(("w", [("__getitem__", ((slice(0, 1), argument),), ())]))


@pytest.mark.parametrize("index", [0, slice(1, None), None, ..., (slice(None), 1), (0, ..., None)])
def test_plain_indices_are_taken(index):
    tensor = torch.arange(16).view(4, 4)
    _, chain = check_key(("w", [("__getitem__", (index,), ())]))
    assert torch.equal(replay("w", tensor, chain), tensor[index])


@pytest.mark.parametrize(
    ("op", "arguments", "keywords"),
    [
        ("narrow", (0, "1", 2), ()),
        ("reshape", ((2, 2.0),), ()),
        ("view", (torch.device("cpu"),), ()),
        ("reshape", (torch.uint8,), ()),
        ("chunk", (2,), (("dim", None),)),
        ("permute", (tuple(range(MAX_OPS + 1)),), ()),
    ],
)
def test_arguments_of_other_types_are_refused(op, arguments, keywords):
    with pytest.raises(SyncError, match="sizes, dimensions and plain indices only"):
        check_key(("w", [(op, arguments, keywords)]))


def test_a_dtype_view_reads_the_same_bytes():
    tensor = torch.arange(4, dtype=torch.float32)
    _, chain = check_key(("w", [("view", (torch.uint8,), ())]))
    assert replay("w", tensor, chain).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "malformed key"),
        ("w", "malformed key"),
        (("w",), "malformed key"),
        ((3, ()), "malformed key"),
        (("w", None), "malformed key"),
        (("w", [("view",)]), "malformed op"),
        (("w", ["view"]), "malformed op"),
        (("w", [("view", 3, ())]), "malformed op"),
        (("w", [("view", (), {})]), "malformed op"),
        (("w", [("view", (), ("dim",))]), "malformed keyword"),
        (("w", [("view", (), ((1, 1),))]), "malformed keyword"),
        (("w", [("t", (), ())] * (MAX_OPS + 1)), "at most 64 are replayed"),
    ],
)
def test_malformed_keys_are_refused(key, message):
    with pytest.raises(SyncError, match=message):
        check_key(key)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ([("narrow", (0, 0, 9), ())], "narrow"),
        ([("narrow", (), ())], "narrow"),
        ([("narrow", (1 << 70, 0, 1), ())], "narrow"),
        ([("reshape", (1 << 40, 1 << 40), ())], "reshape"),
        ([("view", (3,), (("no", 1),))], "view"),
        ([("chunk", (2, 0), ())], "not in a tensor"),
        ([("chunk", (2, 0), ()), ("t", (), ())], "several tensors"),
        ([("chunk", (2, 0), ()), ("__getitem__", (5,), ())], "__getitem__"),
        ([("chunk", (2, 0), ()), ("__getitem__", (None,), ())], "__getitem__"),
    ],
)
def test_a_chain_that_does_not_fit_is_a_named_error(chain, message):
    name, checked = check_key(("model.w", chain))
    with pytest.raises(SyncError, match=message) as caught:
        replay(name, torch.ones(4, 4), checked)
    assert "model.w" in str(caught.value)


def test_what_arrived_is_shown_cut_short():
    with pytest.raises(SyncError) as caught:
        check_key(("w", [("x" * 100_000, (), ())]))
    assert len(str(caught.value)) < 500
