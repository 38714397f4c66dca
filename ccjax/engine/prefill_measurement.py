"""Measures how long prefills of a model take on this machine."""

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
    """Measures T(cached, new): the seconds of a prefill of `new` tokens behind one passage of `cached` tokens that is
    reused exactly, from the fastest tier that stored it. Takes the median of `repetitions` runs, after one that may
    compile. No other thread may use the engine.

    Args:
      progress: called with the number of prefills done and the total.

    Raises:
      RequestError, ContextLengthError: a number is out of range.
      ValueError: the engine did not store that many tokens.
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
