"""The cluster benchmark at its smallest."""

from __future__ import annotations

import pytest

from scripts.benchmarks.cluster import COUNTERS
from tests.scripts import in_process

pytestmark = pytest.mark.cluster


def test_every_question_is_answered_with_and_without_a_store(test_data):
    _, figures = in_process.figures("cluster", "--model", "demo", "--requests", 8, "--passes", 2, "--data", test_data())
    _, default, _, baseline = figures["cases"]  # in the first pass, preparing for so few costs more than it saves
    assert (default["system"], baseline["system"]) == ("default", "no store")
    assert default["rate"] == baseline["rate"] > 0 and default["throughput_gain"] > 0
    assert default["computed_share"] < baseline["computed_share"] == 1.0
    assert all(case["counters"].keys() == set(COUNTERS) for case in figures["cases"])
