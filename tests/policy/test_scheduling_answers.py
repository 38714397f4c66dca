"""Several answers to one prompt in the scheduler: requests with shared pages, at the head of their flow."""

from __future__ import annotations

import dataclasses

import pytest

from ccjax.policy.scheduling import AdmissionQueueFullError, NeverFitsError, SequenceWork
from tests.policy.scheduling_builders import COSTS, build, decode, start

FIRST = SequenceWork("a/0", prefill_tokens=10, prompt_pages=3, max_new_tokens=9, tail_slots=2, flow="x")
READING = dataclasses.replace(FIRST, prompt_pages=0, shared_pages=3)


def sibling(number: int, **changes) -> SequenceWork:
    work = SequenceWork(f"a/{number}", 1, 1, 9, flow="x", shared_pages=3, tail_slots=3)
    return dataclasses.replace(work, **changes)


def none_shared(sequence_id: str) -> int:
    return 0


def test_siblings_are_admitted_first_in_their_flow_and_use_no_queue_slot() -> None:
    scheduler = build(FIRST, max_num_seqs=3, max_queue=3)
    start(scheduler)
    for name in "bcd":
        scheduler.add(SequenceWork(name, 10, 3, 9, flow="x"))
    with pytest.raises(AdmissionQueueFullError):
        scheduler.add(SequenceWork("e", 10, 3, 9, flow="x"))
    scheduler.share(READING)
    for number in (1, 2, 3):
        scheduler.add(sibling(number), after="a/0")
    pack = scheduler.next_pack(0.0, 90, COSTS, shared_pages=none_shared)
    assert pack.admitted == ("a/1", "a/2")
    assert [(piece.num_tokens, piece.is_last) for piece in pack.pieces] == [(1, True)] * 2
    scheduler.pack_done(0.0)
    scheduler.remove("a/0")
    pack = scheduler.next_pack(0.0, 90, COSTS, shared_pages=none_shared)
    assert pack.admitted == ("a/3",)
    scheduler.pack_done(0.0)
    with pytest.raises(AdmissionQueueFullError):  # all three are still queued
        scheduler.add(SequenceWork("e", 10, 3, 9, flow="x"))


def test_siblings_do_not_overtake_a_flow_whose_turn_it_is() -> None:
    scheduler = build(FIRST, SequenceWork("other", 4, 1, 9, flow="y"), max_num_batched_tokens=10, max_num_seqs=8)
    assert start(scheduler).admitted == ("other", "a/0")
    scheduler.add(SequenceWork("urgent", 4, 1, 9, flow="y", priority=-1))
    start(scheduler)
    scheduler.share(READING)
    scheduler.add(sibling(1), after="a/0")
    assert scheduler.next_pack(0.0, 50, COSTS, shared_pages=none_shared).admitted == ("a/1",)


def test_preempting_one_reader_does_not_free_a_shared_prompt() -> None:
    """Pages of 4: the second answer has one page, the first none of its own. The older request finds no page."""
    scheduler = build(SequenceWork("old", 8, 2, 12), num_pages=10)
    start(scheduler)
    scheduler.add(FIRST)
    start(scheduler)
    scheduler.share(READING)
    scheduler.add(sibling(1), after="a/0")
    scheduler.next_pack(0.0, 5, COSTS, shared_pages=none_shared)
    scheduler.pack_done(0.0)
    step = decode(scheduler, free_pages=0)  # "old" needs a new page
    assert step.preempted == ("a/1",)
    assert (step.sequence_ids, step.allocating) == (("old", "a/0"), ("old",))


def test_preempting_the_computing_request_does_not_free_shared_pages_at_once() -> None:
    """Two older requests need a new page: the other answer's is free at once, the prompt's only in the next step."""
    scheduler = build(*(SequenceWork(name, 8, 2, 12) for name in ("old", "older")), num_pages=20)
    scheduler.add(FIRST)
    start(scheduler)
    scheduler.share(READING)
    scheduler.add(sibling(1), after="a/0")
    start(scheduler)
    step = decode(scheduler, free_pages=0)
    assert step.preempted == ("a/1", "a/0")
    assert step.allocating == ("old",)
    assert decode(scheduler, free_pages=3).allocating == ("older",)


def test_preempted_sibling_prefills_one_prompt_token_and_its_answer() -> None:
    scheduler = build(FIRST, num_pages=20)
    start(scheduler)
    scheduler.share(READING)
    scheduler.add(sibling(1), after="a/0")
    start(scheduler)
    for _ in range(6):
        decode(scheduler)
    assert decode(scheduler, free_pages=0).preempted == ("a/1",)
    (piece,) = start(scheduler).pieces
    assert (piece.sequence_id, piece.start, piece.num_tokens) == ("a/1", 0, 1 + 7)


def test_parked_shared_prompt_pages_count_when_a_sibling_is_admitted() -> None:
    scheduler = build(FIRST, num_pages=10, max_num_seqs=1)
    start(scheduler)
    scheduler.share(READING)
    scheduler.add(sibling(1), after="a/0")
    scheduler.remove("a/0")
    assert scheduler.next_pack(0.0, 3, COSTS, shared_pages=lambda _: 3).admitted == ()
    assert scheduler.next_pack(0.0, 4, COSTS, shared_pages=lambda _: 3).admitted == ("a/1",)


def test_share_requires_a_decoding_sequence_and_unchanged_fields() -> None:
    scheduler = build(FIRST, num_pages=10)
    with pytest.raises(ValueError, match="decodes, got 'a/0', in waiting"):
        scheduler.share(READING)
    start(scheduler)
    with pytest.raises(ValueError, match="flow: wanted 'x' as before, got 'z'"):
        scheduler.share(dataclasses.replace(READING, flow="z"))
    with pytest.raises(NeverFitsError):
        scheduler.share(dataclasses.replace(READING, shared_pages=10))
    with pytest.raises(KeyError):
        scheduler.share(dataclasses.replace(READING, sequence_id="b"))
    with pytest.raises(KeyError):
        scheduler.add(sibling(1), after="b")
    assert "a/1" not in scheduler and scheduler.num_waiting == 0
    scheduler.share(READING)
    scheduler.add(sibling(1), after="a/0")
    assert scheduler.num_waiting == 1
