"""An engine with an 8-bit store: reports call its copies approximate, mode `exact` never uses them, exact KV replaces
them."""

import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig, Request, Response, SamplingParams
from ccjax.evaluation.towns import KINDS, held_out_contexts
from ccjax.loading.model import load_model
from ccjax.store.tiered import TieredStore
from ccjax.types import ReuseMode, ReuseReport
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer, assert_same
from tests.engine.test_maintenance import approximate, repair_all

MODEL = TinyModel(seed=8)
SEGMENTS = draw_segments(np.random.default_rng(8), [40, 30, 50])
NUM_STORED = sum(map(len, SEGMENTS[:-1]))


@pytest.fixture
def url(tmp_path):
    """An int8 store with system prompt and passages."""
    url = f"file://{tmp_path}/store"
    with MODEL.engine(store=url, disk_kv_dtype="int8") as engine:
        report = ask(engine)
        assert report.exact and report.computed_tokens == report.prompt_tokens
        again = ask(engine)
        assert again.exact and again.reused_tokens == NUM_STORED  # the exact copies in host memory
    return url


def ask(engine, segments=SEGMENTS, reuse="bounded") -> ReuseReport:
    return engine.generate_from_tokens(segments, max_new_tokens=1, reuse=reuse).reuse


def lossy(engine):
    return {meta.variant_id for meta in engine._chunks.variants if engine._chunks.store.is_lossy(meta.variant_id)}


@pytest.mark.parametrize("host_bytes", [1, 1 << 30])
def test_reuse_after_a_restart_is_approximate_and_reported_as_such(url, host_bytes):
    with MODEL.engine(store=url, disk_kv_dtype="int8", host_cache_bytes=host_bytes) as engine:
        assert len(lossy(engine)) == engine.cache.num_variants == 4
        plain = answer(engine, SEGMENTS, "off")
        for _ in range(2):  # from disk, then from host memory if there is any
            reused = answer(engine, SEGMENTS, "bounded")
            report = reused[2]
            assert not report.exact and not any(document.exact for document in report.per_document)
            assert report.reused_tokens == NUM_STORED and report.recomputed_tokens == 0 and report.failed_loads == 0
            difference = max(abs(a - b) for a, b in zip(reused[1], plain[1], strict=True))
            assert TOLERANCE < difference < 0.1
            assert len(lossy(engine)) == engine.cache.num_variants == 4


@pytest.mark.parametrize("host_bytes", [1, 1 << 30])
def test_exact_mode_still_equals_full_prefill(url, host_bytes):
    with MODEL.engine(store=url, disk_kv_dtype="int8", host_cache_bytes=host_bytes) as engine:
        for segments in (SEGMENTS, permuted(SEGMENTS, [1, 0, 2]), SEGMENTS):
            answer(engine, segments, "bounded")  # promotes lossy copies
            exact = answer(engine, segments, "exact")
            assert_same(exact, answer(engine, segments, "off"))
            assert exact[2].exact


def test_kv_computed_in_exact_mode_replaces_lossy_copies_once(url, monkeypatch):
    stored = []
    put = TieredStore._put
    monkeypatch.setattr(TieredStore, "_put", lambda *args, **kwargs: stored.append(1) or put(*args, **kwargs))
    with MODEL.engine(store=url, disk_kv_dtype="int8") as engine:
        ask(engine)
        assert len(lossy(engine)) == 4 and len(stored) == 4  # promoted
        before = {meta.variant_id: meta.frequency_reuse for meta in engine._chunks.variants}
        written = engine.cache.usage()["disk"].writes
        report = ask(engine, reuse="exact")
        assert report.computed_tokens == report.prompt_tokens and len(stored) == 8
        assert lossy(engine) == set() and engine.cache.num_variants == 4
        assert {meta.variant_id: meta.frequency_reuse for meta in engine._chunks.variants} == before
        for reuse in ("exact", "bounded"):
            report = ask(engine, reuse=reuse)
            assert report.exact and report.reused_tokens == NUM_STORED and len(stored) == 8
        assert engine.cache.usage()["disk"].writes == written  # the disk already has its copy
        assert not engine._chunks.store._pins


def test_lossy_variants_are_not_recaptured_without_room(url):
    with MODEL.engine(store=url, disk_kv_dtype="int8", host_cache_bytes=1) as engine:
        for reuse in ("exact", "bounded", "exact"):
            ask(engine, reuse=reuse)
            assert engine.cache.num_variants == 4 and len(lossy(engine)) == 4
        engine.cache.flush()
        assert engine.cache.usage()["disk"].writes == 0 and not engine.cache.repair_one()


def test_replacing_lossy_copies_at_max_variants_evicts_nothing(url):
    with MODEL.engine(store=url, disk_kv_dtype="int8", max_variants=4) as engine:
        assert ask(engine, reuse="exact").reused_tokens == 0
        assert engine.cache.num_variants == 4 and lossy(engine) == set()
        assert ask(engine, reuse="exact").reused_tokens == NUM_STORED


