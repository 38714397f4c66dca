"""RAGCache alg. 2 by hand (fig. 13), and that the answer always uses the passages found last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.speculation import Speculation, SpeculationStep

BEGIN, CHANGE, STAY, STOP = (
    SpeculationStep(give_up, begin) for give_up, begin in ((False, True), (True, True), (False, False), (True, False))
)


def steps(stages, pending=0, max_pending=4):
    """The decision after each stage; the last stage is final."""
    one = Speculation(max_pending)
    counts = [pending] * len(stages) if isinstance(pending, int) else pending
    return [
        one.next_step(found, is_final=number == len(stages), num_pending=count)
        for number, (found, count) in enumerate(zip(stages, counts, strict=True), 1)
    ]


def test_steps_match_the_figure_of_the_paper():
    assert steps([("1", "3"), ("1", "2"), ("1", "2"), ("1", "2")]) == [BEGIN, CHANGE, STAY, STAY]


def test_reordered_passages_restart_the_speculation():
    assert steps([("1", "2"), ("2", "1")]) == [BEGIN, CHANGE]


def test_no_speculation_begins_while_too_many_requests_are_pending():
    assert steps(["ab", "ab", "ab"], pending=4) == [STAY, STAY, BEGIN]
    assert steps(["ab", "ac", "ac"], pending=[3, 4, 4]) == [BEGIN, STOP, BEGIN]
    assert steps(["ab", "ab", "ab"], pending=[9, 3, 9]) == [STAY, BEGIN, STAY]
    assert steps(["ab", "ab"], max_pending=0) == [STAY, BEGIN]


def test_empty_passages_are_used_only_at_the_final_stage():
    assert steps(["", "", "a"]) == [STAY, STAY, BEGIN] and steps(["", ""]) == [STAY, BEGIN]


def test_rejected_speculation_is_tried_again():
    one = Speculation(4)
    assert one.next_step("ab", is_final=False, num_pending=0) == BEGIN
    one.refused()
    assert one.next_step("ab", is_final=False, num_pending=0) == BEGIN
    assert one.next_step("ac", is_final=True, num_pending=9) == CHANGE


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "ab", "ba"]), st.integers(0, 6)), min_size=1))
def test_final_answer_always_uses_the_last_passages(stages):
    under_way = None
    found = [passages for passages, _ in stages]
    for passages, step in zip(found, steps(found, [count for _, count in stages]), strict=True):
        if step.give_up:
            assert under_way is not None and under_way != passages
            under_way = None
        if step.begin:
            assert under_way is None
            under_way = passages
    assert under_way == found[-1]


def test_invalid_max_pending_is_rejected_by_name():
    with pytest.raises(ValueError, match="max_pending: wanted an integer of at least 0"):
        Speculation(-1)
