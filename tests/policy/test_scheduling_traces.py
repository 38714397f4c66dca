"""Random arrivals, cancellations, new plans, deadlines and page shortages: the simulated engine asserts at every step
that no page, slot or token is assigned twice or lost; every accepted request ends."""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ccjax.policy.scheduling import AdmissionQueueFullError, NeverFitsError, SchedulerSettings, SequenceWork
from tests.policy.scheduling_simulator import SimulatedEngine

CHUNKS = {"a": 1, "b": 3, "c": 6}


class SchedulingTrace(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(6, 24),
        page_tokens=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 12),
        context=st.sampled_from([None, 1, 20, 60]),
        num_seqs=st.integers(1, 5),
        reserve=st.integers(0, 3),
        window=st.sampled_from([1, 3]),
        gap_s=st.sampled_from([0.0, 0.004, 1.0]),
    )
    def begin(self, num_pages, page_tokens, budget, context, num_seqs, reserve, window, gap_s):
        self.engine = SimulatedEngine(
            SchedulerSettings(
                num_pages=num_pages,
                page_tokens=page_tokens,
                max_num_batched_tokens=budget,
                max_num_context_tokens=context,
                max_num_seqs=num_seqs,
                reserve_pages=reserve,
                max_decode_gap_s=gap_s,
                max_queue=12,
                reorder_window=window,
            ),
            token_s=0.001,
            chunk_pages=CHUNKS,
        )

    @rule(
        prefill=st.integers(1, 20),
        pages=st.integers(1, 8),
        answer=st.integers(1, 14),
        spare=st.integers(0, 4),
        flow=st.sampled_from("xyz"),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        deadline=st.sampled_from([None, None, None, 0.01, 0.1]),
        cached=st.integers(0, 30),
        chunks=st.sets(st.sampled_from("abc"), max_size=2),
        tail=st.integers(0, 3),
        is_divisible=st.booleans(),
        answers=st.sampled_from([1, 1, 2, 4]),
    )
    def submit(
        self, prefill, pages, answer, spare, flow, priority, deadline, cached, chunks, tail, is_divisible, answers
    ):
        engine = self.engine
        work = SequenceWork(
            f"r{len(engine.jobs)}",
            prefill,
            pages,
            answer + spare,
            flow,
            priority,
            None if deadline is None else engine.now_s + deadline,
            cached,
            tail_slots=tail % engine.settings.page_tokens,
            is_divisible=is_divisible,
        )
        most = work.most_pages(engine.settings.page_tokens) + sum(CHUNKS[name] for name in chunks)
        try:
            engine.submit(work, answer, chunks, answers)
        except NeverFitsError:
            assert most > engine.settings.num_pages
        except AdmissionQueueFullError:
            waiting = [engine.jobs[name].work.flow for name in engine.unended() if not engine.jobs[name].is_admitted]
            assert 5 * waiting.count(flow) >= 4 or len(waiting) >= 12
            assert engine.scheduler.retry_after_s(flow, engine.costs) >= 0.0
        else:
            assert most <= engine.settings.num_pages

    @rule(num=st.integers(1, 30))
    def work(self, num):
        for _ in range(num):
            self.engine.tick()

    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        if unended := self.engine.unended():
            self.engine.cancel(unended[which % len(unended)])

    @rule(which=st.integers(0, 100), prefill=st.integers(1, 20), pages=st.integers(1, 4))
    def replan(self, which, prefill, pages):
        if unended := self.engine.unended():
            work = self.engine.jobs[unended[which % len(unended)]].work
            work = dataclasses.replace(work, prefill_tokens=prefill, prompt_pages=min(pages, work.prompt_pages))
            self.engine.replan(work)

    @rule(which=st.integers(0, 100))
    def hold(self, which):
        """Holds a request; `replan` ends the hold."""
        records = self.engine.scheduler._sequences
        if in_prefill := [name for name in self.engine.unended() if records[name].state == "prefill"]:
            self.engine.hold(in_prefill[which % len(in_prefill)])

    @rule(held=st.integers(0, 24))
    def hold_elsewhere(self, held):
        self.engine.held_elsewhere = 0
        self.engine.held_elsewhere = min(held, self.engine.free_pages)

    @invariant()
    def places_add_up(self):
        if hasattr(self, "engine"):
            never_started = [one for one in self.engine.scheduler._sequences.values() if one.tag is None]
            places = self.engine.scheduler._queue_limit
            assert places.num_queued == len(never_started)
            assert places.num_tokens == sum(one.work.prefill_tokens for one in never_started)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.held_elsewhere = 0
        for name in engine.unended():
            if engine.scheduler._sequences[name].state == "held":
                engine.replan(engine.jobs[name].work)
        # A token of an answer costs a decode step, or a prefill of everything before it, at worst repeatedly for each
        # page that a more important request takes; no trace of this size needs a tenth of the limit.
        engine.run(max_ticks=20_000)
        assert not engine.unended()
        assert engine.free_pages == engine.settings.num_pages
        scheduler = engine.scheduler
        assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_decoding) == (0, 0, 0)
        assert not scheduler._queue._queues and not len(scheduler._deadlines)
        for job in engine.jobs.values():
            assert job.end != "complete" or len(job.token_times_s) == job.answer_tokens


TestSchedulingTrace = SchedulingTrace.TestCase
TestSchedulingTrace.settings = settings(max_examples=5 * settings.default.max_examples, stateful_step_count=30)
