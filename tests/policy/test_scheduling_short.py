"""Short prompts overtake longer ones of their flow and interrupt their packs, which keep a third of the time."""

from __future__ import annotations

import pytest

from ccjax.policy.scheduling import Scheduler, SequenceWork, StepCosts
from tests.policy.scheduling_builders import COSTS, build, decode, start

PACK = 90
SHORT = PACK // 3


def work(name: str, num_tokens: int, **more) -> SequenceWork:
    return SequenceWork(name, num_tokens, 1, 5, **more)


def running(*works: SequenceWork, **changes) -> Scheduler:
    """A scheduler whose first pack runs, with pieces of these."""
    scheduler = build(*works, **{"max_num_batched_tokens": PACK, "num_pages": 1000, **changes})
    assert scheduler.next_pack(0.0, 1000, COSTS).pieces
    return scheduler


def names(pack) -> list[str]:
    return [piece.sequence_id for piece in pack.pieces]


def test_short_prompts_run_before_the_next_layer_of_a_long_pack():
    scheduler = running(work("long", 500))
    assert scheduler.may_interrupt(1.0)
    for name, num_tokens in (("b", SHORT), ("c", 4), ("too long", SHORT + 1), ("d", 5)):
        scheduler.add(work(name, num_tokens))
    pack = scheduler.next_pack(1.0, 1000, COSTS, interrupts=True)
    assert names(pack) == ["b", "c", "d"] and list(pack.admitted) == ["b", "c", "d"]
    assert not scheduler.may_interrupt(1.1), "an interruption is not interrupted"
    assert scheduler.pack_done(2.0) == ("b", "c", "d")
    assert scheduler.pack_done(3.0) == () and scheduler.num_decoding == 3
    assert names(scheduler.next_pack(3.0, 1000, COSTS)) == ["long"]


def test_packs_that_are_smaller_than_they_might_be_are_interrupted_too():
    scheduler = build(work("long", 9000), max_num_batched_tokens=8192, num_pages=1000)
    slow = StepCosts(token_s=1e-3, decode_step_s=0.01)
    assert scheduler.next_pack(0.0, 1000, slow).pieces[0].num_tokens == 1024
    scheduler.add(work("short", 341))
    scheduler.add(work("too long", 342))
    assert scheduler.may_interrupt(1.0)
    assert names(scheduler.next_pack(1.0, 1000, slow, interrupts=True)) == ["short"]


def test_a_long_prompt_keeps_a_third_of_the_time():
    scheduler = running(work("long", 500))
    scheduler.add(work("b", 5))
    scheduler.next_pack(10.0, 1000, COSTS, interrupts=True)
    scheduler.pack_done(14.0)
    scheduler.add(work("c", 5))
    assert not scheduler.may_interrupt(15.9) and scheduler.may_interrupt(16.1)
    with pytest.raises(RuntimeError, match="next_pack"):
        scheduler.next_pack(15.9, 1000, COSTS, interrupts=True)


def test_nothing_to_interrupt_for_changes_nothing():
    scheduler = running(work("long", 500))
    scheduler.add(work("other", 400))
    assert not scheduler.next_pack(1.0, 1000, COSTS, interrupts=True).pieces
    assert scheduler.may_interrupt(1.0)
    scheduler.pack_done(1.0)
    assert names(scheduler.next_pack(1.0, 1000, COSTS)) == ["long"]


@pytest.mark.parametrize("lengths", [(SHORT,), (2 * SHORT - 1,)])
def test_packs_that_end_soon_are_not_interrupted(lengths):
    scheduler = running(*(work(str(length), length) for length in lengths))
    scheduler.add(work("b", 3))
    assert not scheduler.may_interrupt(9.0)


def test_nothing_runs_beside_a_sequence_that_runs_alone():
    scheduler = build(work("long", 500), max_num_batched_tokens=PACK, num_pages=1000)
    scheduler.set_alone("long", True)
    assert names(scheduler.next_pack(0.0, 1000, COSTS)) == ["long"]
    scheduler.add(work("b", 3))
    assert not scheduler.may_interrupt(9.0)


