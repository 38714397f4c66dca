"""The sizes that arrays are padded to, so that only few shapes are compiled."""

from __future__ import annotations


def token_bucket(num_tokens: int) -> int:
    """Rows that `num_tokens` computed tokens are padded to: 16, 32, then eight sizes per doubling, in steps of at least
    32. More sizes would take more compilations, fewer more padding (here at most 1/8 above 256). With a single row XLA
    copies the whole pool on a CPU: 240 ms a layer of SmolLM2 with 4,096 pages, against 11 ms with 16 rows."""
    if num_tokens <= 16:
        return 16
    step = max(32, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // step) * step


def slot_bucket(num_tokens: int) -> int:
    """Context slots for `num_tokens` tokens: powers of two from 256, above 4,096 also the midpoints between two of
    them. An unused slot only costs its read, a padding row a pass through the model, so these sizes are coarser."""
    size = max(256, 1 << (num_tokens - 1).bit_length())
    return 3 * size // 4 if size > 4096 and num_tokens <= 3 * size // 4 else size


def load_buckets(num_rows: int) -> list[int]:
    """Sizes of the pieces in which `num_rows` rows are copied to the device: powers of two from 256 on, which are also
    sizes of contexts; with padding of less than 256 rows or at most an eighth."""
    sizes, left = [], -(-num_rows // 256) * 256
    while left > 0:
        size = 1 << (left - 1).bit_length()
        sizes.append(size // 2 if size - left > num_rows // 8 else size)
        left -= sizes[-1]
    return sizes


def question_bucket(num_tokens: int) -> int:
    """Rows that the tokens of questions are padded to: powers of two from 16."""
    return max(16, 1 << (num_tokens - 1).bit_length())


def segment_bucket(num_segments: int) -> int:
    """Columns of the mass output: 16, 64, 256, ..."""
    size = 16
    while size < num_segments:
        size *= 4
    return size


def batch_bucket(num_requests: int) -> int:
    """Rows of a decode step, and of the logits after a prefill: powers of two."""
    return 1 << (num_requests - 1).bit_length()


def entry_bucket(num_entries: int) -> int:
    """Entries of the page tables of a decode step: powers of two from 32."""
    return max(32, 1 << (num_entries - 1).bit_length())
