"""Choice of prefills and decode steps, with expectations by hand. Queue, random traces and fair order have their own
test files."""

from __future__ import annotations

import pytest

from ccjax.policy.scheduling import (
    DecodeStep,
    NeverFitsError,
    ScheduledPack,
    ScheduledPiece,
    SchedulerSettings,
    SequenceWork,
    StepCosts,
)
from tests.policy.scheduling_builders import COSTS, admitted, build, decode, start
from tests.policy.scheduling_simulator import SimulatedEngine


class TestPieces:
    def test_a_long_prompt_is_cut_and_a_short_one_shares_its_last_pack(self):
        scheduler = build(SequenceWork("long", 24, 1, 5), SequenceWork("short", 4, 1, 5), max_num_batched_tokens=10)
        assert scheduler.next_pack(0.0, 100, COSTS) == ScheduledPack(
            admitted=("long",), pieces=(ScheduledPiece("long", 0, 10, is_last=False),)
        )
        assert scheduler.pack_done(0.1) == ()
        assert scheduler.next_pack(0.1, 99, COSTS) == ScheduledPack(
            pieces=(ScheduledPiece("long", 10, 10, is_last=False),)
        )
        assert scheduler.pack_done(0.2) == ()
        assert scheduler.next_pack(0.2, 99, COSTS) == ScheduledPack(
            admitted=("short",),
            pieces=(ScheduledPiece("long", 20, 4, is_last=True), ScheduledPiece("short", 0, 4, is_last=True)),
        )
        assert scheduler.num_decoding == 0
        assert scheduler.pack_done(0.3) == ("long", "short")
        assert (scheduler.num_decoding, scheduler.num_running, scheduler.num_waiting) == (2, 2, 0)
        assert scheduler.next_pack(0.3, 98, COSTS) == ScheduledPack()

    def test_indivisible_prompts_are_never_split(self):
        scheduler = build(SequenceWork("begun", 14, 1, 5, flow="x"), max_num_batched_tokens=10)
        start(scheduler)
        scheduler.add(SequenceWork("long", 23, 1, 5, flow="y", is_divisible=False))
        scheduler.add(SequenceWork("whole", 8, 1, 5, flow="z", is_divisible=False))
        packs = [start(scheduler) for _ in range(6)]
        assert [[(piece.sequence_id, piece.num_tokens) for piece in pack.pieces] for pack in packs] == [
            [("begun", 4)],  # whole is next (tag 10 + 8), but needs 8
            [("whole", 8)],  # long needs a pack of its own
            [("long", 23)],
            [],
            [],
            [],
        ]

    def test_indivisible_prompt_at_the_head_is_not_overtaken_by_smaller_ones(self):
        scheduler = build(
            SequenceWork("first", 4, 1, 5),
            SequenceWork("whole", 8, 1, 5, is_divisible=False),
            SequenceWork("small", 4, 1, 5),
            max_num_batched_tokens=10,
        )
        assert [admitted(scheduler) for _ in range(2)] == [("first",), ("whole", "small")]

    @pytest.mark.parametrize(
        ("most", "token_s", "expected"),
        [(8192, 40e-6, 8192), (8192, 100e-6, 4096), (8192, 240e-6, 2048), (8192, 1.0, 1024), (1024, 1.0, 1024)],
    )
    def test_packs_are_halved_while_they_take_too_long(self, most, token_s, expected):
        works = [SequenceWork(str(index), 3000, 1, 5) for index in range(3)]
        scheduler = build(*works, max_num_batched_tokens=most)
        pack = start(scheduler, costs=StepCosts(token_s, 0.01))
        assert sum(piece.num_tokens for piece in pack.pieces) == expected

    @pytest.mark.parametrize(
        ("token_s", "expected"),
        [
            (0.0005, [["a", "b", "c", "long"]]),
            (0.001, [["a", "b", "c"], ["long"], ["long"]]),
            (0.002, [["a", "b"], ["c"], ["long"], ["long"]]),
            (0.01, [["a"], ["b"], ["c"], ["long"], ["long"]]),
        ],
    )
    def test_a_pack_of_several_takes_half_a_second_at_most(self, token_s, expected):
        works = [SequenceWork(name, 100, 1, 5) for name in ("a", "b", "c")]
        scheduler = build(*works, SequenceWork("long", 1200, 1, 5), max_num_batched_tokens=1000)
        packs = []
        for _ in expected:
            pack = start(scheduler, costs=StepCosts(token_s, 0.01))
            packs.append([piece.sequence_id for piece in pack.pieces])
        assert packs == expected

    def test_a_removed_request_leaves_the_pack_that_runs(self):
        scheduler = build(SequenceWork("a", 5, 1, 5), SequenceWork("b", 5, 1, 5))
        scheduler.next_pack(0.0, 100, COSTS)
        scheduler.remove("a")
        assert "a" not in scheduler and "b" in scheduler
        assert scheduler.pack_done(0.1) == ("b",)

    def test_calls_out_of_order_raise(self):
        scheduler = build(SequenceWork("a", 5, 1, 5))
        scheduler.next_pack(0.0, 100, COSTS)
        with pytest.raises(RuntimeError, match="pack_done"):
            scheduler.next_pack(0.0, 100, COSTS)
        scheduler.pack_done(0.0)
        with pytest.raises(RuntimeError, match="next_decode"):
            scheduler.decode_done(0.0)
        scheduler.next_decode(100, COSTS)
        with pytest.raises(RuntimeError, match="decode_done"):
            scheduler.next_decode(100, COSTS)
        with pytest.raises(RuntimeError, match="decode_done"):
            scheduler.next_pack(0.0, 100, COSTS)


