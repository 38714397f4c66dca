"""What is learnt by computing a chunk behind a second prefix: each token's deviation, against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.engine.capture import context_deviations
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.oracles import llama_forward

MODEL = TinyModel(seed=4, num_hidden_layers=3)


def oracle_kv(segments, index):
    """Keys before RoPE and values [L, 2, T, K, H] of one segment."""
    tokens = np.concatenate([np.asarray(one, int) for one in segments])
    start = sum(map(len, segments[:index]))
    rows = slice(start, start + len(segments[index]))
    _, layers = llama_forward(MODEL.weights, MODEL.raw, tokens)
    return np.stack([np.stack([layer.key[rows], layer.value[rows]]) for layer in layers])


def oracle_deviations(own, other):
    distance = np.sqrt(((own - other) ** 2).sum((3, 4)))
    scale = np.sqrt((own**2).sum((3, 4)).mean(2, keepdims=True))
    return (distance / scale).mean((0, 1))


def metas(engine):
    return {(meta.chunk_id, meta.prefix_ids): meta for meta in engine._variants}


@pytest.fixture(params=[{}, {"device_cache_bytes": 8 << 20}], ids=["host", "device"])
def engine(request):
    with MODEL.engine(strategy="auto", max_model_len=512, **request.param) as engine:
        yield engine


def test_a_chunk_computed_behind_a_second_prefix_knows_how_its_tokens_deviate(engine):
    segments = draw_segments(np.random.default_rng(0), [40, 30, 20])
    shuffled = permuted(segments, [2, 0, 1])
    engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
    first = metas(engine)
    assert not any(meta.token_deviations for meta in first.values())
    engine.generate_from_tokens(shuffled, max_new_tokens=1, reuse="exact")
    measured = {key: meta for key, meta in metas(engine).items() if key not in first}
    assert len(measured) == 3
    by_length = {meta.num_tokens: meta.token_deviations for meta in measured.values()}
    for length, (before, after) in {40: (1, 2), 30: (2, 3), 20: (3, 1)}.items():
        own, other = oracle_kv(shuffled, after), oracle_kv(segments, before)
        wanted = oracle_deviations(own, other)
        np.testing.assert_allclose(by_length[length], wanted, rtol=6e-3)  # three digits are kept
        assert np.abs(oracle_deviations(other, own) / wanted - 1).max() > 6e-3  # the mutant: relative to the other


def test_deviations_choose_what_is_recomputed_and_survive_a_restart(tmp_path):
    segments = draw_segments(np.random.default_rng(1), [40, 30, 20])
    settings = {"strategy": "auto", "max_model_len": 512, "store": tmp_path.as_uri(), "recompute_ratio": 0.2}
    asked = permuted(segments, [1, 2, 0])
    with MODEL.engine(**settings) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
        engine.generate_from_tokens(permuted(segments, [2, 0, 1]), max_new_tokens=1, reuse="exact")
        known = metas(engine)
    with MODEL.engine(**settings, read_only=True) as engine:
        report = engine.generate_from_tokens(asked, max_new_tokens=1).reuse
        found = {key: meta.token_deviations for key, meta in metas(engine).items()}
    assert found == {key: meta.token_deviations for key, meta in known.items()} and any(found.values())
    assert report.recomputed_tokens == 8 + 6 + 4
    counts = {one.num_tokens: one.recomputed_tokens for one in report.per_document if one.role == "document"}
    assert sorted(counts) == [20, 30, 40] and counts != {40: 8, 30: 6, 20: 4}, "the budget is the prompt's"


def test_what_is_approximate_or_lossy_or_alone_is_not_compared(tmp_path):
    segments = draw_segments(np.random.default_rng(2), [40, 30])
    with MODEL.engine(strategy="auto", max_model_len=512, recompute_ratio=0.2) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        engine.generate_from_tokens(permuted(segments, [1, 0]), max_new_tokens=1)  # repaired: approximate
        assert {meta.fidelity for meta in engine._variants} == {"exact", "approx"}
        assert not any(meta.token_deviations for meta in engine._variants)
        repaired = 0
        while engine.repair_one():
            repaired += 1
        assert repaired and all(meta.fidelity == "exact" for meta in engine._variants)
        assert any(meta.token_deviations for meta in engine._variants), "idle time makes up for it"


def test_what_it_was_compared_with_had_a_part_in_it():
    """So that an erasure of a text takes all that was learnt by looking at it."""
    segments = draw_segments(np.random.default_rng(3), [40, 30, 20])
    with MODEL.engine(strategy="auto", max_model_len=512) as engine:
        engine.generate_from_tokens([segments[0], segments[2], segments[1], segments[-1]], max_new_tokens=1)
        engine.generate_from_tokens(
            [segments[0], segments[3], segments[1], segments[-1]], max_new_tokens=1, reuse="exact"
        )
        compared = [meta for meta in engine._variants if meta.token_deviations]
        assert len(compared) == 1 and compared[0].num_tokens == 40
        seen = engine._variants.origin(compared[0]).seen
        lengths = {len(engine._variants.tokens.chunk(key).token_ids) for key in seen}
        assert lengths == {7, 40, 20, 30}


def test_bfloat16_is_compared_in_float32():
    import ml_dtypes

    random = np.random.default_rng(4)
    own, other = (random.normal(size=(2, 2, 5, 3, 4)).astype(ml_dtypes.bfloat16) for _ in range(2))
    wanted = oracle_deviations(own.astype(float), other.astype(float))
    np.testing.assert_allclose(context_deviations(own, other), wanted, rtol=6e-3)
