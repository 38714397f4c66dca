"""The ways to answer that are compared: a strategy with a share to recompute. Knows no engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from ccjax.policy.strategies import STRATEGIES
from ccjax.types import ReuseMode

FIXED = ("full", "prefix", "set", "reuse")
"""Strategies that recompute nothing of what they reuse."""
_SPEC = re.compile(r"(?P<strategy>[a-z0-9_]+)(@(?P<layers>\d+(,\d+)*))?(:(?P<ratio>[0-9.]+))?")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to answer.

    Attributes:
      recompute_ratio: share of the reused passages that is recomputed; None leaves it to CacheCraft eq. 12.
      ranking_layers: of `EngineConfig`, when the passages were computed.
      alpha: CacheCraft eq. 12.
    """

    strategy: str
    recompute_ratio: float | None = None
    ranking_layers: tuple[int, ...] | None = None
    alpha: float = 1.0

    @property
    def reuse(self) -> ReuseMode:
        """The request's reuse mode."""
        return "off" if self.strategy == "full" else "bounded"

    @property
    def series(self) -> str:
        """The way without its share."""
        layers = "" if self.ranking_layers is None else "@" + ",".join(map(str, self.ranking_layers))
        return self.strategy + layers

    def __str__(self) -> str:
        """As `parse_way` reads it, unless alpha differs."""
        ratio = "" if self.recompute_ratio is None else f":{self.recompute_ratio:g}"
        return self.series + ratio + ("" if self.alpha == 1.0 else f" (alpha {self.alpha:g})")


FULL = Way("full")


def parse_way(text: str) -> Way:
    """`strategy`, `strategy:ratio` or `strategy@layer,layer:ratio`, as in `cachecraft@0,1:0.15`.

    Raises:
      ValueError: no such strategy, a share outside 0 to 1, or one for a strategy that recomputes nothing.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"way: wanted strategy[@layer,layer][:ratio], got {text!r}")
    strategy, layers, ratio = match["strategy"], match["layers"], match["ratio"]
    if strategy not in STRATEGIES:
        raise ValueError(f"way: wanted one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy in FIXED and (ratio or layers):
        raise ValueError(f"way: {strategy} recomputes nothing of what it reuses, got {text!r}")
    try:
        share = None if ratio is None else float(ratio)
    except ValueError as error:
        raise ValueError(f"way: wanted a share from 0 to 1, got {ratio!r}") from error
    if share is not None and not 0.0 <= share <= 1.0:
        raise ValueError(f"way: wanted a share from 0 to 1, got {ratio!r}")
    return Way(strategy, share, None if layers is None else tuple(map(int, layers.split(","))))


def expand(strategies: Iterable[str], ratios: Sequence[float]) -> tuple[Way, ...]:
    """Each strategy (`parse_way`, without a share) with each share, or once where it recomputes nothing."""
    ways: list[Way] = []
    for text in strategies:
        way = parse_way(text)
        alone = way.strategy in FIXED or way.recompute_ratio is not None
        ways += [way] if alone else [dataclasses.replace(way, recompute_ratio=ratio) for ratio in ratios]
    return tuple(dict.fromkeys(ways))