class TestAdmission:
    @pytest.mark.parametrize(("free_pages", "names"), [(6, ()), (7, ("a",)), (13, ("a",)), (14, ("a", "b"))])
    def test_admission_reserves_pages_for_each_admitted_request(self, free_pages, names):
        scheduler = build(SequenceWork("a", 5, 5, 100), SequenceWork("b", 5, 5, 100), reserve_pages=2)
        assert admitted(scheduler, free_pages) == names

    def test_reserve_is_limited_to_the_longest_possible_answer(self):
        scheduler = build(reserve_pages=9)
        scheduler.add(SequenceWork("a", 5, 5, 6))  # 5 slots: 2 pages
        scheduler.add(SequenceWork("b", 5, 5, 6, tail_slots=1))  # 1 page
        assert admitted(scheduler, 12) == ("a",)  # 5 + 2, then 5 + 1 of the 7 left, with 2 in reserve for a
        assert admitted(scheduler, 7) == ()
        assert admitted(scheduler, 8) == ("b",)

    def test_small_request_does_not_overtake_a_large_one_waiting_for_pages(self):
        scheduler = build(
            SequenceWork("large", 5, 50, 1),
            SequenceWork("small", 5, 1, 1, flow="other"),
            SequenceWork("smaller", 1, 1, 1, priority=1),
        )
        assert start(scheduler, 49) == ScheduledPack()
        assert admitted(scheduler, 52) == ("large", "small", "smaller")

    def test_only_shared_pages_not_yet_present_count_at_admission(self):
        scheduler = build(SequenceWork("a", 5, 2, 1, shared_pages=10))
        assert scheduler.next_pack(0.0, 11, COSTS) == ScheduledPack()
        assert scheduler.next_pack(0.0, 5, COSTS, shared_pages=lambda name: {"a": 4}[name]) == ScheduledPack()
        pack = scheduler.next_pack(0.0, 6, COSTS, shared_pages=lambda name: {"a": 4}[name])
        assert pack.admitted == ("a",)

    def test_request_that_can_never_fit_is_rejected_at_once(self):
        scheduler = build(num_pages=10)
        scheduler.add(SequenceWork("fits", 5, 6, 17))  # 16 slots, 4 pages: the last token leaves no KV
        with pytest.raises(NeverFitsError, match="at most 10 pages of 4.*got 6 for the prompt and 11 with an.*18"):
            scheduler.add(SequenceWork("a", 5, 6, 18))
        with pytest.raises(NeverFitsError, match="got 7 for the prompt and 11"):
            scheduler.add(SequenceWork("a", 5, 6, 17, shared_pages=1))
        scheduler.add(SequenceWork("tail", 5, 6, 18, tail_slots=1))
        assert "a" not in scheduler and scheduler.num_waiting == 2

    def test_ids_are_unique_until_they_are_removed(self):
        scheduler = build(SequenceWork("a", 5, 1, 1))
        with pytest.raises(ValueError, match="sequence_id.*'a'"):
            scheduler.add(SequenceWork("a", 5, 1, 1))
        scheduler.remove("a")
        with pytest.raises(KeyError, match="'a'"):
            scheduler.remove("a")
        scheduler.add(SequenceWork("a", 5, 1, 1))


