"""Packed prefills and batched decoding over one pool: each request gets what it gets alone."""

import contextlib
import dataclasses

import numpy as np
import pytest

from ccjax.cache.contexts import LayerLoader
from ccjax.cache.reads import WaitLimit
from ccjax.engine import Engine, EngineConfig, Request, SamplingParams
from ccjax.runner.context_loader import JobFailedError
from ccjax.runner.decode import DecodeBatch
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import Piece
from ccjax.runner.packing import pack_pieces
from ccjax.runner.pages import RequestPages, shared_segments
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.runner.sampling import SampleSpec, sample_tokens
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=13)
PAGE = MODEL.page_bytes
ANSWER = 6
SAMPLING = SamplingParams(max_new_tokens=ANSWER, logprobs=0)


@dataclasses.dataclass(eq=False)
class Running:
    """One request on its way."""

    job: PrefillJob
    ticket: object
    stack: contextlib.ExitStack
    done: int = 0
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)


class Batch:
    """Requests over the pool, store and index of an engine that runs nothing itself meanwhile."""

    def __init__(self, engine, pool=None):
        self.engine, self.pool = engine, engine._device.pool if pool is None else pool
        self.decoder = DecodeBatch(engine._device.model, self.pool)

    def begin(self, segments, reuse="bounded", answered=()):
        """The request with its plan, pages and loads; `answered`: tokens that it drew before it was preempted."""
        engine, stack = self.engine, contextlib.ExitStack()
        prompt = engine.assemble(Request(segments=segments, sampling=SAMPLING, reuse=reuse))
        plan = engine._chunks.planner.plan(
            prompt, reuse, engine._chunks.planner.usable(prompt) if reuse != "off" else {}
        )
        ticket = engine._chunks.store.prepare_load(plan.pin)
        assert not ticket.missing
        chunks = {key: engine._device.pool.get(key) for key, tier in ticket.tiers.items() if tier == "device"}
        pages = RequestPages(self.pool, plan, chunks)
        for _ in answered:
            pages.append()
        contexts = None
        if any(s.action == "reuse" and n not in pages.shared for n, s in enumerate(plan.segments)):
            wait_limit = WaitLimit(None)
            wait_limit.expect({one.variant_id: one.num_tokens for one in plan.segments if one.variant_id})
            contexts = LayerLoader(
                ticket,
                plan,
                kv_spec=engine._chunks.store.kv_spec,
                wait_limit=wait_limit,
                pool=self.pool,
                skip=pages.shared,
            )
            stack.enter_context(contexts)
        token_ids = np.concatenate([prompt.token_ids, np.asarray(answered, np.int32)])
        return Running(PrefillJob(token_ids, plan, pages, contexts=contexts), ticket, stack)

    def prefill(self, pieces):
        """Runs a pack of (request, number of tokens); those that are through sample their next token."""
        work = [Piece(one.job, one.done, one.done + count) for one, count in pieces]
        for one, count in pieces:
            one.done += count
        pack = pack_pieces(self.engine._device.model, self.pool, work, max_rows=1024)
        while not pack.is_done:
            pack.run_layer()
        jobs, logits = pack.logits()
        if jobs:
            self.append_sampled([next(one for one, _ in pieces if one.job is job) for job in jobs], logits)

    def decode(self, requests):
        logits = self.decoder.step([one.job.pages for one in requests], [one.tokens[-1] for one in requests])
        self.append_sampled(requests, logits)

    def append_sampled(self, requests, logits):
        specs = [SampleSpec(SAMPLING, 0, len(one.tokens)) for one in requests]
        for one, token in zip(requests, sample_tokens(logits, specs), strict=True):
            one.tokens.append(token.token_id)
            one.logprobs.append(token.logprob)

    def end(self, one):
        one.stack.close()
        self.engine._chunks.store.complete_load(one.ticket, ok=False)
        one.job = None


def alone(engine, segments, reuse="bounded"):
    response = engine.run(Request(segments=segments, sampling=SAMPLING, reuse=reuse))
    return list(response.token_ids), [token.logprob for token in response.logprobs]


