"""RoPE on the device at positions up to 128k against complex rotation in float64.

The angles are float32, as documented by the functions: at position 131,071 float32 angles are up to 0.008 radians off
on any device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.kernels.rope import apply_rope, llama3_frequencies, move_rope, remove_rope
from scripts.gpucheck.record import CheckRecord, numerics_table

SUITE = "rope_numerics"
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest absolute error for numbers up to about 5: float32 rounds them to 5e-7, bfloat16 to 0.016."""
LAST = 131_071
"""The last position of Llama 3.1's context."""

_apply, _remove, _move = jax.jit(apply_rope), jax.jit(remove_rope), jax.jit(move_rope)


def turned(x: np.ndarray, turns: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`x` [T, A, H] with each pair (x[i], x[i + H/2]) turned by the float32 angle turns * frequency, in float64."""
    half = x.shape[-1] // 2
    angles = (turns.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    pairs = (x[..., :half].astype(np.float64) + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([pairs.real, pairs.imag], -1)


def check(record: CheckRecord, dtype: str, head_dim: int, num_tokens: int) -> None:
    """Apply, remove and move, each against its rotation, and variants that must differ from it."""
    random = np.random.default_rng(head_dim)
    x = jnp.asarray(random.standard_normal((num_tokens, 8, head_dim)), jnp.float32).astype(dtype)
    old, new = (random.integers(0, LAST + 1, num_tokens).astype(np.int32) for _ in range(2))
    old[:2], new[:2] = (LAST, 0), (0, LAST)
    frequencies = llama3_frequencies(head_dim, 500000.0, factor=8.0)
    wrong_theta = llama3_frequencies(head_dim, 490000.0, factor=8.0)
    at_old, at_new = jnp.asarray(old), jnp.asarray(new)
    rounded = at_old.astype(jnp.bfloat16).astype(jnp.int32)
    wide = np.asarray(x.astype(jnp.float32))
    computed = {
        "apply": (_apply(x, at_old, frequencies), old),
        "remove": (_remove(x, at_old, frequencies), -old),
        "move": (_move(x, at_old, at_new, frequencies), new - old),
    }
    mutants = {
        "a position too far": (_apply(x, at_old + 1, frequencies), old),
        "wrong theta": (_apply(x, at_old, wrong_theta), old),
        "positions in bfloat16": (_apply(x, rounded, frequencies), old),
        "moved backwards": (_move(x, at_new, at_old, frequencies), new - old),
    }
    for name, (result, turns) in (computed | mutants).items():
        mutant = name if name in mutants else None
        error = np.abs(np.asarray(result.astype(jnp.float32), np.float64) - turned(wide, turns, frequencies)).max()
        record.compare(
            SUITE,
            float(np.nan_to_num(error, nan=np.inf)),
            TOLERANCE[dtype],
            mutant=mutant,
            operation=name if mutant is None else "broken",
            dtype=dtype,
            head_dim=head_dim,
        )


def run(record: CheckRecord) -> None:
    """Both dtypes and head sizes."""
    for dtype in TOLERANCE:
        for head_dim in (64, 128):
            check(record, dtype, head_dim, 256 if record.is_quick else 4096)
    record.say("RoPE: apply, remove and move up to position 131,071")


def tables(record: CheckRecord) -> list[str]:
    """One row per operation and dtype, worst of the head sizes."""
    return [numerics_table(record, SUITE, "RoPE at positions up to 131,071 against float64", "operation", "dtype")]
