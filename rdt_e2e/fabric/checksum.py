"""The checksum of a run of bytes: what both ends of a pull compare, and what fingerprints rest on."""

import functools

import torch

from rdt_e2e.fabric.words import WORD_BYTES, starts_at_a_word

ROW_WORDS = 4096
ROW_MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed int64
WORD_MULTIPLIER = -4658895280553007687  # Odd constant of the splitmix64 generator, signed


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """Condense bytes to one number that depends on each byte and on its place.

    The bytes are read as rows of 4096 eight-byte words, the last row filled up with zeros, and the
    words are summed modulo 2**64, each times the sum of a weight of its row (even) and one of its
    column (odd). A weight is therefore odd: a change within one word always changes the sum, and
    words that trade places change it unless their weighted differences cancel. It is two plain
    sums over the data, without a temporary of its size. It tells accidents apart, not forgeries.

    Args:
        raw: 1-D uint8, contiguous, on any device.

    Returns:
        0-d int64 on the same device, not waited for. Zeros at the end do not change it, so compare
        lengths too.
    """
    if not starts_at_a_word(raw):
        raw = raw.clone()
    end = raw.numel() // WORD_BYTES * WORD_BYTES
    words = raw[:end].view(torch.int64)
    num_rows = words.numel() // ROW_WORDS
    tail = words[num_rows * ROW_WORDS :]
    if end < raw.numel():
        last = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - end] = raw[end:]
        tail = torch.cat([tail, last.view(torch.int64)])
    # A power of two, so that a few lists serve all lengths.
    row_weights = _row_weights(raw.device, 1 << num_rows.bit_length())
    word_weights = _word_weights(raw.device)
    # A launch costs more than most sums, so there are few.
    total = (tail * (word_weights[: tail.numel()] + row_weights[num_rows])).sum()
    if num_rows:
        rows = words[: num_rows * ROW_WORDS].view(-1, ROW_WORDS)
        total += (rows.sum(1) * row_weights[:num_rows]).sum()
        total += (rows.sum(0) * word_weights).sum()
    return total


@functools.cache
def _row_weights(device: torch.device, num_rows: int) -> torch.Tensor:
    row_index = torch.arange(1, 1 + num_rows, device=device)
    return _settled(_mix(row_index * ROW_MULTIPLIER) << 1)


@functools.cache
def _word_weights(device: torch.device) -> torch.Tensor:
    word_index = torch.arange(1, 1 + ROW_WORDS, device=device)
    return _settled(_mix(word_index * WORD_MULTIPLIER) | 1)


def _settled(weights: torch.Tensor) -> torch.Tensor:
    """Weights that any stream may read from now on."""
    if weights.is_cuda:
        torch.cuda.current_stream(weights.device).synchronize()
    return weights


def _mix(value: torch.Tensor) -> torch.Tensor:
    return value ^ (value >> 29)