def prompts(random, count=7):
    """Prompts of the same passages in changing orders."""
    passages = draw_segments(random, [int(length) for length in random.integers(1, 70, 8)])[1:-1]
    system = draw_segments(random, [])[0]
    drawn = []
    for _ in range(count):
        chosen = random.choice(len(passages), random.integers(0, 5), replace=False)
        question = draw_segments(random, [], question=int(random.integers(1, 30)))[-1]
        drawn.append([system, *(passages[index] for index in chosen), question])
    return drawn


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (0, {"recompute_ratio": 0.3}),
        (1, {"recompute_ratio": 0.3}),
        (1, {"focus_window": None}),
        (2, {"strategy": "reuse"}),
        (0, {"strategy": "cacheblend", "recompute_ratio": 0.2}),
    ],
    ids=str,
)
def test_random_packs_and_batches_give_the_same_answers_as_alone(seed, settings):
    random = np.random.default_rng(seed)
    asked = prompts(random)
    reuse = [("bounded", "exact", "off", "fast")[number % 4] for number in range(len(asked))]
    with MODEL.engine(max_model_len=512, device_cache_bytes=400 * PAGE, **settings) as engine:
        for segments in asked[:3]:
            alone(engine, segments)  # fills the store
        object.__setattr__(engine.config, "read_only", True)
        engine._chunks.planner.read_only = True
        wanted = [alone(engine, *one) for one in zip(asked, reuse, strict=True)]
        batch, free = Batch(engine), engine._device.pool.num_free
        waiting = list(enumerate(zip(asked, reuse, strict=True)))
        begun, decoding = {}, {}
        while waiting or begun or decoding:
            while waiting and random.random() < 0.6:
                number, one = waiting.pop(0)
                begun[number] = batch.begin(*one)
            pieces = []
            for one in begun.values():
                if random.random() < 0.7:
                    left = len(one.job.offsets) - one.done
                    is_split = random.random() < 0.5 and one.job.plan.is_divisible
                    pieces.append((one, int(random.integers(1, left + 1)) if is_split else left))
            if pieces:
                batch.prefill(pieces)
            for number in [number for number, one in begun.items() if one.tokens]:
                decoding[number] = begun.pop(number)
            going = [one for one in decoding.values() if len(one.tokens) < ANSWER and random.random() < 0.8]
            if going:
                batch.decode(going)
            for number in [number for number, one in decoding.items() if len(one.tokens) == ANSWER]:
                one = decoding.pop(number)
                batch.end(one)
                assert one.tokens == wanted[number][0], number
                np.testing.assert_allclose(one.logprobs, wanted[number][1], atol=TOLERANCE)
        assert engine._device.pool.num_free == free


def test_requests_share_the_pages_of_a_chunk_at_different_positions():
    random = np.random.default_rng(5)
    segments = draw_segments(random, [40, 33])
    other = [draw_segments(random, [])[0] + [1, 2, 3], *segments[1:]]
    with MODEL.engine(max_model_len=512, device_cache_bytes=100 * PAGE, strategy="reuse") as engine:
        alone(engine, segments)
        batch = Batch(engine)
        first, second = batch.begin(segments), batch.begin(other)
        assert first.job.pages.shared == {0, 1, 2} and second.job.pages.shared == {1, 2}
        same = [set(one.job.pages.table[0]) for one in (first, second)]
        assert len(same[0] & same[1]) == 3 + 3
        batch.prefill([(first, len(first.job.offsets)), (second, len(second.job.offsets))])
        for _ in range(ANSWER - 1):
            batch.decode([second, first])
        object.__setattr__(engine.config, "read_only", True)
        for one, wanted in ((first, alone(engine, segments)), (second, alone(engine, other))):
            assert one.tokens == wanted[0]


def test_preempted_request_continues_where_it_stopped():
    random = np.random.default_rng(6)
    segments, answered = draw_segments(random, [40, 33]), []
    with MODEL.engine(max_model_len=512, device_cache_bytes=100 * PAGE) as engine:
        wanted = alone(engine, segments)
        batch = Batch(engine)
        for count in (2, 3, 1):
            one = batch.begin(segments, answered=answered)
            batch.prefill([(one, len(one.job.offsets))])
            for _ in range(count - 1):
                batch.decode([one])
            answered += one.tokens
            batch.end(one)
        assert answered == wanted[0]


def test_new_page_is_allocated_only_when_the_last_one_is_full():
    with MODEL.engine(max_model_len=512, device_cache_bytes=100 * PAGE) as engine:
        batch = Batch(engine)
        one = batch.begin(draw_segments(np.random.default_rng(7), [20], question=15))
        pages = one.job.pages
        free, taken = engine._device.pool.num_free, []
        for _ in range(40):
            taken.append(pages.needs_page)
            slot = pages.append()
            assert pages.slots[-1] == slot and len(set(pages.slots)) == pages.num_tokens
        assert [number for number, is_new in enumerate(taken) if is_new] == [1, 17, 33]
        assert engine._device.pool.num_free == free - 3
        batch.end(one)


def test_failed_page_allocation_takes_no_pages():
    from ccjax.store import TierFullError

    with MODEL.engine(max_model_len=512, device_cache_bytes=100 * PAGE) as engine:
        held = engine._device.pool.allocate([96 * PAGE_TOKENS])
        with pytest.raises(TierFullError, match="wanted 5 pages, 4 are free"):
            Batch(engine).begin(draw_segments(np.random.default_rng(7), [33]))
        assert engine._device.pool.num_free == 4
        held[0].free()
        assert engine._device.pool.num_free == 100


