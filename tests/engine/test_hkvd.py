"""CacheBlend's choice by deviation, layer by layer, against the slow float64 oracle; and its report."""

import concurrent.futures
import dataclasses

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.policy.scheduling import SequenceWork
from ccjax.runner.device import kv_spec_of
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import Pack, Piece
from ccjax.runner.pages import RequestPages
from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.runner.split_prompt import SplitPrompt
from tests.engine.helpers import TOLERANCE, Memory, TinyModel, draw_segments, loader, permuted, selective_oracle
from tests.engine.test_selective import MODEL, World, computed_offsets

SPEC = kv_spec_of(MODEL.config, "float32")
COUNTS = (141, 60, 60, 31, 9)
"""Segment s is reused unchanged; d, b, a and c are blended; n and the question are computed."""


def blended(world):
    plan = world.plan(1.0)
    return dataclasses.replace(plan, hkvd_counts_by_layer=COUNTS)


def run(world, plan, *, mutate=lambda kv: kv, max_rows=None):
    """Logits of the last token, and the job; in one pack, or split into packs of at most `max_rows`."""
    pool = DevicePool(SPEC, SPEC.num_bytes(40 * PAGE_TOKENS))
    model = MODEL.device_model()
    ticket = Memory(lambda variant, first, last: mutate(world.read_layers(variant, first, last)))
    with loader(model, plan, ticket) as contexts:
        job = PrefillJob(world.prompt, plan, RequestPages(pool, plan, {}), contexts=contexts)
        if max_rows is None:
            pack = Pack(model, pool, [Piece(job, 0, len(job.offsets))])
        else:
            pack = SplitPrompt(model, pool, job, max_rows=max_rows)
        while not pack.is_done:
            pack.run_layer()
        return np.asarray(pack.logits()[1])[0], job


def oracle(world, plan, counts=COUNTS):
    """The same by definition, with the rows of each layer."""
    is_candidate = np.zeros(plan.num_tokens, bool)
    for segment in plan.segments:
        is_candidate[segment.start + np.asarray(segment.recompute_offsets, int)] = True
    seen = []

    def choose(layer, rows, deviations):
        if layer == 0:
            assert deviations[is_candidate[rows]].max() < 1e-5, "keys and values of layer 0 depend on the token alone"
        ranked = sorted(np.flatnonzero(is_candidate[rows]), key=lambda index: -deviations[index])
        stays = ~is_candidate[rows]
        stays[ranked[: counts[layer]]] = True
        seen.append(rows[stays])
        return rows[stays]

    rows = computed_offsets(plan)
    logits, _ = selective_oracle(
        MODEL.weights, MODEL.raw, world.prompt, world.cached(), [rows] * len(counts), choose=choose
    )
    return logits, seen


def test_tokens_that_deviate_most_are_recomputed_and_the_rest_reused():
    world = World(seed=3)
    plan = blended(world)
    wanted, rows = oracle(world, plan)
    got, job = run(world, plan)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    assert job.result.computed_token_layers == sum(map(len, rows)) == sum(COUNTS) + 5 * (25 + 8)
    segment_of = job.segment_of[rows[1]]
    assert job.result.recomputed_tokens_of == {index: int((segment_of == index).sum()) for index in (1, 3, 4, 5)}
    assert sum(job.result.recomputed_tokens_of.values()) == COUNTS[1]
    assert job.result.partly_recomputed == {1, 3, 4, 5}
    # Mutants: one more token in one layer; slightly wrong keys, which change the deviations.
    assert np.abs(oracle(world, plan, (141, 60, 60, 32, 9))[0] - wanted).max() > 10 * TOLERANCE
    assert np.abs(run(world, plan, mutate=lambda kv: kv * 1.01)[0] - wanted).max() > 10 * TOLERANCE


def test_recomputing_all_candidates_equals_full_recompute():
    world = World(seed=4)
    plan = world.plan(1.0)
    wanted, _ = run(world, plan)
    got, job = run(world, dataclasses.replace(plan, hkvd_counts_by_layer=(141,) * 5))
    np.testing.assert_array_equal(got, wanted)
    assert job.result.recomputed_tokens_of == {1: 33, 3: 20, 4: 37, 5: 51}