class TestPriority:
    def test_higher_priority_request_takes_the_next_prefill_piece(self):
        scheduler = build(SequenceWork("low", 30, 1, 1, priority=1), max_num_batched_tokens=10)
        start(scheduler)
        scheduler.add(SequenceWork("high", 10, 1, 1))
        assert [piece.sequence_id for piece in start(scheduler).pieces] == ["high"]
        assert start(scheduler).pieces == (ScheduledPiece("low", 10, 10, is_last=False),)

    def test_pages_and_slots_are_taken_from_the_least_important_requests_first(self):
        scheduler = build(
            *(
                SequenceWork(name, 5, 10, 5, priority=priority)
                for name, priority in (("old", 1), ("young", 1), ("least", 2))
            ),
            max_num_seqs=3,
        )
        start(scheduler)
        scheduler.add(SequenceWork("high", 5, 15, 5))
        pack = scheduler.next_pack(0.0, 0, COSTS)
        assert pack.preempted == ("least", "young")
        assert pack.admitted == ("high",)
        assert scheduler.num_running == 2 and scheduler.num_waiting == 2
        scheduler.pack_done(0.0)
        scheduler.add(SequenceWork("seat", 5, 1, 5))
        assert start(scheduler, 50).admitted == ("seat",)  # the third slot is free
        scheduler.add(SequenceWork("full", 5, 1, 5))
        assert start(scheduler, 50).preempted == ("old",)

    def test_requests_are_not_preempted_in_vain_or_for_equal_priority(self):
        scheduler = build(SequenceWork("low", 5, 10, 5, priority=1), SequenceWork("same", 5, 10, 5))
        start(scheduler)
        scheduler.add(SequenceWork("high", 5, 21, 5))
        assert start(scheduler, 10) == ScheduledPack()  # 10 free and 10 of low are not enough
        assert start(scheduler, 11).preempted == ("low",)


class TestDecode:
    def run_pair(self, **changes):
        """Two decoding requests, a is older; each needs a new page at its first decode step."""
        scheduler = build(SequenceWork("a", 5, 2, 50), SequenceWork("b", 7, 3, 50), **changes)
        start(scheduler)
        return scheduler

    def test_page_is_allocated_only_when_a_sequence_has_no_free_slot(self):
        scheduler = build(SequenceWork("a", 5, 2, 50), SequenceWork("b", 7, 3, 50, tail_slots=2))
        start(scheduler)
        allocating = [decode(scheduler).allocating for _ in range(8)]
        assert allocating == [("a",), (), ("b",), (), ("a",), (), ("b",), ()]

    def test_newest_request_is_preempted_and_later_resumed_first(self):
        scheduler = self.run_pair()
        scheduler.add(SequenceWork("c", 5, 3, 5))
        assert decode(scheduler, 2).allocating == ("a", "b")
        for _ in range(3):
            assert decode(scheduler, 0) == DecodeStep(sequence_ids=("a", "b"))
        assert decode(scheduler, 0) == DecodeStep(preempted=("b",), sequence_ids=("a",), allocating=("a",))
        # b has 5 tokens: 4 with slots from decode steps, and the last is prefilled as well; so 3 + 2 pages
        assert start(scheduler, 4) == ScheduledPack()
        assert start(scheduler, 8).pieces == (
            ScheduledPiece("b", 0, 12, is_last=True),
            ScheduledPiece("c", 0, 5, is_last=True),
        )

    def test_sequence_without_a_page_or_a_preemptible_one_skips_the_step(self):
        scheduler = self.run_pair()
        assert decode(scheduler, 1) == DecodeStep(sequence_ids=("a",), allocating=("a",))
        assert decode(scheduler, 0) == DecodeStep(sequence_ids=("a",))
        assert decode(scheduler, 1) == DecodeStep(sequence_ids=("a", "b"), allocating=("b",))

    def test_complete_answer_does_not_decode_while_awaiting_removal(self):
        scheduler = build(SequenceWork("a", 5, 2, 2), SequenceWork("b", 5, 2, 50))
        start(scheduler)
        assert decode(scheduler, 2).sequence_ids == ("a", "b")
        assert decode(scheduler, 0).sequence_ids == ("b",)
        assert scheduler.num_decoding == 1 and scheduler.num_running == 2

    def test_oldest_request_is_never_preempted(self):
        """Five answers of 30 pages each in a pool of 40: the oldest is never preempted, and they finish in order."""
        engine = SimulatedEngine(SchedulerSettings(40, page_tokens=1, max_num_seqs=5, reserve_pages=0))
        for number in range(5):
            engine.submit(SequenceWork(f"r{number}", 4, 4, 27))
        engine.run()
        jobs = list(engine.jobs.values())
        ends = [job.token_times_s[-1] for job in jobs]
        assert jobs[0].num_preempted == 0 and sum(job.num_preempted for job in jobs) > 0
        assert ends == sorted(ends) and all(len(job.token_times_s) == 27 for job in jobs)


