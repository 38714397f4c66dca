"""Listed sizes that arrays are padded to, so that few shapes are ever compiled. Knows no arrays."""

from __future__ import annotations


def token_bucket(num_tokens: int) -> int:
    """Rows that `num_tokens` computed tokens are padded to: 1, 16, 32, then eight sizes per doubling, never finer than
    32. More would compile more, fewer would compute more padding (here at most 1/8 above 256)."""
    if num_tokens == 1:
        return 1
    if num_tokens <= 16:
        return 16
    step = max(32, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // step) * step


def slot_bucket(num_tokens: int) -> int:
    """Context slots for `num_tokens` tokens: powers of two from 128 to 512, then multiples of 512 (beyond 8,192, of a
    sixteenth of the next power of two)."""
    if num_tokens <= 512:
        return max(128, 1 << (num_tokens - 1).bit_length())
    step = max(512, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // step) * step


def segment_bucket(num_segments: int) -> int:
    """Columns of the mass output: 16, 64, 256, ..."""
    size = 16
    while size < num_segments:
        size *= 4
    return size


def batch_bucket(num_requests: int) -> int:
    """Rows of a decode step: powers of two."""
    return 1 << (num_requests - 1).bit_length()


def entry_bucket(num_entries: int) -> int:
    """Entries of the page tables of a decode step: powers of two from 8."""
    return max(8, 1 << (num_entries - 1).bit_length())