def test_nothing_is_preempted_for_an_interruption():
    scheduler = running(work("long", 500, priority=5))
    scheduler.add(work("urgent", 5, priority=0))
    pack = scheduler.next_pack(1.0, 0, COSTS, interrupts=True)
    assert not pack.pieces and not pack.preempted


def test_what_leaves_during_an_interruption_leaves_the_interrupted_pack():
    scheduler = running(work("long", 80), work("second", 50))
    scheduler.add(work("b", 5))
    scheduler.next_pack(1.0, 1000, COSTS, interrupts=True)
    scheduler.remove("long")
    assert scheduler.pack_done(2.0) == ("b",)
    assert scheduler.pack_done(3.0) == ()
    assert start(scheduler, 1000, 3.0).pieces[0].sequence_id == "second"
    decode(scheduler, 1000)


def test_short_prompts_overtake_long_ones_of_their_flow_until_they_are_a_pack_ahead():
    longs = [work(f"long {number}", 60) for number in range(3)]
    shorts = [work(f"short {number}", 20) for number in range(9)]
    scheduler = build(*longs, *shorts, max_num_batched_tokens=PACK, num_pages=1000)
    first = start(scheduler, 1000)
    assert names(first) == ["short 0", "short 1", "short 2", "short 3", "short 4"][: len(first.pieces)]
    order = names(first)
    while len(order) < 12:
        order += [name for name in names(start(scheduler, 1000)) if name not in order]
    assert order.index("long 0") == 5, "100 tokens are more than a pack"
    assert order[:5] == [f"short {number}" for number in range(5)]
    assert order.index("long 0") < order.index("short 5") < order.index("long 2")


def test_a_window_of_one_keeps_the_order_of_arrival():
    scheduler = build(work("long", 60), work("short", 5), max_num_batched_tokens=PACK, reorder_window=1)
    assert names(start(scheduler)) == ["long", "short"]


def test_a_short_prompt_overtakes_preparations_that_are_longer_and_no_siblings():
    scheduler = build(work("long", 60), max_num_batched_tokens=PACK, num_pages=1000)
    start(scheduler, 1000)
    for number in range(4):
        scheduler.add(work(f"preparation {number}", SHORT), after="long")
    scheduler.add(work("sibling", 1), after="long")
    scheduler.add(work("hi", 6))
    order = names(start(scheduler, 1000))
    assert order[0] == "hi" and order[1:] == ["preparation 0", "preparation 1", "preparation 2"][: len(order) - 1]


def test_what_is_admitted_while_a_thread_waits_for_prefills_is_no_longer_than_they():
    scheduler = running(work("long", 300))
    scheduler.pack_done(0.0)
    scheduler.limit_admission(True)
    for number in range(9):
        scheduler.add(work(f"other {number}", 60, flow=str(number)))
    admitted, packs = [], 0
    while scheduler.num_running > scheduler.num_decoding or not packs:
        admitted += scheduler.next_pack(1.0, 1000, COSTS).admitted
        scheduler.pack_done(1.0)
        packs += 1
    assert len(admitted) == 3, "the long prompt lacked 210 tokens"
    assert packs == 5
    assert not scheduler.next_pack(1.0, 1000, COSTS).pieces
    scheduler.limit_admission(False)
    assert scheduler.next_pack(1.0, 1000, COSTS).admitted == ("other 3", "other 4")


def test_short_prompts_interrupt_however_little_else_is_admitted():
    scheduler = running(work("long", 95))
    scheduler.pack_done(0.0)
    scheduler.limit_admission(True)
    scheduler.add(work("b", 6))
    pack = scheduler.next_pack(1.0, 1000, COSTS)
    assert names(pack) == ["long"] and not pack.admitted
    scheduler.pack_done(1.0)
    scheduler = running(work("long", 95))
    scheduler.limit_admission(True)
    for name in "bcdef":
        scheduler.add(work(name, SHORT))
    assert names(scheduler.next_pack(1.0, 1000, COSTS, interrupts=True)) == ["b", "c", "d"]
    scheduler.pack_done(9.0)
    scheduler.pack_done(9.0)
    assert names(scheduler.next_pack(9.0, 1000, COSTS)) == ["long", "e", "f"]
