"""A few thousand cases of the fuzzer, and proof that it would see another tensor's bytes."""

import pytest
import torch

from tests.fuzz import Producer, check_blob, fuzz


@pytest.mark.parametrize("seed", [1, 2])
def test_calls_are_refused_by_name_or_served_exactly(seed):
    outcomes = fuzz(1500, seed)
    assert outcomes["served"] > 200
    assert outcomes["refused"] > 200
    assert not outcomes["refused, at length"], "a message must not repeat all that was sent"


def test_bytes_of_another_tensor_would_be_seen():
    producer = Producer()
    keys = [("layers.5.weight", ()), ("layers.12.weight", ())]
    (blob,) = producer.rdt_produce_weights_batched(keys, consumer_id=0, seq=0)
    check_blob(producer, keys, blob)
    blob[0] = 77
    with pytest.raises(AssertionError):
        check_blob(producer, keys, blob)
    with pytest.raises(AssertionError):
        check_blob(producer, keys, torch.zeros_like(blob))
