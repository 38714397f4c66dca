"""Ways to answer, for comparison: a strategy with a share to recompute, or a way to ask passage by passage."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ccjax.policy._checks import check_count
from ccjax.policy.focus import check_focus_rule
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import STRATEGIES
from ccjax.policy.strategy import AT_CAPTURE
from ccjax.types import ReuseMode

FIXED = tuple(name for name, strategy in STRATEGIES.items() if not strategy.recomputes)
"""Strategies that recompute nothing of what they reuse."""
PASSAGE_BY_PASSAGE = ("map_rerank", "map_reduce")
"""Ways that never put the passages into one prompt (CacheBlend sec. 7)."""
_WITHOUT_SHARE = ("default", *FIXED, *PASSAGE_BY_PASSAGE)
_SPEC = re.compile(
    r"(?P<strategy>[a-z0-9_]+)(@(?P<layers>\d+(,\d+)*))?(?P<old>/old)?(/(?P<rule>[a-z_]+)(?P<window>\d+))?((?P<sign>[:~=])(?P<number>[0-9.]+))?"
)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to answer.

    Attributes:
      strategy: a name of `ccjax.policy.strategies` or of `PASSAGE_BY_PASSAGE`; "default" for the engine's default
        options.
      recompute_ratio: recomputed share of the reused passages; None for CacheCraft eq. 12 or `max_deviation`.
      ranking_layers: of `EngineConfig`, when the passages were computed.
      fixes_positions: of `EngineConfig`; False is CacheCraft table 3's reuse without it.
      alpha: CacheCraft eq. 12, in place of a share; None for that of `EngineConfig`.
      max_deviation: of `EngineConfig`, in place of a share.
      focus_window, focus_rule: of `EngineConfig`; None for no focus cut.
    """

    strategy: str
    recompute_ratio: float | None = None
    ranking_layers: tuple[int, ...] | None = None
    fixes_positions: bool = True
    alpha: float | None = None
    max_deviation: float | None = None
    focus_window: int | None = None
    focus_rule: str = "entropy"

    @property
    def reuse(self) -> ReuseMode:
        """The request's reuse mode."""
        return "off" if self.strategy == "full" else "bounded"

    @property
    def stored_by(self) -> str:
        """The strategy of the engine that computes passages for it: its own if that needs something measured then which
        the default does not."""
        default = PlannerSettings().strategy
        own = STRATEGIES.get(self.strategy, STRATEGIES[default])
        return own.name if (own.needs - STRATEGIES[default].needs) & AT_CAPTURE else default

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `EngineConfig` for this way."""
        if self.strategy == "default":
            return {}
        return {
            "strategy": "prefix" if self.strategy in PASSAGE_BY_PASSAGE else self.strategy,
            "alpha": PlannerSettings().alpha if self.alpha is None else self.alpha,
            "recompute_ratio": self.recompute_ratio,
            "max_deviation": self.max_deviation,
            "fixes_positions": self.fixes_positions,
            "focus_window": self.focus_window,
            "focus_rule": self.focus_rule,
        }

    @property
    def series(self) -> str:
        """The way without its share."""
        layers = "" if self.ranking_layers is None else "@" + ",".join(map(str, self.ranking_layers))
        focus = "" if self.focus_window is None else f"/{self.focus_rule}{self.focus_window}"
        return self.strategy + layers + ("" if self.fixes_positions else "/old") + focus

    def __str__(self) -> str:
        """The text that `parse_way` accepts."""
        ratio = "" if self.recompute_ratio is None else f":{self.recompute_ratio:g}"
        ratio += "" if self.max_deviation is None else f"~{self.max_deviation:g}"
        return self.series + (ratio or ("" if self.alpha is None else f"={self.alpha:g}"))


FULL = Way("full")
DEFAULT = Way("default")


def parse_way(text: str) -> Way:
    """`strategy[@layer,layer][/old][/rule window][:ratio]`, as in `cachecraft@0,1/entropy3:0.15`: the layers whose
    attention ranked tokens, `/old` for keys that stay at their old positions, rule and window of the focus cut, the
    share to recompute; or `cachecraft=alpha` for as many as CacheCraft eq. 12 says, or `auto~deviation` for tokens that
    deviate more. `default` stands for the default options.

    Raises:
      ValueError: no such strategy or rule, a share outside 0 to 1, or one of these for a strategy that recomputes
        nothing.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        wanted = "strategy[@layer,layer][/old][/rule window][:ratio, =alpha or ~deviation]"
        raise ValueError(f"way: wanted {wanted}, got {text!r}")
    strategy, layers, text_of_number = match["strategy"], match["layers"], match["number"]
    known = ("default", *STRATEGIES, *PASSAGE_BY_PASSAGE)
    if strategy not in known:
        raise ValueError(f"way: wanted one of {', '.join(known)}, got {strategy!r}")
    if strategy == "default" and text != strategy:
        raise ValueError(f"way: default takes no settings, got {text!r}")
    if strategy in _WITHOUT_SHARE and (text_of_number or layers or match["window"]):
        raise ValueError(f"way: {strategy} recomputes nothing of what it reuses, got {text!r}")
    if strategy in ("full", *PASSAGE_BY_PASSAGE) and match["old"]:
        raise ValueError(f"way: {strategy} moves no passage, got {text!r}")
    try:
        number = None if text_of_number is None else float(text_of_number)
    except ValueError as error:
        raise ValueError(f"way: wanted a number behind {match['sign']}, got {text!r}") from error
    ranked = None if layers is None else tuple(map(int, layers.split(",")))
    way = Way(strategy, None, ranked, fixes_positions=not match["old"])
    if match["window"] is not None:
        check_focus_rule("way", match["rule"])
        check_count("way: window", int(match["window"]))
        way = dataclasses.replace(way, focus_window=int(match["window"]), focus_rule=match["rule"])
    if match["sign"] == "~":
        if strategy not in STRATEGIES or "max_deviation" not in STRATEGIES[strategy].options:
            raise ValueError(f"way: {strategy} supports no deviation, got {text!r}")
        return dataclasses.replace(way, max_deviation=number)
    if match["sign"] == "=":
        if strategy not in STRATEGIES or "alpha" not in STRATEGIES[strategy].options:
            raise ValueError(f"way: {strategy} supports no alpha, got {text!r}")
        return dataclasses.replace(way, alpha=number)
    if number is not None and not 0.0 <= number <= 1.0:
        raise ValueError(f"way: wanted a share from 0 to 1, got {text!r}")
    return dataclasses.replace(way, recompute_ratio=number)


def expand(texts: Iterable[str], ratios: Sequence[float]) -> tuple[Way, ...]:
    """Each way (`parse_way`), with each share if it can have one and names none."""
    ways: list[Way] = []
    for way in map(parse_way, texts):
        own = (way.recompute_ratio, way.alpha, way.max_deviation)
        is_whole = way.strategy in _WITHOUT_SHARE or own != (None, None, None)
        ways += [way] if is_whole else [dataclasses.replace(way, recompute_ratio=ratio) for ratio in ratios]
    return tuple(dict.fromkeys(ways))
