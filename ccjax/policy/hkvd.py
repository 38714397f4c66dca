"""Chooses the tokens of reused chunks to recompute by their deviation of KV, layer by layer (CacheBlend sec. 4.3).

K and V of layer 0 depend on the token alone, so all candidates run through it, and the first meaningful deviations are
those of layer 1. The tokens with the highest are kept there, and fewer and fewer of those on later layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ccjax.policy._checks import check_count, check_mass, check_ratio

DEFAULT_RATIO = 0.15
"""CacheBlend sec. 5.1 r*: below it, quality suffered."""

_SPREAD = 0.25
"""Relative excess of the first share over the mean, and deficit of the last: "slightly higher", CacheBlend sec. 4.3."""

_MOST_STAGES = 4
"""Limit of different shares: each selection waits for the device."""


def counts_by_layer(num_candidates: int, ratio: float, num_layers: int) -> tuple[int, ...]:
    """Number of candidates that run through each layer: all of them through layer 0, then fewer and fewer, in up to
    four stages, on average `ratio` of them.

    Raises:
      ValueError: a count below 1, or a ratio outside 0 to 1.
    """
    check_count("num_candidates", num_candidates)
    check_count("num_layers", num_layers)
    check_ratio("ratio", ratio)
    num_filtered = num_layers - 1
    stages = min(_MOST_STAGES, num_filtered)
    spread = min(_SPREAD, 1.0 / ratio - 1.0) if ratio else 0.0  # no share exceeds 1
    counts = [num_candidates]
    for layer in range(num_filtered):
        stage = layer * stages // num_filtered
        share = ratio * (1.0 + spread * (1.0 - 2.0 * (stage + 0.5) / stages))
        counts.append(min(counts[-1], math.ceil(share * num_candidates)))
    return tuple(counts)


def most_deviating(deviations: Sequence[float], count: int) -> tuple[int, ...]:
    """Indices, ascending, of the `count` highest deviations; ties by index.

    Raises:
      ValueError: `count` exceeds the number of deviations, or a deviation is NaN.
    """
    check_count("count", count, least=0)
    if count > len(deviations):
        raise ValueError(f"count: wanted at most {len(deviations)}, as many as deviations, got {count}")
    if any(math.isnan(value) for value in deviations):
        raise ValueError("deviations: wanted numbers, got NaN")
    return tuple(sorted(sorted(range(len(deviations)), key=lambda index: (-deviations[index], index))[:count]))


def hidden_ratio(load_s: float, prefill_s: float, *, least: float = DEFAULT_RATIO) -> float:
    """The share that can be recomputed in the time that loading takes anyway, but at least `least` (CacheBlend sec.
    5.1, loading controller): `r prefill_s = load_s`.

    Args:
      load_s: seconds to load the KV of all candidates.
      prefill_s: seconds to compute them.
    """
    check_mass("load_s", load_s)
    check_mass("prefill_s", prefill_s)
    check_ratio("least", least)
    return least if not prefill_s else min(1.0, max(least, load_s / prefill_s))
