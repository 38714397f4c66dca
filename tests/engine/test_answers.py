"""Several answers to one prompt: each equals the answer alone, the prompt is computed once, its pages are shared."""

import collections
import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.engine.batch.available_pages import AvailablePages
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.sequence import TokenSequence
from ccjax.errors import ContextLengthError
from ccjax.runner import pack as pack_module
from ccjax.runner.pool import PAGE_TOKENS, num_pages
from ccjax.runner.sampling import seed_of
from tests.engine.helpers import TinyModel, draw_segments
from tests.engine.test_batch_loop import Client, check, filled, settled
from tests.polling import wait_until
from tests.runner.test_batch import prompts

MODEL = TinyModel(seed=31)
PAGE = MODEL.page_bytes
LEAST = 512 // PAGE_TOKENS + 64
REUSES = ("bounded", "exact", "off", "fast")


def ask(segments, n=1, reuse="off", tokens=8, **sampling):
    sampling = SamplingParams(max_new_tokens=tokens, logprobs=0, n=n, **sampling)
    return Request(segments=segments, sampling=sampling, reuse=reuse)


def alone(engine, request):
    """Each answer of a request generated separately, with the seed that it has among the others."""
    seed, answers = request.sampling.seed or 0, []
    for index in range(request.sampling.n):
        sampling = dataclasses.replace(request.sampling, n=1, seed=seed_of(seed, index))
        answers.append(engine.run(dataclasses.replace(request, sampling=sampling)))
    return answers


class Counting(Client):
    """A client that keeps all errors; at most one is expected."""

    def __init__(self, engine, request):
        self.errors = []
        super().__init__(engine, request)

    def _emit(self, event):
        if isinstance(event, Exception):
            self.errors.append(event)
        super()._emit(event)


