"""Ways as text and back."""

from __future__ import annotations

import pytest

from ccjax.engine import EngineConfig
from ccjax.evaluation.ways import DEFAULT, FULL, Way, expand, parse_way

WAYS = [
    ("full", FULL),
    ("default", DEFAULT),
    ("reuse", Way("reuse")),
    ("auto", Way("auto")),
    ("cachecraft:0.15", Way("cachecraft", 0.15)),
    ("cachecraft@0,1:0.3", Way("cachecraft", 0.3, (0, 1))),
    ("cachecraft@12", Way("cachecraft", None, (12,))),
    ("reuse/old", Way("reuse", fixes_positions=False)),
    ("cachecraft@2/old:0.3", Way("cachecraft", 0.3, (2,), fixes_positions=False)),
    ("map_rerank", Way("map_rerank")),
    ("auto~0.25", Way("auto", max_deviation=0.25)),
    ("cachecraft=1", Way("cachecraft", alpha=1.0)),
    ("auto/entropy3=0.35", Way("auto", alpha=0.35, focus_window=3)),
    ("cachecraft/entropy3:0.3", Way("cachecraft", 0.3, focus_window=3)),
    ("auto@0/old/largest_gap12", Way("auto", None, (0,), False, focus_window=12, focus_rule="largest_gap")),
]
BAD = [
    ("", "strategy"),
    ("cachecraft:", "strategy"),
    ("cachecraft@:0.1", "strategy"),
    ("best:0.1", "wanted one of default"),
    ("cachecraft:1.5", "share from 0 to 1"),
    ("cachecraft:0.1.2", "a number behind :"),
    ("reuse:0.1", "recomputes nothing"),
    ("prefix@1", "recomputes nothing"),
    ("map_reduce:0.1", "recomputes nothing"),
    ("cachecraft~0.3", "cachecraft supports no deviation"),
    ("auto~1.2.3", "a number behind ~"),
    ("cacheblend=1", "cacheblend supports no alpha"),
    ("reuse=1", "recomputes nothing"),
    ("default=1", "takes no settings"),
    ("default:0.1", "default takes no settings"),
    ("default/old", "default takes no settings"),
    ("full/old", "moves no passage"),
    ("map_reduce/old", "moves no passage"),
    ("cachecraft:0.1/old", "strategy"),
    ("cachecraft/entropy:0.1", "strategy"),
    ("cachecraft/entropy0:0.1", "window"),
    ("cachecraft/best3:0.1", "largest_gap"),
    ("reuse/entropy3", "recomputes nothing"),
]


def test_way_round_trips_through_text():
    assert [(str(way), parse_way(text)) for text, way in WAYS] == WAYS


def test_invalid_way_is_rejected_with_a_message():
    for text, message in BAD:
        with pytest.raises(ValueError, match=message):
            parse_way(text)


def test_ratios_apply_only_to_recompute_strategies_without_their_own_ratio():
    found = expand(
        ["default", "reuse", "auto", "random:0.5", "auto", "auto~2", "auto=1", "map_reduce", "cachecraft/old"],
        [0.1, 0.2],
    )
    wanted = [
        "default",
        "reuse",
        "auto:0.1",
        "auto:0.2",
        "random:0.5",
        "auto~2",
        "auto=1",
        "map_reduce",
        "cachecraft/old:0.1",
        "cachecraft/old:0.2",
    ]
    assert list(map(str, found)) == wanted
    assert Way("auto", alpha=0.5).reuse == "bounded" and FULL.reuse == "off"


def test_default_way_uses_the_engine_defaults():
    assert DEFAULT.settings == {} and DEFAULT.reuse == "bounded"
    assert EngineConfig(**Way("auto").settings) == EngineConfig(), "today they are these"
    craft = EngineConfig(**parse_way("cachecraft/old:0.3").settings)
    assert (craft.strategy, craft.recompute_ratio, craft.fixes_positions) == ("cachecraft", 0.3, False)
    assert Way("map_reduce").settings["strategy"] == "prefix"
