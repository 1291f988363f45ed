"""The checksum changes with any byte and with any byte's place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_e2e.fabric.checksum import ROW_WORDS, checksum
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


def test_no_bytes_have_a_sum():
    assert int(checksum(torch.empty(0, dtype=torch.uint8))) == 0
