"""Which documents the question focuses on, from its attention mass per layer (CacheCraft alg. 1)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ccjax.policy._checks import check_count, check_masses
from ccjax.types import LayerStats

FOCUS_RULES = ("entropy", "largest_gap")


def check_focus_rule(name: str, value: str) -> None:
    """Raises ValueError unless `value` is one of `FOCUS_RULES`."""
    if value not in FOCUS_RULES:
        raise ValueError(f"{name}: wanted one of {', '.join(FOCUS_RULES)}, got {value!r}")


def focused_chunks(mass: Sequence[float], rule: str) -> frozenset[int]:
    """Indices of the focused chunks, CacheCraft alg. 1 l. 4-9, from the question's mass on each chunk.

    Sort the masses, take the gaps between neighbours and their shares p = gap / sum(gaps), cut at one gap and keep the
    chunks above it. Lines 7-9 as printed skip the first gap and shift the cut by one; here every gap is a candidate and
    a cut after rank i keeps i chunks.

    Rules: `entropy` cuts where `-p ln p` is largest (as printed); that peaks at p = 1/e, so one gap of p = 0.9 scores
    below several small ones. `largest_gap` cuts where p is largest. Both: of equal scores the cut that keeps fewer
    chunks. Readings: a gap of 0 is never a cut, so equal chunks stay together and the order of ties cannot matter;
    one positive gap (always so for two chunks) decides, though its term is 0; no positive gap: all are focused.
    """
    order = sorted(range(len(mass)), key=lambda index: (-mass[index], index))
    gaps = [(kept, mass[order[kept - 1]] - mass[order[kept]]) for kept in range(1, len(order))]
    total = math.fsum(gap for _, gap in gaps)

    def score(gap: float) -> float:
        p = gap / total
        return -p * math.log(p) if rule == "entropy" and p > 0.0 else p

    cuts = [(-score(gap), kept) for kept, gap in gaps if gap > 0.0]
    return frozenset(order[: min(cuts)[1]] if cuts else order)


@dataclasses.dataclass(frozen=True, slots=True)
class FocusState:
    """Alg. 1 between two layers. Start with `FocusState()` and fold the layers in with `observe`.

    Attributes:
      cumulated_mass: CacheCraft eq. 15, the question's mass on each document summed over the layers so far.
      layer: the last layer observed.
      focused: the focused set after that layer.
      num_unchanged: consecutive layers, the last one included, that gave this same set.
      decided: the set F* once it stayed the same for the window, else None; nothing changes afterwards.
    """

    cumulated_mass: tuple[float, ...] = ()
    layer: int | None = None
    focused: frozenset[int] | None = None
    num_unchanged: int = 0
    decided: frozenset[int] | None = None


def observe(state: FocusState, stats: LayerStats, *, window: int, rule: str) -> FocusState:
    """The state after one more layer (CacheCraft alg. 1 l. 3-13); a decided state is returned unchanged.

    Args:
      stats: of the layer after `state.layer`; the first layer observed may have any number.
      window: w, the consecutive layers that must give the same set; 1 decides at once.

    Raises:
      ValueError: the layer does not follow the last one, the number of documents changed, or a mass, the window or the
        rule is out of range.
    """
    check_count("window", window)
    check_focus_rule("rule", rule)
    if state.decided is not None:
        return state
    mass = stats.question_mass_by_chunk
    if state.layer is not None and stats.layer != state.layer + 1:
        raise ValueError(f"stats.layer: wanted {state.layer + 1}, the layer after the last one, got {stats.layer}")
    if state.layer is not None and len(mass) != len(state.cumulated_mass):
        raise ValueError(
            f"stats.question_mass_by_chunk: wanted {len(state.cumulated_mass)} documents as before, got {len(mass)}"
        )
    check_masses("stats.question_mass_by_chunk", mass)
    before = state.cumulated_mass or (0.0,) * len(mass)
    cumulated = tuple(old + new for old, new in zip(before, mass, strict=True))
    focused = focused_chunks(cumulated, rule)
    num_unchanged = state.num_unchanged + 1 if focused == state.focused else 1
    is_decided = num_unchanged >= window
    return FocusState(
        cumulated_mass=cumulated,
        layer=stats.layer,
        focused=focused,
        num_unchanged=num_unchanged,
        decided=focused if is_decided else None,
    )
