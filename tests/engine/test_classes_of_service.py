"""Priorities, flows and deadlines in the engine: which requests run first, are refused, or miss their deadline."""

import contextlib
import dataclasses
import inspect
import time
import types

import numpy as np
import pytest

from ccjax.engine import Request
from ccjax.engine.batch import loop as loop_module
from ccjax.engine.batch import sequences as sequences_module
from ccjax.engine.batch.locked_scheduler import LockedScheduler, planning_order
from ccjax.errors import ContextLengthError, DeadlineError, OverloadError
from ccjax.policy.scheduling import Scheduler
from ccjax.runner import pack as pack_module
from ccjax.runner.pool import PAGE_TOKENS
from tests.engine.helpers import TinyModel, draw_segments
from tests.engine.test_batch_loop import Client, Turns, ask, check, settled
from tests.polling import wait_until

MODEL = TinyModel(seed=22)
PAGE = MODEL.page_bytes
NUM_PAGES = 120
MAX_QUEUE = 12
SEGMENTS = draw_segments(np.random.default_rng(1), [30])


def request(tokens=2, **fields):
    return dataclasses.replace(ask(SEGMENTS, "off", tokens=tokens), **fields)


@pytest.fixture(scope="module")
def shared_engine():
    with MODEL.engine(
        max_model_len=512, max_num_seqs=1, max_queue=MAX_QUEUE, flow_share=2.0, device_cache_bytes=NUM_PAGES * PAGE
    ) as engine:
        engine.run(request(tokens=400))  # compiles for all tests
        yield engine


@pytest.fixture
def engine(shared_engine):
    """An engine with one slot; also checks that a test leaves nothing behind."""
    before = shared_engine.batch_counts
    yield shared_engine
    settled(shared_engine)
    after = shared_engine.batch_counts
    assert after.free_pages == before.free_pages
    places = shared_engine._loop._scheduler._queue_limit
    assert places.num_queued == places.num_tokens == 0 and not places._by_flow


@contextlib.contextmanager
def decoding(engine, **fields):
    """Inside the block, a request holds the only slot; its decode steps need the `Turns`."""
    with Turns(engine) as turns:
        client = Client(engine, request(tokens=400, **fields))
        wait_until(lambda: client.deltas, timeout_s=120)
        try:
            yield client, turns
        finally:
            client.cancel()


def started(engine, requests):
    """The order in which requests start if all are queued before the first one starts."""
    order, clients = [], []
    with engine._loop.exclusive():
        for number, one in enumerate(requests):
            clients.append(Client(engine, one, on_start=lambda number=number: order.append(number)))
    for client in clients:
        client.response()
    return order


def test_every_method_of_the_scheduler_holds_the_lock():
    class Lock:
        num_entered = num_left = 0

        def __enter__(self):
            self.num_entered += 1

        def __exit__(self, *_):
            self.num_left += 1

    public = {name for name in vars(Scheduler) if not name.startswith("_")} | {"__contains__"}
    assert {"add", "remove", "expire", "next_pack", "next_decode", "retry_after_s", "num_waiting"} <= public
    for name in public:
        member = inspect.getattr_static(LockedScheduler, name)
        method = member.fget if isinstance(member, property) else member
        needed = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
        lock = Lock()
        with contextlib.suppress(
            AttributeError, TypeError, ValueError
        ):  # inside, since all that this scheduler has is a lock
            method(types.SimpleNamespace(_lock=lock), *([None] * (len(needed) - 1)))
        assert lock.num_entered == lock.num_left == 1, name


def test_requests_start_by_priority_and_then_in_arrival_order(engine):
    order = started(engine, [request(priority=priority) for priority in (0, 0, 5, -5, -5)])
    assert order == [3, 4, 0, 1, 2]


def test_flow_with_many_requests_does_not_starve_other_flows(engine):
    flood = [request(flow="flood") for _ in range(8)]
    order = started(engine, [*flood, request(flow="a"), request(flow="b")])
    assert max(order.index(8), order.index(9)) <= 3  # one round of three flows, the flood's first request ahead
    assert [number for number in order if number < 8] == list(range(8))


