"""Answers with exact reuse equal those of a full prefill, token for token, under any load: reordered and batched
requests, tiers too small for the passages, answers begun from passages that a search later replaced."""

from __future__ import annotations

import collections
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from ccjax.engine import Engine, Request, Response
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.speculation import SpeculativeAnswer
from ccjax.runner.device import kv_spec_of
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.types import Document
from tests.engine.helpers import TinyModel, draw_segments
from tests.engine.test_batch_failures import check_pages
from tests.engine.test_batch_loop import ask, check
from tests.polling import wait_until

MODEL = TinyModel(seed=31)
SPEC = kv_spec_of(MODEL.config, "float32")
LENGTHS = (40, 33, 64, 17, 52, 48)
SYSTEM, *PASSAGES, FIRST = draw_segments(np.random.default_rng(31), LENGTHS)
QUESTIONS = (FIRST, *(draw_segments(np.random.default_rng(seed), [], question=5 + seed)[-1] for seed in (1, 2)))
LONGEST = 288
POOL_BYTES = (LONGEST // PAGE_TOKENS + 64) * SPEC.num_bytes(PAGE_TOKENS)
"""The smallest possible pool; the allowed number of running requests needs more. One size for all tests, because
steps are compiled for it."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of an example.

    Attributes:
      order: its passages.
      is_drawn: its tokens are sampled, not greedy.
      offers: passages that a staged search finds before `order`; None without a search.
      waits: number of offers whose answer gets its first token before the search continues.
      is_given_up: it is cancelled as soon as it is queued.
    """

    order: tuple[int, ...]
    question: int
    num_tokens: int
    is_drawn: bool
    offers: tuple[tuple[int, ...], ...] | None
    waits: int
    is_given_up: bool

    def request(self, reuse: str) -> Request:
        segments = [SYSTEM, *(PASSAGES[index] for index in self.order), QUESTIONS[self.question]]
        sampling = {"temperature": 1.0, "seed": 7} if self.is_drawn else {}
        return ask(segments, reuse, self.num_tokens, **sampling)


ORDERS = st.permutations(range(len(PASSAGES))).flatmap(
    lambda order: st.integers(0, 4).map(lambda count: tuple(order[:count]))
)
"""Any passages in any order; some lists below are more frequent, as with a cache."""
POPULAR = st.sampled_from([(0, 1, 2), (0, 1, 2, 3), (1, 0, 2, 3), (2, 1, 0), (4, 5, 0, 1)])
LISTS = ORDERS | POPULAR


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    order = draw(LISTS)
    offers = draw(st.none() | st.lists(LISTS | st.just(order), min_size=1, max_size=3))
    return Asked(
        order,
        question=draw(st.integers(0, len(QUESTIONS) - 1)),
        num_tokens=draw(st.sampled_from([1, 4, 40])),
        is_drawn=draw(st.booleans()),
        offers=None if offers is None else tuple(offers),
        waits=draw(st.integers(0, 3)),
        is_given_up=draw(st.integers(0, 9)) == 0,
    )


WAVES = st.lists(st.lists(asked(), min_size=3, max_size=9), min_size=2, max_size=4)
"""Waves, one after the other, of requests that are queued together."""


def _crowd() -> list[list[Asked]]:
    """More passages after more prefixes than any tier holds, in two waves, some repeated, with correct and wrong
    speculation, and cancelled; then two lists of the same passages, each while KV of the other one is cached."""
    random = np.random.default_rng(5)
    lines = []
    for _ in range(2):
        line, order = [], (0, 1, 2, 3)
        for number in range(9):
            if number % 2:  # repeats the previous order with its first two passages swapped
                order = (order[1], order[0], *order[2:])
            else:
                order = tuple(int(index) for index in random.permutation(len(PASSAGES))[:4])
            offers = {2: (order[::-1],), 4: (order[1:], order), 6: (order[:1], order[::-1])}.get(number)
            line.append(Asked(order, number % 3, (4, 24)[number % 2], number % 4 < 2, offers, number // 3, number == 7))
        lines.append(line)
    twins = [Asked(order, 0, 4, True, None, 0, False) for order in ((0, 1, 2, 3), (1, 0, 2, 3))]
    return [*lines, lines[0], *([one] for one in twins), twins]


CROWD = _crowd()
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""An example takes seconds, so failures are not shrunk."""


@functools.cache
def full_engine() -> Engine:
    """Answers with a full prefill, one request at a time."""
    return MODEL.engine(max_model_len=LONGEST, strategy="full", device_cache_bytes=POOL_BYTES)


@functools.cache
def full(one: Asked) -> Response:
    return full_engine().run(one.request("off"))


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    """Closes the full-prefill engine after all tests."""
    yield
    if full_engine.cache_info().currsize:
        full_engine().close()
    full_engine.cache_clear()
    full.cache_clear()


class Answer:
    """The answer to one request; `finish` submits the final request after a search."""

    def __init__(self, engine: Engine, one: Asked, reuse: str) -> None:
        self.engine, self.one, self.reuse = engine, one, reuse
        self.events: list = []
        self.search: SpeculativeAnswer | None = None
        if one.offers is not None:
            self.search = SpeculativeAnswer(
                lambda request, emit, *, on_start: engine.submit(self._as_segments(request), emit, on_start=on_start),
                lambda documents: Request(prompt="", documents=documents),
                lambda: 0,
                max_pending=1,
            )

    def _as_segments(self, request: Request) -> Request:
        """The request of this example over the documents of `request`."""
        order = tuple(int(document.id) for document in request.documents)
        return dataclasses.replace(self.one, order=order).request(self.reuse)

    def look(self) -> None:
        """Advances the search if it is not finished."""
        for number, offer in enumerate(self.one.offers or ()):
            assert self.search is not None
            self.search.offer(found(offer))
            attempt = self.search._attempt
            if number < self.one.waits and attempt is not None:
                wait_until(lambda attempt=attempt: attempt.held, timeout_s=120)

    def finish(self, on_start: Callable[[], None]) -> None:
        if self.search is None:
            cancel = self.engine.submit(self.one.request(self.reuse), self.events.append, on_start=on_start)
        else:
            request = Request(prompt="", documents=found(self.one.order))
            cancel = self.search.start(request, self.events.append, on_start=on_start)
        if self.one.is_given_up:
            cancel()

    @property
    def is_over(self) -> bool:
        return bool(self.events) and (isinstance(self.events[-1], Exception) or self.events[-1].response is not None)

    def check(self) -> Response | None:
        """Checks the response and returns it; None if the request was cancelled in time."""
        wait_until(lambda: self.is_over, timeout_s=120)
        last = self.events[-1]
        if isinstance(last, CancelledError) and self.one.is_given_up:
            return None
        assert not isinstance(last, Exception), repr(last)
        response = last.response
        assert tuple(token for delta in self.events for token in delta.token_ids) == response.token_ids
        check(response, full(self.one))
        assert response.reuse.exact and response.reuse.recomputed_tokens == 0
        return response


def found(order: Sequence[int]) -> tuple[Document, ...]:
    """The documents that a search finds."""
    return tuple(Document(text=f"passage {index}", id=str(index)) for index in order)


def test_exact_reuse_answers_equal_full_prefill_under_random_load():
    """One test for all: at the end it checks which situations the random waves have covered."""
    seen: collections.Counter[str] = collections.Counter()

    @given(
        waves=WAVES,
        way=st.sampled_from([("prefix", "bounded"), ("auto", "exact"), ("cachecraft", "exact")]),
        policy=st.sampled_from(["pgdsf", "lru", "gdsf"]),
        host_tokens=st.sampled_from([60, 200, 2000]),
        has_disk=st.booleans(),
        window=st.sampled_from([1, 4, 32]),
    )
    @example(waves=CROWD, way=("prefix", "bounded"), policy="pgdsf", host_tokens=60, has_disk=False, window=32)
    @example(waves=CROWD, way=("auto", "exact"), policy="gdsf", host_tokens=200, has_disk=True, window=4)
    @settings(
        max_examples=max(1, settings.default.max_examples // 10 - 1),
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )
    def answers(waves, way, policy, host_tokens, has_disk, window):
        strategy, reuse = way
        with tempfile.TemporaryDirectory() as place:
            build = functools.partial(
                MODEL.engine,
                max_model_len=LONGEST,
                strategy=strategy,
                eviction_policy=policy,
                host_cache_bytes=host_tokens * SPEC.num_bytes(1),
                device_cache_bytes=POOL_BYTES,
                store=f"file://{place}" if has_disk else None,
                disk_cache_bytes=600 * SPEC.num_bytes(1) if has_disk else None,
                max_num_seqs=8,
                max_num_batched_tokens=128,
                reorder_window=window,
                max_decode_gap_ms=0.0,
            )
            with build() as engine:
                for wave in waves:
                    run(engine, wave, reuse, seen)
                check_pages(engine)
                for tier, usage in engine.cache.usage().items():
                    seen[f"evicted from {tier}"] += usage.evicted

    answers()
    for name in ("reused", "given up", "right", "wrong", "evicted from host", "evicted from device", "reordered"):
        assert seen[name], f"{name}: never, of {dict(seen)}"


def run(engine: Engine, wave: Sequence[Asked], reuse: str, seen: collections.Counter[str]) -> None:
    """Runs all requests of a wave concurrently."""
    answers = [Answer(engine, one, reuse) for one in wave]
    for answer in answers:
        answer.look()
    started: list[int] = []
    with engine._loop.exclusive():
        for number, answer in enumerate(answers):
            answer.finish(functools.partial(started.append, number))
    for answer in answers:
        response = answer.check()
        seen["given up"] += response is None
        if response is not None:
            seen["reused"] += response.reuse.reused_tokens
            for document in response.reuse.per_document:
                seen[f"from {document.tier}"] += 1
        if answer.search is not None:
            seen["right"] += answer.search.was_right is True
            seen["wrong"] += answer.search.num_started - (answer.search.was_right is True)
    late = [number for number in started if answers[number].search is None]  # not begun before the wave was queued
    seen["reordered"] += late != sorted(late)
