"""What is learnt by computing a chunk behind a second prefix: each token's deviation, against the float64 oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig
from ccjax.engine.capture import capture_variants, context_deviations
from ccjax.engine.loading import load_model
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


def test_bfloat16_is_compared_in_float32():
    import ml_dtypes

    random = np.random.default_rng(4)
    own, other = (random.normal(size=(2, 2, 5, 3, 4)).astype(ml_dtypes.bfloat16) for _ in range(2))
    wanted = oracle_deviations(own.astype(float), other.astype(float))
    np.testing.assert_allclose(context_deviations(own, other), wanted, rtol=6e-3)


def documents(count):
    return [
        {"id": str(number), "text": f"{name} sings in the {name} choir."} for number, name in enumerate(NAMES[:count])
    ]


NAMES = ("Anna", "Bob", "Carla")


def test_warming_compares_each_document_with_itself_behind_another(demo):
    with Engine(demo, EngineConfig(strategy="auto")) as engine:
        assert [one.status for one in engine.warm(documents(3))] == ["computed"] * 3
        metas = [meta for meta in engine._variants if len(meta.prefix_ids) == 1]
        assert len(metas) == 3 and engine.num_variants == 4, "what it is compared with is not stored"
        for number, meta in enumerate(metas):
            neighbour = metas[number - 1 if number else 1]
            prompt = engine._variants.prompt_of(meta)
            beside = dataclasses.replace(
                prompt, chunks=(prompt.chunks[0], engine._variants.tokens.chunk(neighbour.chunk_id), prompt.chunks[1])
            )
            own, other = (kv_of(engine, one) for one in (prompt, beside))
            np.testing.assert_array_equal(meta.token_deviations, context_deviations(own, other))
            # Its KV saw nothing of the neighbour: an erasure of that one leaves it alone.
            assert engine._variants.origin(meta).seen == {*meta.prefix_ids, meta.chunk_id}
        assert not engine._store._pins


def kv_of(engine, prompt):
    """Keys before RoPE and values of the last chunk, from a full prefill."""
    plan = engine._prefill.plan(prompt, "exact", {})
    result = engine._prefiller.run(prompt.token_ids, plan, collect=True)
    *_, (_, kv) = capture_variants(plan, result, {}, None)
    return kv


@pytest.mark.parametrize(
    ("settings", "arguments", "count"),
    [
        ({"strategy": "cachecraft"}, {}, 0),
        ({"strategy": "cachecraft"}, {"compare": True}, 3),
        ({"strategy": "deviation"}, {}, 3),
        ({"strategy": "auto"}, {"compare": False}, 0),
        ({"strategy": "auto", "max_model_len": 40}, {}, 0),  # two documents do not fit
    ],
)
def test_warming_compares_where_the_strategy_goes_by_it(demo, settings, arguments, count):
    with Engine(demo, EngineConfig(**settings)) as engine:
        engine.warm(documents(3), **arguments)
        assert sum(bool(meta.token_deviations) for meta in engine._variants) == count


def test_a_single_document_has_nothing_to_be_compared_with(demo):
    with Engine(demo, EngineConfig(strategy="auto")) as engine:
        engine.warm([*documents(1), *documents(1)])
        assert not any(meta.token_deviations for meta in engine._variants)


@pytest.fixture(scope="module")
def demo():
    return load_model("demo", dtype="float32")