def test_pack_continues_after_a_job_is_dropped():
    random = np.random.default_rng(8)
    asked = [draw_segments(random, [40]), draw_segments(random, [30]), draw_segments(random, [20])]
    with MODEL.engine(max_model_len=512, device_cache_bytes=100 * PAGE) as engine:
        wanted = [alone(engine, segments, "off") for segments in asked]
        batch = Batch(engine)
        running = [batch.begin(segments, "off") for segments in asked]
        pack = pack_pieces(
            engine._device.model,
            batch.pool,
            [Piece(one.job, 0, len(one.job.offsets)) for one in running],
            max_rows=1024,
        )
        pack.run_layer()
        pack.drop(running[1].job)
        while not pack.is_done:
            pack.run_layer()
        jobs, logits = pack.logits()
        assert jobs == [running[0].job, running[2].job]
        batch.append_sampled([running[0], running[2]], logits)
        assert [running[0].tokens[0], running[2].tokens[0]] == [wanted[0][0][0], wanted[2][0][0]]
        for one in running:
            pack.drop(one.job)
        assert pack.is_done


class Steered:
    """Contexts of a request that fail at one layer, if at any; notes the layers that were taken."""

    waited_s, loaded_bytes = 0.0, 0

    def __init__(self, contexts, failing=None):
        self.contexts, self.failing, self.taken = contexts, failing, []

    def is_ready(self, layer):
        return self.contexts.is_ready(layer)

    def take(self, layer):
        if layer == self.failing:
            raise OSError("the disk went away")
        assert layer not in self.taken, "it would wait for ever"
        self.taken.append(layer)
        return self.contexts.take(layer)


def test_failed_load_fails_only_its_own_request():
    random = np.random.default_rng(10)
    segments = draw_segments(random, [40, 30])
    orders = [[1, 0], [0, 1], [1, 0]]
    with (
        MODEL.engine(strategy="reuse") as host,
        MODEL.engine(max_model_len=512, device_cache_bytes=100 * PAGE) as other,
    ):
        alone(host, segments)
        object.__setattr__(host.config, "read_only", True)
        wanted = [alone(host, permuted(segments, order)) for order in orders]
        batch = Batch(host, other._device.pool)
        running = [batch.begin(permuted(segments, order)) for order in orders]
        for number, one in enumerate(running):
            assert not one.job.pages.shared and one.job.contexts is not None
            one.job.contexts = Steered(one.job.contexts, failing=1 if number == 1 else None)
        pack = pack_pieces(
            host._device.model, batch.pool, [Piece(one.job, 0, len(one.job.offsets)) for one in running], max_rows=1024
        )
        pack.run_layer()
        with pytest.raises(JobFailedError) as failure:
            pack.run_layer()
        assert failure.value.job is running[1].job and isinstance(failure.value.__cause__, OSError)
        pack.drop(failure.value.job)
        while not pack.is_done:
            pack.run_layer()
        _, logits = pack.logits()
        batch.append_sampled([running[0], running[2]], logits)
        layers = list(range(MODEL.config.num_layers))
        assert [one.job.contexts.taken for one in running] == [layers, [0], layers]
        assert [running[n].tokens[0] for n in (0, 2)] == [wanted[n][0][0] for n in (0, 2)]
        for one in running:
            batch.end(one)


def test_only_segments_without_recomputed_tokens_are_shared():
    settings = {"device_cache_bytes": 100 * PAGE, "strategy": "cachecraft", "recompute_ratio": 0.5}
    with MODEL.engine(max_model_len=512, **settings) as engine:
        segments = draw_segments(np.random.default_rng(9), [20, 30])
        alone(engine, segments)
        batch = Batch(engine)
        moved = batch.begin(permuted(segments, [1, 0]))
        chunks = {key: engine._device.pool.get(key) for key in moved.ticket.tiers}
        assert shared_segments(moved.job.plan, chunks) == moved.job.pages.shared == {0}
        assert shared_segments(moved.job.plan, {}) == frozenset()
        batch.end(moved)


@pytest.mark.parametrize("batch_tokens", [32, 1024])
def test_prompt_logits_equal_full_prefill_for_any_pieces(batch_tokens):
    segments = draw_segments(np.random.default_rng(3), [40, 30])
    tokens = [token for segment in segments for token in segment]
    settings = EngineConfig(max_model_len=512, max_num_batched_tokens=batch_tokens)
    with Engine(MODEL.loaded, settings) as engine:
        full = engine.prefill_logits(tokens)

        def last(count: int, **more) -> np.ndarray | None:
            sampling = SamplingParams(1, prompt_logits=count)
            return engine.run(Request(segments=segments, sampling=sampling, **more)).prompt_logits

        assert last(0) is None
        found = last(9)  # all of the question
        assert found is not None and found.shape == (9, 97)
        np.testing.assert_allclose(found, full[-9:], rtol=1e-4, atol=1e-4)
        assert np.abs(found - full[-10:-1]).max() > 0.1, "the tolerance tells the tokens apart"
        assert last(40).shape == (9, 97), "no more than the question has"
