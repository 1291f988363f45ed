"""The checksum changes with any byte and with any byte's place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.fabric.checksum import ROW_MULTIPLIER, ROW_WORDS, WORD_MULTIPLIER, checksum
from rdt_e2e.fabric.words import WORD_BYTES

ROW_BYTES = ROW_WORDS * WORD_BYTES
SIZES = st.integers(1, 3 * ROW_BYTES)


def random_bytes(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@given(SIZES, st.integers(0, 2**32), st.integers(0, 7))
def test_any_flipped_bit_is_seen(size, place, bit):
    raw = random_bytes(size)
    before = int(checksum(raw))
    raw[place % size] ^= 1 << bit
    assert int(checksum(raw)) != before


@given(SIZES, st.integers(1, 3 * ROW_BYTES - 1))
def test_any_rotation_is_seen(size, by):
    raw = random_bytes(size)
    turned = raw.roll(by)
    assert (int(checksum(raw)) == int(checksum(turned))) == bool(torch.equal(raw, turned))


@pytest.mark.parametrize("length", [WORD_BYTES, 128, ROW_BYTES])
def test_exchanged_blocks_are_seen(length):
    raw = random_bytes(4 * ROW_BYTES)
    before = int(checksum(raw))
    first, second = raw[:length].clone(), raw[-length:].clone()
    raw[:length], raw[-length:] = second, first
    assert int(checksum(raw)) != before


def test_a_view_that_is_not_aligned_gives_the_sum_of_its_bytes():
    raw = random_bytes(5000)
    for start in range(1, 9):
        assert int(checksum(raw[start:])) == int(checksum(raw[start:].clone()))


def by_definition(raw):
    """The sum as the docstring gives it, word by word, in Python's own integers."""

    def mix(value):
        value = (value + 2**63) % 2**64 - 2**63
        return value ^ (value >> 29)

    padded = bytes(raw.tolist()) + bytes(-len(raw) % WORD_BYTES)
    total = 0
    for place in range(0, len(padded), WORD_BYTES):
        word = int.from_bytes(padded[place : place + WORD_BYTES], "little", signed=True)
        row, column = divmod(place // WORD_BYTES, ROW_WORDS)
        weight = (mix((row + 1) * ROW_MULTIPLIER) << 1) + (mix((column + 1) * WORD_MULTIPLIER) | 1)
        total += word * weight
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("size", [1, 8, 1001, ROW_BYTES - 3, ROW_BYTES, 2 * ROW_BYTES + 77])
def test_both_ends_get_what_the_definition_says(size):
    raw = random_bytes(size)
    assert int(checksum(raw)) == by_definition(raw)


def test_no_bytes_have_a_sum():
    assert int(checksum(torch.empty(0, dtype=torch.uint8))) == 0
