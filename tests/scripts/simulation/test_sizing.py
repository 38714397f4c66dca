"""Goals as text, and the search over budgets and replicas."""

import math

import pytest

from scripts.simulation.sizing import DeploymentSize, Goal, parse_goal, search


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("p99 TTFT < 1 s at 20 req/s", Goal("p99", "ttft", 1.0, 20.0)),
        ("mean latency <= 250 ms at 0.5 qps", Goal("mean", "latency", 0.25, 0.5)),
        (" P50 ttft < 2.5s at 3 requests/s ", Goal("p50", "ttft", 2.5, 3.0)),
    ],
)
def test_goals_are_parsed(text, wanted):
    assert parse_goal(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "fast", "p98 TTFT < 1 s at 20 req/s", "p99 TTFT < 0 s at 1 qps", "p99 TTFT > 1 s at 2 qps"]
)
def test_invalid_goals_are_rejected(text):
    with pytest.raises(ValueError, match="size-for"):
        parse_goal(text)


def figures(value, refused=0):
    return {"ttft_s": {"p99": value}, "requests": 10, "answered": 10 - refused}


GOAL = Goal("p99", "ttft", 1.0, 20.0)


def test_run_with_refused_requests_misses_the_goal():
    assert GOAL.is_met(figures(0.5)) and not GOAL.is_met(figures(1.5))
    assert GOAL.value(figures(0.5, refused=1)) == math.inf


@pytest.mark.parametrize("most", [1, 2, 5, 7, 16, 33])
def test_search_finds_the_fewest_replicas_per_budget(most):
    """p99 is 12 s over replicas and budget: budget 1 needs 12, 2 needs 6, 3 needs 4, 12 needs 1."""
    asked = []

    def simulate(size):
        asked.append(size)
        return figures(12 / (size.replicas * size.host_cache_bytes))

    needed, tried = search(GOAL, [12, 1, 2, 3, 3], most, simulate)
    wanted = {budget: DeploymentSize(budget, math.ceil(12 / budget)) for budget in (1, 2, 3, 12) if 12 / budget <= most}
    assert needed == wanted
    assert len(asked) == len(set(asked)) == len(tried)
