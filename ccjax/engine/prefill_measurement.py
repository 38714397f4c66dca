"""Measures what prefills of a model cost on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from ccjax.engine.engine import Engine
from ccjax.policy.prefill_cost import PrefillGrid


def measure_prefills(
    engine: Engine,
    cached: Sequence[int],
    new: Sequence[int],
    *,
    repetitions: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PrefillGrid:
    """T(cached, new): prefills of `new` tokens behind one passage of `cached` that is reused exactly, from the fastest
    tier that took it; the median of several, after one that may have compiled. No other thread may use the engine.

    Args:
      progress: called with prefills done and in all.

    Raises:
      RequestError, ContextLengthError: a number is out of range.
      ValueError: the engine did not keep that many tokens.
    """
    rng = np.random.default_rng(0)

    def drawn(count: int) -> list[int]:
        return rng.integers(0, engine.model_config.vocab_size, count).tolist()

    total, done = len(cached) * len(new) * (repetitions + 1), 0
    rows = []
    for num_cached in cached:
        passages = [drawn(num_cached)] if num_cached else []
        if passages:
            engine.generate_from_tokens([(), *passages, drawn(1)], max_new_tokens=1, reuse="exact")
        row = []
        for num_new in new:
            seconds = []
            for _ in range(repetitions + 1):
                response = engine.generate_from_tokens([(), *passages, drawn(num_new)], max_new_tokens=1, reuse="exact")
                if response.reuse.reused_tokens != num_cached:
                    raise ValueError(f"cached: wanted {num_cached} tokens, got room for fewer in the engine's budgets")
                seconds.append(response.reuse.prefill_s)
                done += 1
                progress(done, total)
            row.append(statistics.median(seconds[1:]))
        rows.append(tuple(row))
    return PrefillGrid(tuple(cached), tuple(new), tuple(rows))