def test_lossy_copies_alone_are_not_repaired_in_idle_time(url):
    with MODEL.engine(store=url, disk_kv_dtype="int8") as engine:
        ask(engine)
        assert not engine.cache.repair_one() and len(lossy(engine)) == 4


def test_new_chunk_behind_lossy_copies_is_approximate_until_repaired(url):
    new = [*SEGMENTS[:2], [5] * 20, SEGMENTS[-1]]
    with MODEL.engine(store=url, disk_kv_dtype="int8") as engine:
        report = ask(engine, new)
        assert not report.exact and [document.computed_tokens for document in report.per_document] == [0, 0, 20]
        assert len(approximate(engine)) == 1
        ask(engine, new)
        assert engine.cache.num_variants == 5 and len(approximate(engine)) == 1
        assert repair_all(engine) == 1 and approximate(engine) == []
        # system prompt and first passage were computed for it, so they are exact in memory from now on
        plain, reused = answer(engine, new, "off"), answer(engine, new, "bounded")
        assert_same(reused, plain)
        assert reused[2].exact and reused[2].reused_tokens == len(new[0]) + len(new[1]) + 20


def test_repair_from_a_lossy_copy_is_stored_once_as_approximate(url):
    shuffled = permuted(SEGMENTS, [2, 1, 0])
    with MODEL.engine(store=url, disk_kv_dtype="int8") as engine:
        first = ask(engine, shuffled)
        assert not first.exact and first.recomputed_tokens > 0
        assert len(approximate(engine)) == 3
        again = ask(engine, shuffled)
        assert not again.exact and again.recomputed_tokens == 0 and engine.cache.num_variants == 7
        repair_all(engine)
        assert_same(answer(engine, shuffled, "bounded"), answer(engine, shuffled, "off"))


def evict_between_plan_and_load(engine: Engine, monkeypatch) -> list:
    """Evicts the copies in host memory after the first plan is made, as other threads may do; returns the plans."""
    plans, plan = [], engine._chunks.planner.plan

    def plan_then_evict(*args):
        plans.append(plan(*args))
        if len(plans) == 1:
            assert engine._chunks.store.evict("host", [meta.variant_id for meta in engine._chunks.variants])
        return plans[-1]

    monkeypatch.setattr(engine._chunks.planner, "plan", plan_then_evict)
    return plans


@pytest.mark.parametrize("reuse", ["exact", "bounded"])
def test_request_is_replanned_if_an_exact_copy_is_evicted_before_its_load(tmp_path, monkeypatch, reuse):
    with MODEL.engine(store=f"file://{tmp_path}/store", disk_kv_dtype="int8") as engine:
        plain = answer(engine, SEGMENTS, "off")
        ask(engine)
        engine.cache.flush()
        assert lossy(engine) == set()
        plans = evict_between_plan_and_load(engine, monkeypatch)
        got = answer(engine, SEGMENTS, reuse)
        assert len(plans) == 2 and not engine._chunks.store._pins
        if reuse == "exact":
            assert_same(got, plain)
            assert got[2].exact and got[2].reused_tokens == 0
        else:
            assert not got[2].exact and got[2].reused_tokens == NUM_STORED


def test_full_precision_engine_reads_int8_kv_and_replaces_it_when_computed(url):
    with MODEL.engine(store=url) as engine:
        assert len(lossy(engine)) == 4 and not ask(engine).exact
        wanted = answer(engine, SEGMENTS, "exact")
        assert wanted[2].exact and lossy(engine) == set()
    with MODEL.engine(store=url, host_cache_bytes=1) as engine:
        assert lossy(engine) == set()
        again = answer(engine, SEGMENTS, "exact")
        assert_same(again, wanted)
        assert again[2].reused_tokens == NUM_STORED


def test_demo_model_answers_nearly_the_same_from_int8(tmp_path):
    """Two questions, with passages from an int8 store after a restart."""
    contexts = [context for kind in KINDS[:2] for context in held_out_contexts(kind, 1)]
    settings = {"store": f"file://{tmp_path}/store", "disk_kv_dtype": "int8", "focus_window": None}
    model = load_model("demo", dtype="float32")

    def answers(engine: Engine, reuse: ReuseMode) -> list[Response]:
        return [
            engine.run(
                Request(
                    messages=[{"role": "user", "content": context.questions[0].text}],
                    documents=context.passages,
                    sampling=SamplingParams(max_new_tokens=6, logprobs=0),
                    reuse=reuse,
                )
            )
            for context in contexts
        ]

    with Engine(model, EngineConfig(**settings)) as engine:
        plain = answers(engine, "off")
        answers(engine, "exact")
    with Engine(model, EngineConfig(**settings, read_only=True)) as engine:
        bounded, exact = answers(engine, "bounded"), answers(engine, "exact")
    for full, near, same in zip(plain, bounded, exact, strict=True):
        assert near.token_ids == full.token_ids and same.token_ids == full.token_ids
        assert near.reuse.reused_tokens > 0 and near.reuse.recomputed_tokens == 0 and not near.reuse.exact
        assert same.reuse.exact
        first = abs(near.logprobs[0].logprob - full.logprobs[0].logprob)
        assert 0 < first < 0.005  # measured at most 0.0009 over 100 questions