class TestAlone:
    """Requests that run without others in a step (`set_alone`)."""

    def test_lone_request_gets_its_own_packs_in_queue_order(self):
        scheduler = build(
            *(SequenceWork(name, count, 1, 5) for name, count in (("a", 3), ("alone", 12), ("b", 4), ("c", 4))),
            max_num_batched_tokens=10,
        )
        scheduler.set_alone("alone", True)
        packs = [start(scheduler) for _ in range(5)]
        assert [[(piece.sequence_id, piece.num_tokens) for piece in pack.pieces] for pack in packs] == [
            [("a", 3)],
            [("alone", 10)],
            [("alone", 2)],
            [("b", 4), ("c", 4)],
            [],
        ]

    def test_no_decode_step_runs_between_layers_of_a_lone_request(self):
        scheduler = build(SequenceWork("a", 3, 1, 5), max_num_batched_tokens=10, max_decode_gap_s=0.0)
        start(scheduler)
        scheduler.add(SequenceWork("b", 3, 1, 5))
        scheduler.set_alone("b", True)
        assert [piece.sequence_id for piece in scheduler.next_pack(0.0, 100, COSTS).pieces] == ["b"]
        assert not scheduler.after_layer(100.0) and not scheduler.num_decoding
        scheduler.pack_done(100.0)
        assert (scheduler.num_decoding, scheduler.decoding_alone) == (1, ("b",))

    def test_lone_request_decodes_only_in_its_own_steps(self):
        scheduler = build(*(SequenceWork(name, 3, 1, 5) for name in "abcd"))
        for name in "bd":
            scheduler.set_alone(name, True)
        for _ in range(4):
            start(scheduler)
        assert scheduler.decoding_alone == ("b", "d") and scheduler.num_decoding == 2
        assert decode(scheduler).sequence_ids == ("a", "c")
        assert scheduler.next_decode(100, COSTS, alone="d").sequence_ids == ("d",)
        scheduler.decode_done(0.0)
        scheduler.set_alone("d", False)
        assert decode(scheduler).sequence_ids == ("a", "c", "d")
        with pytest.raises(KeyError, match="'e'"):
            scheduler.set_alone("e", True)

    def test_request_stays_alone_after_replanning(self):
        scheduler = build(SequenceWork("a", 3, 1, 5))
        scheduler.set_alone("a", True)
        start(scheduler)
        scheduler.replan(SequenceWork("a", 2, 1, 5))
        scheduler.add(SequenceWork("b", 3, 1, 5))
        assert [[one.sequence_id for one in start(scheduler).pieces] for _ in range(2)] == [["a"], ["b"]]
        assert scheduler.decoding_alone == ("a",)

    def test_decode_step_of_a_lone_request_preempts_only_a_less_important_one(self):
        scheduler = build(*(SequenceWork(name, 4, 1, 5) for name in "abc"))
        scheduler.set_alone("b", True)
        for _ in range(3):
            start(scheduler)
        assert scheduler.next_decode(0, COSTS, alone="b") == DecodeStep(("c",), ("b",), ("b",))
        scheduler.decode_done(0.0)
        assert "a" in [record.sequence_id for record in scheduler._decoding()]