def test_requests_likely_to_run_next_are_planned_first():
    class One:
        def __init__(self, flow, priority):
            self.group = types.SimpleNamespace(flow=flow, priority=priority)

    line = [One("a", 0), One("a", 0), One("a", 0), One("b", 0), One("c", -1), One("a", -1)]
    assert planning_order(line) == [line[number] for number in (4, 5, 0, 3, 1, 2)]


def test_urgent_request_preempts_a_running_one_and_both_are_answered(engine):
    wanted = engine.run(request(tokens=60)), engine.run(request(tokens=3))
    before = engine.batch_counts.preemptions
    with Turns(engine) as turns:
        slow = Client(engine, request(tokens=60))
        wait_until(lambda: slow.deltas, timeout_s=120)
        urgent = Client(engine, request(tokens=3, priority=-1))
        turns.until(urgent.done.is_set)
        check(urgent.response(), wanted[1])
        assert not slow.done.is_set()
    check(slow.response(), wanted[0])
    assert engine.batch_counts.preemptions == before + 1


def test_prompt_preempted_while_its_pack_waits_for_a_load_runs_no_further_layer(monkeypatch):
    """Its pages belong to the preempting request by then."""
    deep = TinyModel(seed=22, num_hidden_layers=48)
    long = draw_segments(np.random.default_rng(2), [130])
    run_layer, num_pieces = pack_module.Pack.run_layer, []

    def noted(pack):
        num_pieces.append(len(pack.pieces))
        run_layer(pack)

    with deep.engine(max_model_len=256, device_cache_bytes=80 * deep.page_bytes) as engine:
        asked = request(tokens=90, priority=-1), ask(long, "off", tokens=2)
        wanted = [engine.run(prompt) for prompt in asked]
        monkeypatch.setattr(pack_module.Pack, "run_layer", noted)
        monkeypatch.setattr(pack_module.Pack, "is_ready", lambda pack: False)
        with engine._loop.exclusive():
            taken = engine._device.pool.allocate([PAGE_TOKENS] * (engine._device.pool.num_free - 17))
        with Turns(engine) as turns:
            urgent = Client(engine, asked[0])
            wait_until(lambda: urgent.deltas, timeout_s=120)
            other = Client(engine, asked[1])
            turns.until(urgent.done.is_set)
            turns.until(other.done.is_set)
        check(urgent.response(), wanted[0])
        check(other.response(), wanted[1])
        assert engine.batch_counts.preemptions > 0 and all(num_pieces) and taken


def test_queued_request_misses_its_deadline_even_while_the_loop_is_paused(engine):
    begun = []
    with decoding(engine) as (_, turns):
        late = Client(engine, request(timeout_s=0.05), on_start=lambda: begun.append("late"))
        turns.until(late.done.is_set)
        with pytest.raises(DeadlineError, match="timeout_s"):
            late.response()
        assert engine.batch_counts.waiting == 0 and engine.batch_counts.running == 1
    with engine._loop.exclusive():
        late = Client(engine, request(timeout_s=0.05), on_start=lambda: begun.append("late"))
        patient = Client(engine, request())
        given_up = Client(engine, request(), on_start=lambda: begun.append("given up"))
        given_up.cancel()
        with pytest.raises(DeadlineError):
            late.response()
        assert given_up.done.wait(120)
        assert engine.batch_counts.waiting == 1
    assert len(patient.response().token_ids) == 2
    assert not begun


class Clock:
    """The clock of deadlines."""

    def __init__(self, monkeypatch):
        self.ahead_s = 0.0
        now = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + self.ahead_s)
        for module in (loop_module, sequences_module):
            monkeypatch.setattr(module, "time", now)


def test_a_deadline_ends_an_answer_and_frees_its_pages_at_once(engine, monkeypatch):
    free, clock = engine.batch_counts.free_pages, Clock(monkeypatch)
    with Turns(engine) as turns:
        late = Client(engine, request(tokens=400, timeout_s=3600.0))
        wait_until(lambda: late.deltas, timeout_s=120)
        clock.ahead_s = 3600.0
        turns.until(late.done.is_set)
    with pytest.raises(DeadlineError):
        late.response()
    assert late.deltas and all(delta.response is None for delta in late.deltas)
    assert engine.batch_counts.free_pages == free and engine.batch_counts.running == 0