@pytest.mark.parametrize("max_rows", [16, 50, 100, 173])
def test_tokens_of_a_prompt_longer_than_a_pack_are_chosen_among_all_of_it(max_rows):
    """174 tokens begin, 93 continue after the first choice; at 16 a pack, six of eleven packs are left, at 100 one."""
    world = World(seed=3)
    plan = blended(world)
    wanted, rows = oracle(world, plan)
    got, job = run(world, plan, max_rows=max_rows)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    assert job.result.computed_token_layers == sum(map(len, rows))
    segment_of = job.segment_of[rows[1]]
    assert job.result.recomputed_tokens_of == {index: int((segment_of == index).sum()) for index in (1, 3, 4, 5)}
    kept = np.setdiff1d(job.offsets, np.concatenate(job.result.not_recomputed))
    np.testing.assert_array_equal(kept, rows[1])
    for layer in range(len(COUNTS)):  # known before the layer runs, and what is compiled is chosen by it
        assert job.expected_rows(layer, rows[layer]).tolist() == [len(later) for later in rows[layer:]]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_engine_reports_the_tokens_it_recomputed(ratio):
    model = TinyModel(seed=2, num_hidden_layers=9)
    segments = draw_segments(np.random.default_rng(0), [60, 50, 40])
    shuffled = permuted(segments, [2, 1, 0])
    with model.engine(strategy="cacheblend", recompute_ratio=ratio, max_model_len=512) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=4)
        answer = engine.generate_from_tokens(shuffled, max_new_tokens=4)
        report = answer.reuse
        full = engine.generate_from_tokens(shuffled, max_new_tokens=4, reuse="off")
        again = engine.generate_from_tokens(shuffled, max_new_tokens=4)
    num_system, num_question = len(segments[0]), len(segments[-1])
    if ratio == 1.0:
        assert answer.token_ids == full.token_ids and report.computed_tokens == 150 + num_question
        return
    assert report.recomputed_tokens == pytest.approx(150 * ratio * 1.2, abs=2) and not report.exact
    assert report.reused_tokens == num_system + 150 - report.recomputed_tokens
    layers = 9 * num_question + (150 * (1 + 8 * ratio) if ratio else 0)
    assert report.computed_share == pytest.approx(layers / (9 * report.prompt_tokens), abs=0.02)
    assert again.reuse.recomputed_tokens == report.recomputed_tokens, "a blended chunk is not kept"
    assert sum(one.recomputed_tokens for one in report.per_document) == report.recomputed_tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "cacheblend", "recompute_ratio": 0.3},
        {"strategy": "cachecraft", "recompute_ratio": 0.6, "focus_window": 1},
    ],
    ids=str,
)
def test_prompt_longer_than_a_pack_gives_the_same_answer_and_report(settings):
    """Both rules drop tokens on the way. Another request is answered meanwhile."""
    model = TinyModel(seed=2, num_hidden_layers=9)
    segments = draw_segments(np.random.default_rng(0), [60, 50, 70, 40])
    shuffled, other = permuted(segments, [3, 2, 1, 0]), [segments[0], segments[-1]]
    seen = []
    for most in (1024, 48):
        with model.engine(max_model_len=512, max_num_batched_tokens=most, **settings) as engine:
            engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
            asked = [Request(segments=prompt, sampling=SamplingParams(24)) for prompt in (other, shuffled)]
            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                seen.append(list(threads.map(engine.run, asked)))
    (other_whole, whole), (other_split, split) = seen
    assert other_split.token_ids == other_whole.token_ids and split.token_ids == whole.token_ids
    wanted, got = dataclasses.asdict(whole.reuse), dataclasses.asdict(split.reuse)
    assert all(wanted[name] == got[name] for name in wanted if not name.endswith("_s"))
    assert whole.reuse.recomputed_tokens > 0
    assert (whole.reuse.focus_cut_layer is not None) == ("focus_window" in settings)


def test_recompute_share_is_what_loading_time_hides(monkeypatch):
    model = TinyModel(seed=2, num_hidden_layers=9)
    segments = draw_segments(np.random.default_rng(0), [60, 50, 40])
    shuffled = permuted(segments, [2, 1, 0])
    for settings, reuse, share in [
        ({}, "bounded", 0.5),
        ({}, "fast", 0.05),
        ({"recompute_ratio": 0.2}, "bounded", 0.2),
    ]:
        with model.engine(strategy="cacheblend", max_model_len=512, **settings) as engine:
            engine.generate_from_tokens(segments, max_new_tokens=1)
            monkeypatch.setattr(engine._chunks.planner.loads, "load_s", lambda plan, disk_bytes: 1.0)
            monkeypatch.setattr(engine.rates, "compute_s", lambda num_tokens: 2.0)
            report = engine.generate_from_tokens(shuffled, max_new_tokens=1, reuse=reuse).reuse
        assert report.recomputed_tokens == pytest.approx(150 * share * 1.2, abs=2)


def test_plan_driven_by_deviations_has_no_focus_cut_and_fixed_pieces():
    model = TinyModel(seed=2, num_hidden_layers=9)
    segments = draw_segments(np.random.default_rng(0), [60, 50, 40])
    for strategy, is_divisible in (("cacheblend", False), ("cachecraft", True)):
        with model.engine(strategy=strategy, max_model_len=512, recompute_ratio=0.2, focus_window=3) as engine:
            engine.generate_from_tokens(segments, max_new_tokens=1)
            prompt = engine.assemble(Request(segments=permuted(segments, [2, 1, 0])))
            plan = engine._chunks.planner.plan(prompt, "bounded", engine._chunks.planner.usable(prompt))
            assert dataclasses.replace(plan, focus_window=None).is_divisible == is_divisible
            assert (plan.focus_window is None) != is_divisible
            fixed = sum(plan.recomputed_tokens(segment) for segment in plan.segments)
            assert fixed == pytest.approx(150 * (1 + 8 * 0.2) / 9 if strategy == "cacheblend" else 150 * 0.2, abs=2)
            seen = []
            engine.rates.compute_s = seen.append
            engine._chunks.planner.loads._prefill_s(plan)
            computed = round(fixed + len(segments[-1]))
            assert seen == [computed]
            described = []
            engine._chunks.variants.describe_prefill = lambda *counts, described=described: described.append(counts)
            engine._chunks.capture._describe(plan)
            assert described == [(plan.num_tokens - computed, computed)]


def test_queue_counts_tokens_by_the_layers_they_run_through(monkeypatch):
    model, works = TinyModel(seed=2, num_hidden_layers=9), []
    segments = draw_segments(np.random.default_rng(0), [60, 50, 40])

    def work(*args, **fields):
        works.append(SequenceWork(*args, **fields))
        return works[-1]

    monkeypatch.setattr("ccjax.engine.batch.sequence.SequenceWork", work)
    with model.engine(strategy="cacheblend", max_model_len=512, recompute_ratio=0.2) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        engine.generate_from_tokens(permuted(segments, [2, 1, 0]), max_new_tokens=1)
    assert works[-1].prefill_tokens == 150 + len(segments[-1]), "rows of layer 0"
    assert works[-1].cached_tokens == pytest.approx(len(segments[0]) + 150 * (1 - (1 + 8 * 0.2) / 9), abs=2)
