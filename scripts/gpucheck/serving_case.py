"""An attention problem of serving size, and the float64 answer for a sample of it.

A softmax over 16,000 slots averages away the effect of one slot, so random numbers would hide a wrong mask. Here each
computed token's own key and the first masked key are aligned with its query, and errors are relative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from scripts.gpucheck.attention_cases import UNUSED, Case, oracle
from scripts.gpucheck.rotation import rotate

TOLERANCE = 3e-2
"""Largest `relative_error` in bfloat16; measured on a CPU 0.003, and 0.015 where the call rotates the keys."""


class ServingCase(Case):
    """Llama-3-8B's heads, bfloat16, scattered queries over a context with unused slots, 16 segments.

    Attributes:
      rows, heads: the sample; one query head of each kv head.
    """

    num_segments = 16

    def __init__(
        self,
        num_queries: int,
        num_slots: int,
        *,
        theta: float | None = None,
        heads: tuple[int, int] = (32, 8),
        num_rows: int = 16,
        seed: int = 0,
    ) -> None:
        """`heads`: query heads and kv heads; `num_rows`: computed tokens in the sample."""
        num_heads, num_kv_heads = heads
        super().__init__(
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=128,
            queries=num_queries,
            slots=num_slots,
            used=num_slots - num_slots // 64,
            dtype="bfloat16",
            theta=theta,
            seed=seed,
        )
        random = np.random.default_rng(seed + 1)
        self.segment = (np.arange(num_slots) * self.num_segments // num_slots).astype(np.int32)
        self.rows = np.sort(random.choice(num_queries, num_rows, replace=False))
        group = num_heads // num_kv_heads
        self.heads = np.arange(num_kv_heads) * group + random.integers(0, group, num_kv_heads)
        # A score of about log(slots) + 1/2 makes a key as heavy as all other slots, whose scores are standard normal.
        strength = (np.log(num_slots / 2) + 0.5) / np.sqrt(128)
        strong = strength * self.q.reshape(num_queries, num_kv_heads, group, 128).sum(2)
        free = np.setdiff1d(self.q_pos + 1, self.q_pos) - 1  # the token after these is not computed
        free = free[free + 1 < np.count_nonzero(self.k_pos != UNUSED)]
        self._point(free + 1, strong[np.searchsorted(self.q_pos, free)])
        self._point(self.q_pos, strong)

    def _point(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Sets keys, given as they are after rotation."""
        if self.k_frequencies is not None:
            keys = rotate(keys.astype(np.float64), -slots, self.k_frequencies)
        self.k[slots] = np.asarray(jnp.asarray(keys, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32))

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output, mass and lse of the sample, float64."""
        k = self.k.astype(np.float64)
        if self.k_frequencies is not None:
            k = rotate(k, np.where(self.k_pos == UNUSED, 0, self.k_pos), self.k_frequencies)
        onehot = (self.segment[:, None] == np.arange(self.num_segments)).astype(np.float64)
        q = self.q[self.rows][:, self.heads]
        visible = self.k_pos[None] <= self.q_pos[self.rows][:, None]
        return oracle(q, k, self.v, visible=visible, scale=self.scale, onehot=onehot)

    def relative_error(self, result: Sequence[Any], expected: Sequence[np.ndarray]) -> float:
        """The largest of three errors, NaN as infinity: of a row's output relative to its length; of a mass relative to
        it plus 1e-4; of lse."""
        out, mass, lse = (np.asarray(part[self.rows], np.float64)[:, self.heads] for part in result)
        wanted_out, wanted_mass, wanted_lse = expected
        length = np.linalg.norm(wanted_out, axis=-1)
        errors = (
            np.linalg.norm(out - wanted_out, axis=-1) / length,
            np.abs(mass - wanted_mass) / (wanted_mass + 1e-4),
            np.abs(lse - wanted_lse),
        )
        return max(float(np.where(np.isnan(error), np.inf, error).max()) for error in errors)