def check_all(client, wanted):
    """Checks that the response and the stream have the expected answers."""
    assert client.done.wait(120), "no answer"
    assert client.error is None, client.error
    response = client.deltas[-1].response
    for got, one in zip(response.choices, wanted, strict=True):
        check(got, one)
        assert got.finish_reason == one.finish_reason
    streamed, ends = collections.defaultdict(list), []
    for delta in client.deltas:
        assert delta.index not in ends, "a delta behind the last one"
        streamed[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            assert delta.finish_reason == response.choices[delta.index].finish_reason
            ends.append(delta.index)
    assert sorted(ends) == list(range(len(wanted)))
    assert [tuple(streamed[index]) for index in range(len(wanted))] == [one.token_ids for one in response.choices]
    assert [delta.response is not None for delta in client.deltas] == [False] * (len(client.deltas) - 1) + [True]
    first = response.choices[0]
    assert (response.text, response.token_ids, response.logprobs) == (first.text, first.token_ids, first.logprobs)
    assert response.num_answer_tokens == sum(len(one.token_ids) for one in wanted)
    return response


@pytest.fixture
def computed(monkeypatch):
    """The numbers of tokens that ran through the layers of packs."""
    counts = []
    logits = pack_module.Pack.logits

    def counted(pack):
        counts.append(pack.num_computed)
        return logits(pack)

    monkeypatch.setattr(pack_module.Pack, "logits", counted)
    return counts


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_ratio": 0.3},
        {"recompute_ratio": 0.3, "focus_window": None, "max_num_batched_tokens": 48},
        {"device_cache_bytes": 600 * PAGE, "recompute_ratio": 0.3, "max_decode_gap_ms": 0.0},
        {"device_cache_bytes": 600 * PAGE, "max_num_batched_tokens": 64, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_each_answer_equals_a_separate_request_with_its_seed(settings):
    random = np.random.default_rng(1)
    asked, counts = prompts(random, 8), (1, 1, 1, 1, 2, 3, 4, 5)
    with MODEL.engine(max_model_len=512, **settings) as engine:
        filled(engine, asked)
        requests = [
            ask(one, n, REUSES[number % 4], seed=number, temperature=float(number % 3 > 0))
            for number, (one, n) in enumerate(zip(asked, counts, strict=True))
        ]
        wanted = [alone(engine, request) for request in requests]
        free = engine._device.pool.num_free
        clients = []
        for request in requests:
            clients.append(Client(engine, request))
            time.sleep(float(random.exponential(0.002)))
        for client, request, answers in zip(clients, requests, wanted, strict=True):
            response = check_all(client, answers)
            assert response.reuse.computed_tokens == answers[0].reuse.computed_tokens
            different = len({one.token_ids for one in response.choices})
            assert different == (1 if request.sampling.temperature == 0.0 else request.sampling.n)
        settled(engine)
        assert engine._device.pool.num_free == free


@pytest.mark.parametrize(("question", "num_seqs"), [(1, 1), (2, 3), (16, 3), (16, 16), (17, 1), (32, 16)])
def test_prompt_is_computed_once_even_if_answers_run_one_after_another(question, num_seqs, computed):
    segments = draw_segments(np.random.default_rng(question), [40, 30], question=question)
    with MODEL.engine(max_model_len=512, max_num_seqs=num_seqs) as engine:
        request = ask(segments, n=5, tokens=21, seed=3, temperature=1.0)
        wanted = alone(engine, request)
        computed.clear()
        check_all(Client(engine, request), wanted)
        assert sum(computed) == sum(map(len, segments)) + 4
        settled(engine)
        assert engine._device.pool.num_free == engine._device.pool.num_pages


def test_shared_prompt_is_kept_between_answers_if_pages_suffice(computed):
    """One slot, pages for the prompt and one answer: between two answers the prompt has no reader, and nothing else
    needs its pages."""
    segments = draw_segments(np.random.default_rng(9), [150, 60], question=20)
    with MODEL.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE, max_num_seqs=1) as engine:
        request = ask(segments, n=4, tokens=20, seed=3, temperature=1.0)
        wanted = alone(engine, request)
        held = engine._device.pool.allocate([(LEAST - (1 + 10 + 4 + 2) - 3) * PAGE_TOKENS])
        computed.clear()
        check_all(Client(engine, request), wanted)
        assert sum(computed) == sum(map(len, segments)) + 3
        settled(engine)
        assert engine._device.pool.num_free == 20 and len(held) == 1


class Prompt:
    def __init__(self, pool, pages):
        self.pool, self.num_pages = pool, pages

    def drop(self):
        self.pool.num_free += self.num_pages


class Cache:
    """A pool with a cache of chunks, for `AvailablePages`: counts pages, of 10 bytes each."""

    page_bytes, memory_tiers = 10, ("device",)

    def __init__(self, free, evictable):
        self.num_free, self.evictable = free, evictable

    pinned_ids = ()

    def num_available(self, in_use):
        return self.num_free + self.evictable

    def make_room(self, tier, num_bytes):
        while self.num_free < num_bytes // 10 and self.evictable:
            self.num_free, self.evictable = self.num_free + 1, self.evictable - 1


def pages_with(free, evictable, prompts):
    """`prompts`: (pages, whether an admitted answer reads it) each."""
    cache = Cache(free, evictable)
    pages = AvailablePages(cache, cache, cache)
    for count, is_read in prompts:
        pages.shared.append(SimpleNamespace(shared_prompt=Prompt(cache, count), is_unread=not is_read))
    return cache, pages


@pytest.mark.parametrize(
    ("wanted", "dropped", "free", "evictable"),
    [
        (2, [], 2, 3),
        (5, [], 5, 0),
        (6, [4], 6, 3),
        (9, [4], 9, 0),
        (10, [4, 7], 13, 3),
        (30, [4, 7], 16, 0),
    ],
)
def test_unread_shared_prompts_are_dropped_after_cached_chunks_oldest_first(wanted, dropped, free, evictable):
    cache, pages = pages_with(2, 3, [(4, False), (5, True), (7, False)])
    unread = [one.shared_prompt.num_pages for one in pages.shared if one.is_unread]
    assert pages.num_pages == 2 + 3 + sum(unread)
    gone = pages.reclaim(wanted)
    assert [prompt.num_pages for _, prompt in gone] == dropped
    assert all(group.shared_prompt is None and group not in pages.shared for group, _ in gone)
    assert (cache.num_free, cache.evictable) == (free, evictable)
    assert pages.num_pages == 2 + 3 + sum(unread)


def test_one_token_answers_share_the_prompt(computed):
    segments = draw_segments(np.random.default_rng(2), [40])
    with MODEL.engine(max_model_len=512) as engine:
        request = ask(segments, n=16, tokens=1, seed=3, temperature=2.0)
        wanted = alone(engine, request)
        assert len({one.token_ids for one in wanted}) > 4
        computed.clear()
        check_all(Client(engine, request), wanted)
        assert sum(computed) == sum(map(len, segments)) + 15


def test_derived_seeds_of_answers_never_collide():
    seeds = {seed_of(seed, index) for seed in range(50) for index in range(16)}
    assert len(seeds) == 800 and all(0 <= seed < 2**64 for seed in seeds)
    assert [seed_of(seed, 0) for seed in (0, 7, 2**70)] == [0, 7, 2**70]


def test_an_answer_that_ends_early_gives_its_pages_back_at_once():
    random = np.random.default_rng(3)
    model = TinyModel(seed=31)
    model.loaded = dataclasses.replace(model.loaded, eos_ids=frozenset(range(0, 97, 24)))
    segments = draw_segments(random, [40, 20], question=10)
    prompt_pages, tail = sum(num_pages(len(one)) for one in segments), 6
    with model.engine(max_model_len=512) as engine:
        request = ask(segments, n=8, tokens=120, seed=5, temperature=1.5)
        wanted = alone(engine, request)
        lengths = [len(one.token_ids) for one in wanted]
        assert min(lengths) < 20 and len(set(lengths)) > 4
        client = Client(engine, request)
        used = []

        def look():
            """Called at the end of an answer, on the engine's thread, between two steps."""
            if client.deltas[-1].finish_reason is None:
                return
            ended = {delta.index for delta in client.deltas if delta.finish_reason is not None}
            drawn = collections.Counter()
            for delta in client.deltas:
                drawn[delta.index] += len(delta.token_ids)
            shared = prompt_pages if len(ended) < 8 else 0
            growing = [
                num_pages(max(0, count - 1 - tail)) if index == 0 else num_pages(count)
                for index, count in drawn.items()
                if index not in ended
            ]
            in_use = engine._device.pool.num_pages - engine._device.pool.num_free
            used.append((in_use, shared + sum(growing)))

        client.on_delta = look
        check_all(client, wanted)
        # Answers that end in the same step are reported one after the other, but release their pages together.
        assert used[-1] == (0, 0) and all(in_use <= pages for in_use, pages in used)
        assert sum(in_use == pages for in_use, pages in used) >= 5


def test_page_shortage_preempts_single_answers_and_keeps_the_shared_prompt(monkeypatch):
    random = np.random.default_rng(4)
    asked = [draw_segments(random, [60, 60], question=20) for _ in range(4)]
    with MODEL.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE, max_num_seqs=16) as engine:
        engine._chunks.planner.read_only = True
        requests = [ask(one, n=3, tokens=70, seed=number, temperature=1.0) for number, one in enumerate(asked)]
        wanted = [alone(engine, request) for request in requests]
        preempted = []
        preempt = engine._loop._sequences._preempt

        def noted(sequence: TokenSequence):
            group = sequence.group
            preempt(sequence)
            if group.shared_prompt is not None:
                record = engine._loop._scheduler._get(sequence.sequence_id)
                assert (record.work.prefill_tokens, record.own_pages) == (1, sequence.num_own_pages)
            others = sum(one.is_decoding for one in group.open)
            preempted.append((sequence.sequence_id, others, group.shared_prompt is not None))

        monkeypatch.setattr(engine._loop._sequences, "_preempt", noted)
        held = engine._device.pool.allocate([(LEAST - 41) * PAGE_TOKENS])  # three first answers need 3 x (11 + 4)
        with engine._loop.exclusive():  # all request pages at the same time
            clients = [Client(engine, request) for request in requests]
        for client, answers in zip(clients, wanted, strict=True):
            check_all(client, answers)
        assert any(others and is_shared for _, others, is_shared in preempted)
        assert any(name.endswith("/0") for name, *_ in preempted)
        settled(engine)
        del held
        assert engine._device.pool.num_free == LEAST and not engine._loop._sequences.pages.shared


