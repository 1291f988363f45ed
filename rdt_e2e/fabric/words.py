"""A tensor's memory as bytes and as eight-byte words, which copy and sum several times faster."""

import torch

WORD_BYTES = 8


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row order.

    Args:
        tensor: Any dtype, shape and strides.

    Returns:
        1-D uint8; a view where the tensor is contiguous.
    """
    whole = tensor.detach().contiguous()
    # Not reshape(-1): a tensor of one element keeps an odd stride through it.
    return whole.as_strided((whole.numel(),), (1,), whole.storage_offset()).view(torch.uint8)


def starts_at_a_word(raw: torch.Tensor) -> bool:
    """Whether bytes begin where a word can: torch looks at the storage, a copy at the address."""
    return raw.data_ptr() % WORD_BYTES == 0 and raw.storage_offset() % WORD_BYTES == 0


def as_words(raw: torch.Tensor) -> torch.Tensor | None:
    """Bytes as words.

    Args:
        raw: 1-D uint8, contiguous.

    Returns:
        1-D int64, a view; None where length or place do not allow it.
    """
    if raw.numel() % WORD_BYTES or not starts_at_a_word(raw):
        return None
    return raw.view(torch.int64)
