"""Random calls of a producer's serve surface: refused by name, or exactly the bytes that were asked for.

`make fuzz` runs many cases; the unit tests run a few through the same code.
"""

import argparse
import random
import threading
from collections import Counter
from typing import Any

import torch

from rdt_e2e.errors import SyncError
from rdt_e2e.trainer.gather_cache import GatherCache
from rdt_e2e.trainer.producer import ProducerMixin, ServeCounters
from rdt_e2e.trainer.replay import ALLOWED_OPS
from rdt_e2e.trainer.serve_ring import ServeRings

NUM_CONSUMERS = 2
DEPTH = 2
CHUNK_BYTES = 4096
SHAPES = [(), (1,), (7,), (4, 6), (3, 2, 5), (2, 2, 2, 3)]
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int8, torch.int32]


class Producer(ProducerMixin):
    """A producer that owns small tensors; every byte of a tensor is its number."""

    def __init__(self) -> None:
        self.producer_rank = 0
        self.tensors = {}
        for number, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in DTYPES):
            numel = torch.empty(shape, device="meta").numel()
            raw = torch.full((numel * dtype.itemsize,), number + 1, dtype=torch.uint8)
            self.tensors[f"layers.{number}.weight"] = raw.view(dtype).view(shape)
        self._owned = self.tensors
        self._plans = {}
        self._sums_pulls = True
        self._pull_sums = {}
        self._counters = ServeCounters()
        self._lock = threading.Lock()
        self._cache = GatherCache((), 1, 1.0, 0)
        self._rings = ServeRings(
            DEPTH,
            torch.device("cpu"),
            lambda _slot: None,
            num_consumers=NUM_CONSUMERS,
            max_chunk_bytes=CHUNK_BYTES,
        )
        for consumer in range(NUM_CONSUMERS):
            self._rings.reserve(consumer, CHUNK_BYTES)
        self.next_seq = [0] * NUM_CONSUMERS


class Odd:
    """A thing that no consumer sends."""

    def __repr__(self) -> str:
        return "Odd()"


def odd_value(chance: random.Random) -> Any:
    """Anything at all."""
    return chance.choice(
        [
            None,
            True,
            -1,
            0,
            1 << 70,
            1.5,
            float("nan"),
            "",
            "to",
            "x" * 10_000,
            b"\x00",
            (),
            [],
            {},
            [0, 0, 0],
            (1 << 40, 1 << 40),
            slice(None, None, -1),
            slice(0, 1 << 70),
            ...,
            torch.tensor([0]),
            torch.ones(2, dtype=torch.bool),
            torch.uint8,
            torch.device("cpu"),
            Odd(),
            Odd,
            print,
        ]
    )


def plausible_op(chance: random.Random) -> Any:
    """An op of the allow-list with small numbers, which may or may not fit."""
    number = lambda: chance.randint(-2, 6)  # noqa: E731 - used once per argument below
    method = chance.choice(sorted(ALLOWED_OPS))
    arguments = {
        "narrow": lambda: (number(), number(), number()),
        "__getitem__": lambda: (chance.choice([number(), slice(number(), number()), ..., None]),),
        "transpose": lambda: (number(), number()),
        "permute": lambda: tuple(number() for _ in range(chance.randint(1, 3))),
        "reshape": lambda: tuple(number() for _ in range(chance.randint(1, 3))),
        "view": lambda: chance.choice(
            [(torch.uint8,), (torch.int32,), (number(), number()), (-1,)]
        ),
        "chunk": lambda: (number(),),
        "unsqueeze": lambda: (number(),),
        "unbind": lambda: (number(),),
    }.get(method, tuple)()
    return (method, arguments, ())


def random_key(producer: Producer, chance: random.Random) -> Any:
    """A key that is right, nearly right, or nothing like one."""
    kind = chance.random()
    if kind < 0.05:
        return odd_value(chance)
    name = chance.choice(sorted(producer.tensors)) if kind < 0.95 else odd_value(chance)
    chain: Any = [plausible_op(chance) for _ in range(chance.choice([0, 0, 1, 1, 2, 3]))]
    if chance.random() < 0.1:
        op: Any = [*plausible_op(chance)]
        op[chance.randrange(3)] = odd_value(chance)
        chain.insert(0, chance.choice([tuple(op), odd_value(chance)]))
    if chance.random() < 0.02:
        chain = odd_value(chance)
    return (name, tuple(chain) if isinstance(chain, list) else chain)


def check_blob(producer: Producer, keys: Any, blob: torch.Tensor) -> None:
    """Every slice holds nothing but bytes of the tensor it was asked from, and as many as it has."""
    end = 0
    for name, chain in keys:
        number = sorted(producer.tensors, key=lambda one: int(one.split(".")[1])).index(name) + 1
        piece: Any = producer.tensors[name]
        for method, arguments, _ in chain:
            piece = getattr(piece, method)(*arguments)
        start = -(-end // 16) * 16
        end = start + piece.numel() * piece.element_size()
        assert set(blob[start:end].tolist()) == {number}, (name, chain)
    assert len(blob) == end


def one_case(producer: Producer, chance: random.Random) -> str:
    """Make one call; returns what became of it.

    Raises:
        AssertionError: Bytes of another tensor were served.
        Exception: Anything but a `SyncError`: the producer was crashed.
    """
    if chance.random() < 0.02:
        try:
            if chance.random() < 0.5:
                producer.reserve_serve_buffer(odd_value(chance), odd_value(chance), None)
            else:
                producer.free_group(odd_value(chance))
        except SyncError:
            return "refused"
        return "accepted"
    consumer: Any = chance.randrange(NUM_CONSUMERS)
    seq: Any = producer.next_seq[consumer]
    keys: Any = [random_key(producer, chance) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.05:
        consumer = odd_value(chance)
    if chance.random() < 0.1:
        seq = chance.choice([seq - 1, seq + 1, seq + DEPTH, odd_value(chance)])
    if chance.random() < 0.02:
        keys = odd_value(chance)
    try:
        (blob,) = producer.rdt_produce_weights_batched(keys, consumer_id=consumer, seq=seq)
    except SyncError as error:
        return "refused" if len(str(error)) < 2000 else "refused, at length"
    check_blob(producer, keys, blob)
    ring = producer._rings._rings[consumer]
    producer.next_seq[consumer] = ring.first_unserved
    return "served"


def fuzz(num_cases: int, seed: int) -> Counter[str]:
    """Make many calls; returns how many were served, accepted and refused."""
    chance = random.Random(seed)  # noqa: S311 - reproducible on purpose
    producer = Producer()
    return Counter(one_case(producer, chance) for _ in range(num_cases))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(dict(fuzz(options.cases, options.seed)))  # noqa: T201 - the program's output
