"""Memory traffic of RoPE on the device against a plain copy."""

from __future__ import annotations

import statistics

import jax.numpy as jnp

from ccjax.kernels.rope import apply_rope, llama3_frequencies, move_rope, remove_rope
from scripts.gpucheck.ceilings import ceiling
from scripts.gpucheck.record import CheckRecord, table
from scripts.gpucheck.timing import calls_per_sample, interleaved, random_bfloat16, timed_jax

SUITE = "rope_timing"
NUM_TOKENS = 131_072
"""With 8 heads of 128 in bfloat16 268 MB, several times the size of any cache."""


def run(record: CheckRecord) -> None:
    """Times the three rotations of the keys of one layer of Llama-3-8B, 128k tokens."""
    frequencies = llama3_frequencies(128, 500000.0, factor=8.0)
    x = random_bfloat16(2, NUM_TOKENS, 8, 128)
    positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32)
    num_bytes = 2 * x.nbytes + positions.nbytes
    calls = calls_per_sample(num_bytes / 2e12)
    timed = {
        "apply": timed_jax(lambda x, at: apply_rope(x, at, frequencies), (x, positions), calls),
        "remove": timed_jax(lambda x, at: remove_rope(x, at, frequencies), (x, positions), calls),
        "move": timed_jax(lambda x, at, to: move_rope(x, at, to, frequencies), (x, positions, positions[::-1]), calls),
    }
    for name, seconds in interleaved(timed, 3 if record.is_quick else 7).items():
        median = statistics.median(seconds)
        moved = num_bytes + (positions.nbytes if name == "move" else 0)
        record.add(SUITE, operation=name, ms=1e3 * median, gbps=moved / median / 1e9)
    record.say("RoPE timed")


def tables(record: CheckRecord) -> list[str]:
    """One row per rotation."""
    best = ceiling(record, "copy_gbps")
    rows = [
        (row["operation"], row["ms"], row["gbps"], None if best is None else 100 * row["gbps"] / best)
        for row in record.rows.get(SUITE, [])
    ]
    title = f"RoPE of {NUM_TOKENS:,} keys, 8 heads of 128, bfloat16"
    return [table(title, ("rotation", "ms", "GB/s", "% of copy"), rows)]
