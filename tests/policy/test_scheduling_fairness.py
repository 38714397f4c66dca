"""The fair order: against a plain recomputation of every tag, bounds between flows, the window of RAGCache sec. 5.2,
and the growth of the work per decision with the queue."""

from __future__ import annotations

import collections
import random
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.scheduling import Scheduler, SchedulerSettings, SequenceWork, StepCosts
from ccjax.policy.scheduling.fair import FairQueue, FlowOrder
from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence

COSTS = StepCosts(0.001, 0.001, 0.01)


class PlainLine:
    """Demers, Keshav, Shenker 1989 in exact numbers, completely recomputed for each query.

    Requests are `(number, flow, tokens, cached)`.
    """

    def __init__(self, order):
        self.order = order
        self.lead = collections.Counter()
        self.virtual = Fraction(0)
        self.last = {}
        self.places = {}
        self.waiting = []
        self.begun = {}

    def enqueue(self, request):
        number, flow, _, _ = request
        if not any(one[1] == flow for one in self.waiting):
            self.last[flow] = max(self.last.get(flow, Fraction(0)), self.virtual)
        self.places[number] = len([place for place in self.places.values() if place[0] == flow])
        self.places[number] = (flow, self.places[number])
        self.waiting.append(request)

    def heads(self):
        for flow in {one[1] for one in self.waiting}:
            mine = [one for one in self.waiting if one[1] == flow]
            last_place = self.places[mine[0][0]][1] + self.order.window - 1
            near = [one for one in mine if self.places[one[0]][1] <= last_place]
            best = max(near, key=lambda one: (Fraction(one[3], one[2]), -one[0]))
            if self.lead[flow] < self.order.most_lead:
                short = [one for one in near if one[2] <= self.order.short_tokens]
                best = max(short, key=lambda one: (Fraction(one[3], one[2]), -one[0]), default=best)
            yield self.last[flow] + best[2], best[0], best

    def dequeue(self):
        tag, number, best = min(self.heads())
        earlier = [one for one in self.waiting if one[1] == best[1] and one[0] < number]
        if earlier and best[2] <= self.order.short_tokens:
            self.lead[best[1]] += best[2]
        self.waiting.remove(best)
        self.last[best[1]] = tag
        self.begun[number] = best
        return number

    def serve(self, number, num_tokens):
        flows = {one[1] for one in self.waiting} | {one[1] for one in self.begun.values()}
        self.virtual += Fraction(num_tokens, len(flows))
        _, flow, length, _ = self.begun[number]
        if length > self.order.short_tokens:
            self.lead[flow] = max(0, self.lead[flow] - 2 * num_tokens)
        for idle in {*self.lead} - flows:
            if self.last[idle] <= self.virtual:
                self.lead[idle] = 0


@pytest.mark.parametrize("order", [FlowOrder(1), FlowOrder(2), FlowOrder(4), FlowOrder(4, 2, 6), FlowOrder(9, 4, 20)])
@pytest.mark.parametrize("seed", range(50))
def test_order_matches_a_plain_recomputation(seed, order):
    draw = random.Random(seed)
    line, plain = FairQueue(order), PlainLine(order)
    records = {}
    for number in range(80):
        op = draw.choice(["push", "push", "start", "serve", "leave", "cancel"])
        which = draw.randint(0, 9)
        num_tokens = draw.randint(1, 8)
        if op == "push":
            flow, num_tokens = draw.choice("abcd"), draw.choice([1, 2, 4, 8, 16])
            work = SequenceWork(f"r{number}", num_tokens, 1, 1, flow, cached_tokens=which)
            records[number] = ScheduledSequence(work, number, 16)
            line.enqueue(records[number])
            plain.enqueue((number, flow, num_tokens, which))
        elif op == "start" and plain.waiting:
            head = line.head()
            assert head is not None
            line.dequeue(head[1])
            assert head[1].number == plain.dequeue()
            assert head[0] == pytest.approx(float(plain.last[head[1].work.flow]), rel=1e-12)
        elif op == "serve" and plain.begun:
            number = sorted(plain.begun)[which % len(plain.begun)]
            served = min(num_tokens, records[number].uncharged_tokens)
            line.serve(records[number], num_tokens)
            plain.serve(number, served)
        elif op == "leave" and plain.begun:
            number = sorted(plain.begun)[which % len(plain.begun)]
            line.discard(records[number])
            del plain.begun[number]
        elif op == "cancel" and plain.waiting:
            request = plain.waiting.pop(which % len(plain.waiting))
            line.discard(records[request[0]])
        head = line.head()
        assert (head and head[1].number) == (min(plain.heads())[1] if plain.waiting else None)
        assert line.is_idle == (not plain.waiting and not plain.begun)