def test_a_deadline_ends_a_prefill_between_two_layers(engine, monkeypatch):
    layers, clock = [], Clock(monkeypatch)
    run_layer = pack_module.Pack.run_layer

    def slow(pack):
        layers.append(pack.layer)
        clock.ahead_s = 3600.0
        run_layer(pack)

    with monkeypatch.context() as patch:
        patch.setattr(pack_module.Pack, "run_layer", slow)
        late = Client(engine, request(timeout_s=3600.0))
        with pytest.raises(DeadlineError):
            late.response()
    assert not late.deltas and layers == [0] and MODEL.config.num_layers > 1


def test_deadline_that_is_met_does_not_change_the_answer(engine):
    check(engine.run(request(tokens=20, timeout_s=3600, priority=3, flow="x")), engine.run(request(tokens=20)))


def test_full_queue_rejects_at_once_even_while_the_loop_is_paused(engine):
    with engine._loop.exclusive():
        taken = []
        with pytest.raises(OverloadError, match=r"flow 'flood'.*flow_share"):
            for _ in range(MAX_QUEUE):
                taken.append(Client(engine, request(flow="flood")))
        assert len(taken) == 2 * MAX_QUEUE // 3  # flow_share 2: a flow may take twice as many places as are left free
        engine.check_queue_limit("other")
        with pytest.raises(OverloadError):
            engine.check_queue_limit("flood")
        taken += [Client(engine, request(flow=f"other {number}")) for number in range(MAX_QUEUE - len(taken))]
        with pytest.raises(OverloadError, match="max_queue"):
            engine.check_queue_limit("one more")
        with pytest.raises(OverloadError, match="max_queue"):
            engine.run(request(flow="one more"))
        assert engine.batch_counts.waiting == MAX_QUEUE
    for client in taken:
        client.response()
    engine.check_queue_limit("flood")


def test_request_that_can_never_fit_the_pool_is_rejected_at_once(engine):
    with engine._loop.exclusive(), pytest.raises(ContextLengthError, match="pages"):
        engine.submit(Request(segments=[[1] * 2] * (NUM_PAGES + 1), sampling=request().sampling), lambda _: None)


def test_retry_after_is_estimated_from_measured_times(engine):
    engine.run(request(tokens=100))
    loop = engine._loop
    with decoding(engine) as (first, _):
        waiting = [Client(engine, request(flow=str(number))) for number in range(MAX_QUEUE)]
        with pytest.raises(OverloadError) as caught:
            engine.check_queue_limit("x")
        # A place is free once the running answer ends, at the usual length or at its own if that is longer.
        assert 0.0 < caught.value.retry_after_s <= 400 * loop._decode_step_s * 2
        costs = loop._costs()
        assert costs.answer_tokens is not None and 1 < costs.answer_tokens < 400
        assert costs.decode_step_s == loop._decode_step_s > 0
        for client in waiting:
            client.cancel()
        first.cancel()


def test_request_id_already_in_use_is_accepted(engine):
    with decoding(engine, request_id="one") as (_, turns):
        again = Client(engine, request(request_id="one", tokens=3))
        turns.until(again.done.is_set)
        assert len(again.response().token_ids) == 3


@pytest.mark.parametrize(("window", "order"), [(1, [0, 1, 2, 3]), (2, [0, 2, 1, 3]), (32, [2, 0, 1, 3])])
def test_queued_request_with_most_cached_tokens_starts_first(window, order):
    fresh = [draw_segments(np.random.default_rng(seed), [40, 30]) for seed in (31, 32, 33)]
    cached = draw_segments(np.random.default_rng(34), [40, 30])
    with MODEL.engine(max_model_len=512, max_num_seqs=1, reorder_window=window) as engine:
        engine.run(ask(cached, "exact", tokens=1))
        requests = [ask(segments, "exact", tokens=1) for segments in (fresh[0], fresh[1], cached, fresh[2])]
        assert started(engine, requests) == order


def test_planning_looks_further_ahead_if_the_queue_exceeds_the_free_slots():
    requests = [ask(draw_segments(np.random.default_rng(seed), [20]), "exact", tokens=1) for seed in range(40, 51)]
    with MODEL.engine(max_model_len=512, max_num_seqs=1) as engine:
        engine.run(requests[-1])
        assert sequences_module._NUM_PREPLANNED < len(requests)
        assert started(engine, requests)[0] == len(requests) - 1