def test_shared_prompt_is_dropped_while_all_answers_wait_and_shared_again(monkeypatch, computed):
    """While all answers wait, the pages of their prompt are needed. With two slots, two of them compute it."""
    segments = draw_segments(np.random.default_rng(5), [300], question=20)
    with MODEL.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE, max_num_seqs=2) as engine:
        engine._chunks.planner.read_only = True
        request = ask(segments, n=4, tokens=30, seed=1, temperature=1.0)
        wanted = alone(engine, request)
        dropped = []
        drop = engine._loop._sequences.pages.drop

        def noted(group):
            dropped.append(len(group.open))
            return drop(group)

        monkeypatch.setattr(engine._loop._sequences.pages, "drop", noted)
        starved = []
        decode = engine._loop._decode

        def starve():
            """Called in the middle of the answers: allocates all free pages, so both running answers are preempted."""
            if not starved and len(client.deltas) > 20:
                scheduler, sequences = engine._loop._scheduler, engine._loop._sequences
                for sequence in [one for one in sequences.all() if one.is_decoding]:
                    scheduler._preempt(scheduler._get(sequence.sequence_id))
                    sequences._preempt(sequence)
                held = engine._device.pool.allocate([PAGE_TOKENS] * engine._device.pool.num_free)
                sequences.reclaim(1)
                starved.append(engine._device.pool.num_free)
                for sequence in sequences.all():  # they wait, with the whole prompt to compute
                    assert scheduler._get(sequence.sequence_id).work.prefill_tokens == sum(map(len, segments))
                del held
            return decode()

        monkeypatch.setattr(engine._loop, "_decode", starve)
        computed.clear()
        client = Client(engine, request)
        check_all(client, wanted)
        assert starved == [num_pages(7) + num_pages(300) + num_pages(20)]
        assert dropped[0] == 4 and dropped[-1] == 0
        once = sum(map(len, segments))
        assert 3 * once < sum(computed) < 3 * once + 100
        settled(engine)
        assert engine._device.pool.num_free == LEAST