def roomy(**changes):
    values = {"num_pages": 10**6, "max_num_seqs": 10**6, "max_queue": 10**6, "max_num_batched_tokens": 64}
    return Scheduler(SchedulerSettings(**{**values, **changes}))


def served(scheduler):
    """Computed tokens by request id in the next pack; requests with their token are removed."""
    pack = scheduler.next_pack(0.0, 10**6, COSTS)
    for name in scheduler.pack_done(0.0):
        scheduler.remove(name)
    return {piece.sequence_id: piece.num_tokens for piece in pack.pieces}


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 100)), max_size=12),
)
def test_backlogged_flows_differ_by_two_prompts_at_most(small, large, budget, visits):
    """Over any period: the range of one flow's lead over the other, while other flows come and go."""
    scheduler = roomy(max_num_batched_tokens=budget)
    sizes = {"a": small, "b": large}
    num_sent, num_ended = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    ahead = [0]
    for step in range(60):
        for flow, prompts in sizes.items():
            while num_sent[flow] - num_ended[flow] < budget + 2:  # always backlogged
                number = num_sent[flow]
                num_sent[flow] += 1
                scheduler.add(SequenceWork(f"{flow}{number}", prompts[number % len(prompts)], 1, 1, flow))
        for number, (at, num_tokens) in enumerate(visits):
            if at == step:
                scheduler.add(SequenceWork(f"v{number}", num_tokens, 1, 1, f"visitor {number % 3}"))
        pack = served(scheduler)
        for flow in "ab":
            num_ended[flow] = num_sent[flow] - sum(name[0] == flow for name in scheduler._sequences)
        gains = {flow: sum(n for name, n in pack.items() if name.startswith(flow)) for flow in "ab"}
        ahead.append(ahead[-1] + gains["a"] - gains["b"])
        assert sum(pack.values()) == budget
    assert max(ahead) - min(ahead) <= max(small) + max(large)


def test_started_prompt_continues_before_equal_ones():
    """With start tags all three would alternate, and all would finish late."""
    scheduler = roomy(max_num_batched_tokens=100)
    for flow in "xyz":
        scheduler.add(SequenceWork(flow, 250, 1, 1, flow))
    packs = [served(scheduler) for _ in range(8)]
    assert packs == [
        {"x": 100},
        {"x": 100},
        {"x": 50, "y": 50},
        {"y": 100},
        {"y": 100},
        {"z": 100},
        {"z": 100},
        {"z": 50},
    ]


def test_endless_new_flows_do_not_starve_a_long_prompt():
    """Two new flows in every pack: virtual time grows by a third of each pack, so at most 3 * 900 tokens of work
    overtake the prompt before all new requests have tags above its 900."""
    scheduler = roomy(max_num_batched_tokens=20)
    scheduler.add(SequenceWork("long", 900, 1, 1, "long"))
    total = 0
    for step in range(1000):
        for half in "ab":
            scheduler.add(SequenceWork(f"{half}{step}", 10, 1, 1, f"{half}{step}"))
        total += sum(served(scheduler).values())
        if "long" not in scheduler:
            break
    assert 900 < total <= 3 * 900 + 900


