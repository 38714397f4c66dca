"""The scheduler's queue: new plans, deadlines, places, the gap between tokens, bad arguments."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.scheduling import (
    AdmissionQueueFullError,
    NeverFitsError,
    ScheduledPack,
    ScheduledPiece,
    SchedulerSettings,
    SequenceWork,
    StepCosts,
)
from tests.policy.scheduling_builders import COSTS, admitted, build, decode, start
from tests.policy.scheduling_simulator import SimulatedEngine


class TestReplan:
    def test_replanned_waiting_request_keeps_its_queue_position(self):
        scheduler = build(SequenceWork("a", 5, 1, 5), SequenceWork("b", 5, 1, 5))
        scheduler.replan(SequenceWork("a", 9, 2, 5))
        assert start(scheduler).pieces == (
            ScheduledPiece("a", 0, 9, is_last=True),
            ScheduledPiece("b", 0, 5, is_last=True),
        )

    def test_replanning_updates_the_order_among_flows(self):
        scheduler = build(
            SequenceWork("a", 5, 1, 5, flow="x"), SequenceWork("b", 6, 1, 5, flow="y"), max_num_batched_tokens=5
        )
        scheduler.replan(SequenceWork("a", 9, 1, 5, flow="x"))
        assert admitted(scheduler) == ("b",)

    def test_replanned_request_in_a_pack_restarts_its_prefill(self):
        scheduler = build(SequenceWork("a", 15, 1, 5), SequenceWork("b", 5, 1, 5), max_num_batched_tokens=10)
        start(scheduler)
        scheduler.next_pack(0.0, 100, COSTS)
        scheduler.replan(SequenceWork("a", 8, 2, 5))
        assert scheduler.pack_done(0.0) == ("b",)
        assert start(scheduler) == ScheduledPack(admitted=("a",), pieces=(ScheduledPiece("a", 0, 8, is_last=True),))

    def test_replanned_decoding_request_prefills_its_answer_after_the_prompt(self):
        scheduler = build(SequenceWork("a", 15, 1, 5))
        start(scheduler)
        decode(scheduler)
        scheduler.next_decode(100, COSTS)
        scheduler.replan(SequenceWork("a", 8, 2, 5))  # the running step does not count
        scheduler.decode_done(0.0)
        assert start(scheduler).pieces == (ScheduledPiece("a", 0, 10, is_last=True),)

    def test_replan_rejects_changes_of_fixed_fields_by_name(self):
        scheduler = build(SequenceWork("a", 5, 1, 5), num_pages=10)
        with pytest.raises(ValueError, match="flow: wanted '' as before, got 'x'"):
            scheduler.replan(SequenceWork("a", 5, 1, 5, flow="x"))
        with pytest.raises(ValueError, match="priority: wanted 0 as before, got 1"):
            scheduler.replan(SequenceWork("a", 5, 1, 5, priority=1))
        with pytest.raises(ValueError, match="max_new_tokens: wanted 5 as before, got 6"):
            scheduler.replan(SequenceWork("a", 5, 1, 6))
        with pytest.raises(NeverFitsError):
            scheduler.replan(SequenceWork("a", 5, 11, 5))
        with pytest.raises(KeyError, match="'b'"):
            scheduler.replan(SequenceWork("b", 5, 1, 5))
        assert start(scheduler).pieces == (ScheduledPiece("a", 0, 5, is_last=True),)


class TestHold:
    def test_held_request_frees_its_slot_until_it_is_replanned(self):
        scheduler = build(*(SequenceWork(name, 5, 1, 1) for name in "abc"), max_num_seqs=1, max_num_batched_tokens=10)
        assert scheduler.next_pack(0.0, 100, COSTS).admitted == ("a",)
        scheduler.hold("a")
        assert scheduler.pack_done(0.0) == () and scheduler.num_waiting == 3 and scheduler.num_running == 0
        assert start(scheduler).pieces == (ScheduledPiece("b", 0, 5, is_last=True),)
        scheduler.remove("b")
        scheduler.replan(SequenceWork("a", 8, 2, 1))
        assert start(scheduler).pieces == (ScheduledPiece("a", 0, 8, is_last=True),)  # before c
        scheduler.remove("a")
        assert admitted(scheduler) == ("c",)

    def test_held_request_still_expires_at_its_deadline(self):
        scheduler = build(SequenceWork("a", 5, 1, 1, deadline_s=2.0))
        scheduler.next_pack(0.0, 100, COSTS)
        scheduler.hold("a")
        assert scheduler.expire(2.0) == ("a",) and scheduler.num_waiting == 0

    def test_only_requests_in_prefill_can_be_held(self):
        scheduler = build(SequenceWork("a", 5, 1, 9))
        with pytest.raises(ValueError, match="sequence_id: wanted one in prefill, got 'a', state waiting"):
            scheduler.hold("a")
        start(scheduler)
        with pytest.raises(ValueError, match="state decode"):
            scheduler.hold("a")
        with pytest.raises(KeyError):
            scheduler.hold("b")


class TestDeadlines:
    def test_expired_requests_are_reported_once_in_any_state(self):
        scheduler = build(SequenceWork("decodes", 5, 1, 50, deadline_s=4.0), max_num_seqs=2)
        start(scheduler)
        scheduler.add(SequenceWork("in the pack", 5, 1, 50, deadline_s=3.0))
        scheduler.add(SequenceWork("waits", 5, 1, 50, deadline_s=2.0))
        scheduler.add(SequenceWork("has time", 5, 1, 50, deadline_s=9.0))
        scheduler.add(SequenceWork("has none", 5, 1, 50))
        scheduler.next_pack(1.0, 100, COSTS)
        assert scheduler.expire(1.9) == ()
        assert scheduler.expire(4.0) == ("waits", "in the pack", "decodes")
        assert scheduler.expire(4.0) == ()
        assert scheduler.pack_done(4.0) == ()
        assert admitted(scheduler) == ("has time", "has none")
        scheduler.remove("has time")
        assert scheduler.expire(100.0) == ()

    def test_replan_may_change_the_deadline(self):
        scheduler = build(SequenceWork("a", 5, 1, 5, deadline_s=1.0))
        scheduler.replan(SequenceWork("a", 5, 1, 5, deadline_s=2.0))
        assert scheduler.expire(1.0) == ()
        scheduler.replan(SequenceWork("a", 5, 1, 5))
        assert scheduler.expire(3.0) == ()


class TestDecodeGap:
    def test_decode_is_due_when_another_layer_would_exceed_the_gap(self):
        costs = dataclasses.replace(COSTS, decode_step_s=0.25)
        scheduler = build(SequenceWork("a", 5, 1, 50), max_decode_gap_s=1.0, max_num_batched_tokens=10)
        start(scheduler, now_s=0.25)  # a's first token
        scheduler.add(SequenceWork("long", 100, 1, 5))
        scheduler.next_pack(0.25, 100, costs)
        assert not scheduler.after_layer(0.5)  # 0.25 s per layer: 0.5 + 0.25 + 0.25 is within 0.25 + 1
        assert not scheduler.after_layer(0.75)  # exactly at the limit
        assert scheduler.after_layer(1.0)
        scheduler.next_decode(100, costs)
        scheduler.decode_done(1.25)
        assert not scheduler.after_layer(1.5)
        assert scheduler.after_layer(2.0)  # a layer of 0.5 s: 2 + 0.5 + 0.25 is later than 1.25 + 1

    @pytest.mark.parametrize(("decode_step_s", "gap_s"), [(0.0, 0.2), (0.05, 0.2), (0.0625, 0.2), (0.5, 1.5)])
    def test_default_decode_gap_leaves_two_thirds_of_the_time_to_prefill(self, decode_step_s, gap_s):
        costs = dataclasses.replace(COSTS, decode_step_s=decode_step_s)

        def is_due(after_s):
            scheduler = build(SequenceWork("a", 5, 1, 50))
            start(scheduler, now_s=0.0, costs=costs)
            scheduler.add(SequenceWork("long", 100, 1, 5))
            scheduler.next_pack(0.0, 100, costs)
            return scheduler.after_layer(after_s)

        last_s = (gap_s - decode_step_s) / 2  # another layer and the step end exactly at the limit
        assert not is_due(last_s - 0.001)
        assert is_due(last_s + 0.001)

    def test_decode_gap_is_measured_from_the_longest_waiting_answer(self):
        scheduler = build(SequenceWork("a", 5, 1, 50), max_decode_gap_s=1.0)
        start(scheduler, now_s=0.0)
        scheduler.add(SequenceWork("b", 5, 1, 50))
        start(scheduler, now_s=0.9)
        scheduler.add(SequenceWork("c", 5, 1, 50))
        scheduler.next_pack(0.9, 100, COSTS)
        assert scheduler.after_layer(1.0)  # a's token was at 0

    def test_decode_is_never_due_without_a_decoding_sequence(self):
        scheduler = build(SequenceWork("one token", 5, 1, 1), max_decode_gap_s=0.0)
        start(scheduler)
        scheduler.add(SequenceWork("a", 5, 1, 50))
        scheduler.next_pack(0.0, 100, COSTS)
        assert not scheduler.after_layer(100.0)

    @given(
        layer_s=st.floats(0.001, 0.02),
        decode_s=st.floats(0.001, 0.02),
        seed=st.integers(0, 10**6),
        num_layers=st.integers(1, 8),
    )
    def test_decode_gap_limit_holds_in_simulation(self, layer_s, decode_s, seed, num_layers):
        """Layers of equal length: the time between two tokens is at most the gap, or a layer and a step if that is
        longer."""
        gap_s = 0.03
        engine = SimulatedEngine(
            SchedulerSettings(10_000, max_num_batched_tokens=50, max_decode_gap_s=gap_s),
            num_layers=num_layers,
            layer_s=layer_s,
            decode_s=decode_s,
        )
        draw = random.Random(seed)
        for number in range(12):
            engine.submit(
                SequenceWork(f"r{number}", draw.randint(1, 200), 10, draw.randint(1, 30), f"flow {number % 3}")
            )
            for _ in range(draw.randint(0, 12)):
                engine.tick()
        engine.run()
        for job in engine.jobs.values():
            times = job.token_times_s
            assert len(times) == job.work.max_new_tokens and job.num_preempted == 0
            gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
            assert max(gaps, default=0.0) <= max(gap_s, layer_s + decode_s) + 1e-9

    def test_decode_steps_interrupt_prefill_no_more_than_needed(self):
        """With a gap of 1 s and layers of 10 ms, the pack is hardly delayed."""
        engine = SimulatedEngine(
            SchedulerSettings(1000, max_num_batched_tokens=10, max_decode_gap_s=1.0), num_layers=10, layer_s=0.01
        )
        engine.submit(SequenceWork("a", 5, 1, 100))
        engine.tick()
        engine.submit(SequenceWork("long", 1000, 1, 1, flow="x"))  # 100 packs of 10 layers: 10 s
        engine.run()
        during = [at for at in engine.jobs["a"].token_times_s if at < engine.jobs["long"].token_times_s[0]]
        assert 9 <= len(during) <= 12

    def test_prefill_progresses_even_if_every_decode_step_exceeds_the_gap(self):
        engine = SimulatedEngine(
            SchedulerSettings(1000, max_num_batched_tokens=10, max_decode_gap_s=0.001), num_layers=3, decode_s=5.0
        )
        engine.submit(SequenceWork("a", 5, 1, 400))
        engine.tick()
        engine.submit(SequenceWork("long", 95, 1, 1))
        for _ in range(2 + 3 * 10):
            engine.tick()
        assert engine.jobs["long"].end == "complete" and engine.jobs["a"].end is None

    def test_sequence_without_a_page_does_not_make_decode_due(self):
        scheduler = build(
            SequenceWork("a", 5, 1, 50, tail_slots=3), SequenceWork("sits out", 5, 1, 50), max_decode_gap_s=1.0
        )
        start(scheduler)
        scheduler.next_decode(0, COSTS)
        scheduler.decode_done(0.5)
        scheduler.add(SequenceWork("long", 100, 1, 5, priority=1))
        scheduler.next_pack(0.5, 100, COSTS)
        assert not scheduler.after_layer(0.9)  # 0.9 + 0.4 + 0.01 is within 0.5 + 1, but not within 0 + 1
        assert scheduler.after_layer(1.3)


class TestPlacesInLine:
    def test_requests_beyond_max_queue_are_rejected(self):
        scheduler = build(*(SequenceWork(name, 5, 1, 1) for name in "abc"), max_queue=3, flow_share=1000.0)
        with pytest.raises(AdmissionQueueFullError, match="at most 3 queued requests"):
            scheduler.add(SequenceWork("d", 5, 1, 1, flow="x"))
        with pytest.raises(AdmissionQueueFullError, match="at most 3 queued requests"):
            scheduler.check_queue_limit("x")
        scheduler.remove("b")
        scheduler.check_queue_limit("x")  # and takes no place
        scheduler.check_queue_limit("x")
        scheduler.add(SequenceWork("d", 5, 1, 1))
        start(scheduler)
        scheduler.add(SequenceWork("e", 5, 1, 1))

    def test_flow_is_limited_to_its_share_of_the_free_queue_slots(self):
        scheduler = build(
            *(SequenceWork(f"x{number}", 5, 1, 1, flow="x") for number in range(5)), max_queue=10, flow_share=1.0
        )
        with pytest.raises(
            AdmissionQueueFullError, match="flow 'x': 5 of its requests wait.*fewer than 1 times the 5 free queue slots"
        ):
            scheduler.add(SequenceWork("x5", 5, 1, 1, flow="x"))
        for number in range(3):  # 0 of 5, 1 of 4, 2 of 3
            scheduler.add(SequenceWork(f"y{number}", 5, 1, 1, flow="y"))
        with pytest.raises(AdmissionQueueFullError, match="flow 'y'"):
            scheduler.add(SequenceWork("y3", 5, 1, 1, flow="y"))
        scheduler.add(SequenceWork("z", 5, 1, 1, flow="z"))

    def test_preempted_requests_use_no_queue_slot(self):
        scheduler = build(SequenceWork("a", 5, 1, 50), max_queue=1)
        start(scheduler)
        scheduler.add(SequenceWork("b", 5, 1, 50))
        start(scheduler)
        assert decode(scheduler, 0).preempted == ("b",)
        scheduler.add(SequenceWork("c", 5, 1, 50))
        with pytest.raises(AdmissionQueueFullError):
            scheduler.add(SequenceWork("d", 5, 1, 50))

    def test_retry_after_estimates_the_time_until_a_queue_slot_is_free(self):
        costs = StepCosts(token_s=0.01, decode_step_s=0.1, answer_tokens=20)
        scheduler = build(max_queue=4, max_num_seqs=2, max_num_batched_tokens=10, flow_share=1.0)
        assert scheduler.retry_after_s("x", costs) == 0.0
        scheduler.add(SequenceWork("a", 10, 1, 50))
        start(scheduler)
        for _ in range(5):
            decode(scheduler)  # a has 6 tokens
        scheduler.add(SequenceWork("b", 40, 1, 10, flow="b"))
        start(scheduler)  # 30 of b's tokens are left
        scheduler.add(SequenceWork("x0", 20, 1, 10, flow="x"))
        scheduler.add(SequenceWork("x1", 40, 1, 10, flow="x"))
        scheduler.add(SequenceWork("y0", 30, 1, 10, flow="y"))
        # x has 2 places, 1 is left. Both slots are taken: 0.3 s for b's prompt, then the first answer to end has b's
        # 10 tokens, not a's 20 - 6. x gets a turn once per round of the two flows: one more prompt of 30 tokens.
        assert scheduler.retry_after_s("x", costs) == pytest.approx(0.3 + 1.0 + 0.3)
        assert scheduler.retry_after_s("z", costs) == 0.0
        scheduler.add(SequenceWork("z0", 30, 1, 10, flow="z"))
        assert scheduler.retry_after_s("z", costs) == pytest.approx(0.3 + 1.0)
        scheduler.remove("b")
        assert scheduler.retry_after_s("z", costs) == 0.0 + 0.0  # nothing to prefill, and a free slot
        start(scheduler, 0)  # but no page
        assert scheduler.retry_after_s("z", costs) == pytest.approx(14 * 0.1)
        assert scheduler.retry_after_s("z", dataclasses.replace(costs, answer_tokens=None)) == pytest.approx(44 * 0.1)
        assert scheduler.retry_after_s("z", dataclasses.replace(costs, answer_tokens=3)) == pytest.approx(0.1)


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("prefill_tokens", 0),
            ("prompt_pages", -1),
            ("max_new_tokens", 0),
            ("priority", 0.5),
            ("priority", True),
            ("deadline_s", math.nan),
            ("cached_tokens", -1),
            ("shared_pages", -1),
            ("tail_slots", -1),
        ],
    )
    def test_invalid_sequence_work_is_rejected_by_name(self, name, value):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(SequenceWork("a", 1, 1, 1), **{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_pages", 0),
            ("page_tokens", 0),
            ("max_num_batched_tokens", 0),
            ("max_num_context_tokens", 0),
            ("max_num_seqs", 0),
            ("max_decode_gap_s", -1.0),
            ("reserve_pages", -1),
            ("max_queue", 0),
            ("flow_share", 0.0),
            ("flow_share", math.inf),
            ("reorder_window", 0),
        ],
    )
    def test_invalid_scheduler_settings_are_rejected_by_name(self, name, value):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(SchedulerSettings(10), **{name: value})

    @pytest.mark.parametrize("name", ["token_s", "decode_step_s", "answer_tokens"])
    def test_invalid_step_costs_are_rejected_by_name(self, name):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(COSTS, **{name: -1.0})

    def test_invalid_scheduler_calls_are_rejected_by_name(self):
        scheduler = build()
        with pytest.raises(ValueError, match="tail_slots: wanted less than a page of 4, got 4"):
            scheduler.add(SequenceWork("a", 1, 1, 1, tail_slots=4))
        with pytest.raises(ValueError, match="free_pages"):
            scheduler.next_pack(0.0, -1, COSTS)
        with pytest.raises(ValueError, match="free_pages"):
            scheduler.next_decode(-1, COSTS)


def test_preempted_request_resumes_before_newcomers_after_the_queue_was_empty():
    """Its tag of 40 is from before; virtual time restarts with an empty queue, where a new request's tag is 5."""
    scheduler = build(SequenceWork("a", 5, 1, 50), SequenceWork("b", 40, 1, 50, flow="x"))
    start(scheduler)
    scheduler.add(SequenceWork("newcomer", 5, 1, 50, flow="y"))
    assert decode(scheduler, 0).preempted == ("b",)
    assert admitted(scheduler) == ("b", "newcomer")