@pytest.mark.parametrize("num_deltas", [0, 1, 30])
def test_cancelling_ends_all_answers_once_and_frees_all_pages(num_deltas):
    segments = draw_segments(np.random.default_rng(6), [60, 30])
    with MODEL.engine(max_model_len=512, max_num_seqs=3) as engine:
        client = Counting(engine, ask(segments, n=6, tokens=200, seed=1, temperature=1.0))
        wait_until(lambda: len(client.deltas) >= num_deltas, timeout_s=120)
        client.cancel()
        with pytest.raises(CancelledError):
            client.response()
        settled(engine)
        assert (
            engine._device.pool.num_free == engine._device.pool.num_pages and not engine._loop._sequences.pages.shared
        )
        count = len(client.deltas)
        engine.run(ask(segments, n=2))
        assert len(client.deltas) == count and all(delta.response is None for delta in client.deltas)
        assert len(client.errors) == 1


def test_a_step_that_fails_ends_all_answers_with_one_error(monkeypatch, caplog):
    segments = draw_segments(np.random.default_rng(7), [40, 30])
    with MODEL.engine(max_model_len=512) as engine:
        wanted = alone(engine, ask(segments, n=3))

        def out_of_memory(*args, **kwargs):
            raise MemoryError("no room on the device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ccjax.runner.decode.paged_decode_step", out_of_memory)
            client = Counting(engine, ask(segments, n=3))
            with pytest.raises(MemoryError):
                client.response()
        check_all(Client(engine, ask(segments, n=3)), wanted)
        assert len(client.errors) == 1
        settled(engine)
        assert engine._device.pool.num_free == engine._device.pool.num_pages


def test_cached_chunks_are_kept_until_the_last_answer_reading_them_ends():
    """On the device the chunks are in pages of the cache, which other requests need meanwhile."""
    random = np.random.default_rng(8)
    segments = draw_segments(random, [60, 40], question=12)
    with MODEL.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE, max_num_seqs=4) as engine:
        engine.run(ask(segments, reuse="exact"))
        request = ask(segments, n=4, reuse="exact", tokens=60, seed=2, temperature=1.0)
        wanted = alone(engine, request)
        held = engine._device.pool.allocate([(LEAST - 35) * PAGE_TOKENS])
        client = Client(engine, request)
        others = [Client(engine, ask(draw_segments(random, [50]), reuse="exact", tokens=4)) for _ in range(8)]
        response = check_all(client, wanted)
        assert response.reuse.reused_tokens == 107
        for other in others:
            other.response()
        settled(engine)
        assert len(held) == 1


def test_cached_chunks_stay_pinned_after_the_first_answer_ends():
    model = TinyModel(seed=31)
    model.loaded = dataclasses.replace(model.loaded, eos_ids=frozenset(range(0, 97, 24)))
    segments = draw_segments(np.random.default_rng(8), [60, 40], question=12)
    with model.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE) as engine:
        engine.run(ask(segments, reuse="exact"))
        request = ask(segments, n=8, reuse="exact", tokens=60, seed=5, temperature=1.5)
        wanted = alone(engine, request)
        assert len(wanted[0].token_ids) + 3 < max(len(one.token_ids) for one in wanted)
        client, ended, pinned = Client(engine, request), [], []

        def look():
            delta = client.deltas[-1]
            if delta.finish_reason is not None:
                ended.append(delta.index)
            elif 0 in ended:  # so other answers continue
                pinned.append(bool(engine._chunks.store._pins))

        client.on_delta = look
        check_all(client, wanted)
        assert pinned and all(pinned)
        settled(engine)


def test_prompt_without_pages_for_a_second_answer_is_rejected_up_front(computed):
    """One answer takes the whole pool; the second would need another page for the prompt's last token."""
    with MODEL.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE) as engine:
        segments = [[1] * 2 for _ in range(LEAST - 1)] + [[1] * 15]
        assert engine.run(ask(segments, tokens=2)).token_ids
        computed.clear()
        with pytest.raises(ContextLengthError, match="pages"):
            engine.run(ask(segments, n=2, tokens=2))
        assert not computed