def test_returning_flow_is_still_charged_for_earlier_service():
    """x had 100 tokens at once while y had none; when x returns at virtual time 60, it is still ahead."""
    scheduler = roomy(max_num_batched_tokens=100)
    scheduler.add(SequenceWork("x0", 100, 1, 1, "x"))
    scheduler.add(SequenceWork("y0", 110, 1, 1, "y"))
    assert served(scheduler) == {"x0": 100}  # virtual time 50
    scheduler.add(SequenceWork("x1", 20, 1, 1, "x"))  # tag 100 + 20, not 50 + 20
    assert served(scheduler) == {"y0": 100}  # tag 110


def test_state_of_finished_flows_is_discarded():
    scheduler = roomy(max_num_batched_tokens=20)
    scheduler.add(SequenceWork("stays", 10, 1, 1, "stays"))
    for step in range(200):
        scheduler.add(SequenceWork(f"stays {step}", 10, 1, 1, "stays"))
        scheduler.add(SequenceWork(f"visitor {step}", 10, 1, 1, f"visitor {step}"))
        served(scheduler)
    assert len(scheduler._queue._queues[0]._flows) <= 10


class TestWindow:
    def order(self, shares, window):
        """Arrival numbers in the order of service, for requests with these cached and 10 computed tokens each."""
        scheduler = roomy(max_num_batched_tokens=10, reorder_window=window)
        for number, cached in enumerate(shares):
            scheduler.add(SequenceWork(str(number), 10, 1, 1, cached_tokens=cached))
        return [int(next(iter(served(scheduler)))) for _ in shares]

    def test_window_serves_the_most_cached_first_until_it_is_exhausted(self):
        # 1 and 2 overtake 0; 3 is not among the three that begin with 0
        assert self.order([0, 1, 1, 9, 9, 9], 3) == [1, 2, 0, 3, 4, 5]
        assert self.order([0, 5, 9, 1], 1) == [0, 1, 2, 3]

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8))
    def test_no_request_is_overtaken_by_more_than_the_window(self, shares, window):
        order = self.order(shares, window)
        for place, number in enumerate(order):
            assert sum(later > number for later in order[:place]) <= window - 1


class TestLeastFirst:
    @given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9))), max_size=200))
    def test_least_first_matches_a_plain_dict(self, ops):
        heap, plain = LeastFirst(), {}
        for key, rank in ops:
            if rank is None:
                heap.discard(key)
                plain.pop(key, None)
            else:
                heap.put(key, rank)
                plain[key] = rank
            assert heap.least() == min(((rank, key) for key, rank in plain.items()), default=None)
            assert len(heap) == len(plain)
            assert len(heap._heap) <= 2 * len(plain) + 17


class TestScaling:
    """Counts lines of bytecode, not seconds: the work per decision must not grow with the queue."""

    def lines(self, function):
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
        return count

    def costs(self, num_waiting, window):
        scheduler = roomy(max_num_seqs=8, max_num_batched_tokens=100, reorder_window=window)
        for number in range(num_waiting):
            scheduler.add(
                SequenceWork(
                    f"r{number}", 30, 2, 20, f"flow {number % 5}", number % 3, 1e6 + number, cached_tokens=number % 7
                )
            )

        def work():
            scheduler.expire(0.0)
            scheduler.next_pack(0.0, 10**6, COSTS)
            for _ in range(2):
                scheduler.after_layer(0.0)
                scheduler.next_decode(10**6, COSTS)
                scheduler.decode_done(0.0)
            scheduler.pack_done(0.0)
            scheduler.add(SequenceWork("new", 30, 2, 20, "flow 1", 1))
            scheduler.replan(SequenceWork("new", 20, 2, 20, "flow 1", 1))
            scheduler.remove(f"r{num_waiting - 1}")
            scheduler.retry_after_s("flow 1", COSTS)
            scheduler.expire(1e6 + 7)

        return self.lines(work)

    @pytest.mark.parametrize("window", [1, 32])
    def test_decision_cost_does_not_grow_with_queue_length(self, window):
        few, many = self.costs(600, window), self.costs(10_000, window)
        assert many < 1.2 * few, (few, many)
