"""The registry, and what each strategy decides for one prompt that holds every kind of candidate."""

from __future__ import annotations

from typing import Any

import pytest

from ccjax.policy.planner import PlannerSettings, plan_prefill
from ccjax.policy.strategies import STRATEGIES, get_strategy
from tests.policy.builders import ids, prompt, variant

# S exact; A exact behind S; B behind another prefix, CFO 0.5 * 1/2 = 0.25 of 10 tokens: 3; C exact behind S A B; D none
PROMPT = prompt("SABCD", system=True)
CANDIDATES = {
    ids("S")[0]: [variant("S")],
    ids("A")[0]: [variant("A", "S"), variant("A")],
    ids("B")[0]: [variant("B", "SX")],
    ids("C")[0]: [variant("C", "SAB")],
}


def decided(strategy: str, mode: Any = "bounded", **settings) -> list[tuple[str | None, tuple[int, ...]]]:
    plan = plan_prefill("r", PROMPT, 3, CANDIDATES, mode=mode, settings=PlannerSettings(strategy=strategy, **settings))
    return [(segment.variant_id, segment.recompute_offsets) for segment in plan.segments[:-1]]


COMPUTE = (None, ())
S, A, C = ("S||exact", ()), ("A|S|exact", ()), ("C|SAB|exact", ())


@pytest.mark.parametrize(
    ("strategy", "mode", "expected"),
    [
        ("full", "bounded", [COMPUTE] * 5),
        ("full", "exact", [COMPUTE] * 5),
        ("prefix", "bounded", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("prefix", "exact", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("prefix", "fast", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("reuse", "bounded", [S, A, ("B|SX|exact", ()), C, COMPUTE]),
        ("reuse", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("cachecraft", "bounded", [S, A, ("B|SX|exact", (7, 8, 9)), C, COMPUTE]),
        ("cachecraft", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("cachecraft", "off", [COMPUTE] * 5),
        ("reuse", "off", [COMPUTE] * 5),
    ],
)
def test_decisions(strategy, mode, expected):
    assert decided(strategy, mode) == expected


@pytest.mark.parametrize(
    ("mode", "settings", "num_recomputed"),
    [
        ("bounded", {"alpha": 0.4}, 1),  # 0.1 of 10
        ("bounded", {"alpha": 2.0}, 5),
        ("bounded", {"recompute_ratio": 0.0}, 0),
        ("bounded", {"recompute_ratio": 0.75}, 8),
        ("fast", {}, 0),  # 0.05 of 10 is half a token: at most that, so none
        ("fast", {"fast_ratio": 0.1}, 1),
        ("fast", {"fast_ratio": 0.9}, 3),  # CFO asks for less than it may
        ("fast", {"fast_ratio": 0.9, "recompute_ratio": 1.0}, 3),  # the forced share belongs to `bounded`
    ],
)
def test_cachecraft_recomputes_the_last_tokens_its_ranking_names(mode, settings, num_recomputed):
    assert decided("cachecraft", mode, **settings)[2] == (
        "B|SX|exact",
        tuple(range(10 - num_recomputed, 10)),
    )


def test_the_naive_strategy_ignores_a_forced_share():
    assert decided("reuse", recompute_ratio=1.0)[2] == ("B|SX|exact", ())


def test_prefix_stops_at_the_first_gap_even_where_an_exact_variant_follows():
    plan = plan_prefill(
        "r",
        prompt("AB"),
        3,
        {ids("B")[0]: [variant("B", "A")]},
        mode="exact",
        settings=PlannerSettings(strategy="prefix"),
    )
    assert [segment.action for segment in plan.segments] == ["compute"] * 3


def test_registry_is_by_exact_name_and_lists_what_it_knows():
    assert set(STRATEGIES) == {"full", "prefix", "reuse", "cachecraft"}
    for name in ("Full", "cacheblend", "cache", ""):
        with pytest.raises(ValueError, match=f"strategy: wanted one of full, prefix, reuse, cachecraft, got '{name}'"):
            get_strategy(name)
