"""Reusability of a chunk variant behind another prefix (CacheCraft sec. 3.1-3.2.1).

Symbols of the paper: beta = `overlap_beta`, gamma = `order_gamma`, beta' = `adjusted_overlap`, a-bar and b-bar =
`a_mean` and `b_mean`, CCI = `chunk_context_impact`, CFO = `cache_fix_overhead`. `inter(Cj, Ci)` is the softmax mass
that the later chunk Ci's queries put on the earlier chunk Cj's keys (eq. 3; eq. 6 prints the arguments as (i, j)).

A prefix may contain the same chunk twice. The k-th occurrence in the old prefix is matched with the k-th in the new
one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from ccjax.policy._checks import check_count, check_mass, check_masses, check_ratio
from ccjax.types import ChunkId

# A product this close (relatively) to a whole number is rounded to it: 0.07 * 100 is 7.000000000000001 in binary.
_WHOLE_REL_TOL = 1e-9


def _occurrences(ids: Iterable[ChunkId]) -> list[tuple[ChunkId, int]]:
    """Each id with the number of its earlier occurrences: A, B, A -> (A, 0), (B, 0), (A, 1)."""
    ids = tuple(ids)
    if len(set(ids)) == len(ids):  # the usual case; planning spends most of its time here
        return [(chunk_id, 0) for chunk_id in ids]
    seen: Counter[ChunkId] = Counter()
    numbered = []
    for chunk_id in ids:
        numbered.append((chunk_id, seen[chunk_id]))
        seen[chunk_id] += 1
    return numbered


def overlap_beta(
    old_prefix_ids: Sequence[ChunkId], inter_by_prefix: Sequence[float], new_prefix_ids: Sequence[ChunkId]
) -> float:
    """Prefix overlap score in [0, 1], CacheCraft eq. 6: `sum_{j in old and new} inter(Cj, Ci) / sum_{j in old} inter`.

    0/0 (an empty old prefix, or one without mass) gives 0: nothing is known about the influence of a prefix. Chunks of
    the new prefix that the old one lacked cost nothing, as printed: old (A), new (A, B, C) gives 1.

    Args:
      inter_by_prefix: mass that the chunk's queries put on each old prefix chunk, aligned with `old_prefix_ids`.

    Raises:
      ValueError: the two old lists differ in length, or a mass is negative or not finite.
    """
    if len(inter_by_prefix) != len(old_prefix_ids):
        raise ValueError(
            f"inter_by_prefix: wanted one mass for each of the {len(old_prefix_ids)} old prefix chunks, "
            f"got {len(inter_by_prefix)}"
        )
    check_masses("inter_by_prefix", inter_by_prefix)
    total = math.fsum(inter_by_prefix)
    if total == 0.0:
        return 0.0
    new = set(_occurrences(new_prefix_ids))
    pairs = zip(_occurrences(old_prefix_ids), inter_by_prefix, strict=True)
    return math.fsum([mass for chunk, mass in pairs if chunk in new]) / total


def order_gamma(old_prefix_ids: Sequence[ChunkId], new_prefix_ids: Sequence[ChunkId]) -> float:
    """Order penalty in [0, 1], CacheCraft eq. 7: discordant pairs / C(m, 2) over the m common prefix chunks.

    This is the normalised Kendall tau distance: 0 for the same order, 1 for the reverse, 0 where m < 2.
    """
    new_rank = {chunk: rank for rank, chunk in enumerate(_occurrences(new_prefix_ids))}
    ranks = [new_rank[chunk] for chunk in _occurrences(old_prefix_ids) if chunk in new_rank]
    if len(ranks) < 2:
        return 0.0
    return sum(first > second for first, second in combinations(ranks, 2)) / math.comb(len(ranks), 2)


def adjusted_overlap(
    old_prefix_ids: Sequence[ChunkId], inter_by_prefix: Sequence[float], new_prefix_ids: Sequence[ChunkId]
) -> float:
    """Adjusted prefix overlap in [0, 1], CacheCraft eq. 8: `beta' = beta (1 - gamma)`.

    The paper does not say what to do if eq. 6 gives 0/0. Our reading: 1 if the new prefix equals the old one exactly
    (including two empty prefixes), else 0 if the old prefix is empty.
    """
    beta = overlap_beta(old_prefix_ids, inter_by_prefix, new_prefix_ids)
    if tuple(old_prefix_ids) == tuple(new_prefix_ids):
        return 1.0
    if beta == 0.0:  # no common chunk, the usual case in a large store
        return 0.0
    return beta * (1.0 - order_gamma(old_prefix_ids, new_prefix_ids))


def normalised_masses(
    inter_total: Sequence[float], intra: float, prefix_lengths: Sequence[int], num_tokens: int
) -> tuple[float, float]:
    """The pair (a, b) of CacheCraft eq. 9: `a = sum_{j<i} inter(Cj, Ci) / (|Ci| |Cj|)`, `b = intra(Ci) / |Ci|^2`.

    Args:
      inter_total: mass on each prefix chunk, summed over the chunk's query tokens; aligned with `prefix_lengths`.
      intra: eq. 4, mass of the chunk's queries on earlier tokens of the chunk itself (the diagonal left out).
      prefix_lengths: tokens of each prefix chunk.
      num_tokens: tokens of the chunk.

    Raises:
      ValueError: lengths disagree, a length is below 1, or a mass is negative or not finite.
    """
    if len(inter_total) != len(prefix_lengths):
        raise ValueError(
            f"inter_total: wanted one mass for each of the {len(prefix_lengths)} prefix lengths, got {len(inter_total)}"
        )
    check_masses("inter_total", inter_total)
    check_mass("intra", intra)
    check_count("num_tokens", num_tokens)
    for index, length in enumerate(prefix_lengths):
        check_count(f"prefix_lengths[{index}]", length)
    a = math.fsum(mass / (num_tokens * length) for mass, length in zip(inter_total, prefix_lengths, strict=True))
    return a, intra / num_tokens**2


def chunk_context_impact(a: float, b: float) -> float:
    """CCI in [0.5, 1], CacheCraft eq. 11: `1 / (1 + exp(-a/b))`. Since a/b >= 0 it is never below one half.

    The paper does not define b = 0, which every one-token chunk has (eq. 4 leaves the diagonal out). Our reading: the
    limit b -> 0, so 1 for a > 0 (all context came from outside); 0.5 if a = 0 too (there was no prefix).
    """
    check_mass("a", a)
    check_mass("b", b)
    if b == 0.0:
        return 0.5 if a == 0.0 else 1.0
    return 1.0 / (1.0 + math.exp(-a / b))


def cache_fix_overhead(cci: float, beta_adjusted: float, alpha: float) -> float:
    """CFO, the share of the chunk to recompute, CacheCraft eq. 12: `alpha CCI (1 - beta')`, clipped to [0, 1]."""
    check_ratio("cci", cci)
    check_ratio("beta_adjusted", beta_adjusted)
    check_mass("alpha", alpha)
    return min(1.0, alpha * cci * (1.0 - beta_adjusted))


def num_recompute_tokens(cfo: float, num_tokens: int) -> int:
    """Tokens to recompute in [0, num_tokens], CacheCraft eq. 14: `ceil(CFO |Ci|)`, robust to rounding errors.

    A product within one part in 1e9 of a whole number counts as that number, so 0.07 of 100 tokens is 7 and not 8.
    """
    check_ratio("cfo", cfo)
    check_count("num_tokens", num_tokens)
    return _whole(cfo * num_tokens, math.ceil)


def max_recompute_tokens(ratio: float, num_tokens: int) -> int:
    """The largest count that is at most `ratio` of `num_tokens`: the floor, with the same tolerance."""
    check_ratio("ratio", ratio)
    check_count("num_tokens", num_tokens)
    return _whole(ratio * num_tokens, math.floor)


def _whole(product: float, rounding: Callable[[float], int]) -> int:
    nearest = round(product)
    return nearest if math.isclose(product, nearest, rel_tol=_WHOLE_REL_TOL) else rounding(product)


def most_contextualised(token_ranking: Sequence[int], num_tokens: int, count: int) -> tuple[int, ...]:
    """The first `count` offsets of a variant's ranking, ascending: the tokens CacheCraft eq. 14 recomputes.

    Raises:
      ValueError: the ranking does not hold `num_tokens` entries, or its first `count` are not distinct offsets.
    """
    head = sorted(set(token_ranking[:count]))
    if len(token_ranking) != num_tokens or len(head) != count or (head and not 0 <= head[0] <= head[-1] < num_tokens):
        raise ValueError(
            f"token_ranking: wanted the offsets 0..{num_tokens - 1} once each, "
            f"got {len(token_ranking)} entries with {len(head)} distinct in the first {count}"
        )
    return tuple(head)
