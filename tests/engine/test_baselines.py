"""Features for comparisons only, against the float64 oracle: keys at their old positions, and received mass."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.engine import Request
from ccjax.requests import SamplingParams
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted, selective_oracle
from tests.oracles import llama_forward, rope_frequencies, rotate

MODEL = TinyModel(seed=6, num_hidden_layers=3)
SEGMENTS = draw_segments(np.random.default_rng(0), [40, 30, 20])
ORDER = [2, 0, 1]
SHUFFLED = permuted(SEGMENTS, ORDER)


def flat(segments):
    return np.concatenate([np.asarray(one, int) for one in segments])


def cached(layers, *, moved: bool):
    """KV of the shuffled prompt as computed in the first order; NaN for the question. Keys that do not move are rotated
    back by the angle that the oracle adds by rotating them to their new positions."""
    starts = np.cumsum([0, *map(len, SEGMENTS)])
    new_starts = np.cumsum([0, *map(len, SHUFFLED)])
    old = [0, *(1 + index for index in ORDER)]
    found = []
    for layer in layers:
        keys, values = [], []
        for place, index in enumerate(old):
            rows = slice(starts[index], starts[index + 1])
            shift = 0 if moved else starts[index] - new_starts[place]
            key = layer.key[rows]
            keys.append(rotate(key, np.full(len(key), shift), rope_frequencies(MODEL.raw)))
            values.append(layer.value[rows])
        missing = np.full((len(SHUFFLED[-1]), *layer.key.shape[1:]), np.nan)
        found.append((np.concatenate([*keys, missing]), np.concatenate([*values, missing])))
    return found


def logits(moved: bool, ratio: float = 0.0):
    settings = {"strategy": "cachecraft", "focus_window": None, "recompute_ratio": ratio}
    with MODEL.engine(max_model_len=512, fixes_positions=moved, **settings) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1, reuse="exact")
        prompt = engine.assemble(Request(segments=SHUFFLED))
        plan = engine._chunks.planner.plan(prompt, "bounded", engine._chunks.planner.usable(prompt))
        response = engine.run(Request(segments=SHUFFLED, sampling=SamplingParams(1, first_logits=True)))
    assert response.first_logits is not None
    return response.first_logits, plan


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("moved", [True, False])
def test_four_cases_of_table_3_match_the_oracle(moved, ratio):
    got, plan = logits(moved, ratio)
    assert [segment.key_shift for segment in plan.segments] == ([0] * 5 if moved else [0, 70, -20, -20, 0])
    offsets = [segment.start + np.asarray(segment.recompute_offsets, int) for segment in plan.segments[:-1]]
    rows = np.concatenate([*offsets, np.arange(plan.segments[-1].start, plan.num_tokens)])
    assert (len(rows) > 9) == (ratio > 0)
    _, layers = llama_forward(MODEL.weights, MODEL.raw, flat(SEGMENTS))
    wanted, other = (
        selective_oracle(MODEL.weights, MODEL.raw, flat(SHUFFLED), cached(layers, moved=case), [rows] * 3)[0]
        for case in (moved, not moved)
    )
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    assert np.abs(got - other).max() > 100 * TOLERANCE


def test_h2o_recomputes_the_tokens_that_received_most_attention():
    with MODEL.engine(max_model_len=512, strategy="h2o", recompute_ratio=0.2) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1, reuse="exact")
        metas = {meta.num_tokens: meta for meta in engine._chunks.variants}
        prompt = engine.assemble(Request(segments=SHUFFLED))
        plan = engine._chunks.planner.plan(prompt, "bounded", engine._chunks.planner.usable(prompt))
        report = engine.generate_from_tokens(SHUFFLED, max_new_tokens=1).reuse
    assert report.recomputed_tokens == 8 + 6 + 4
    # The capture includes the question: mass that every token receives, mean over heads and layers.
    _, layers = llama_forward(MODEL.weights, MODEL.raw, flat(SEGMENTS))
    attention = np.stack([layer.attention for layer in layers])
    drew, start = attention.sum(2).mean((0, 1)), 0
    for segment in SEGMENTS[:-1]:
        own = drew[start : start + len(segment)]
        np.testing.assert_allclose(metas[len(segment)].token_received, own, rtol=6e-3)
        if start:
            chosen = next(one.recompute_offsets for one in plan.segments if one.num_tokens == len(segment))
            count = len(chosen)
            assert set(chosen) == set(np.argsort(-own)[:count].tolist())
        start += len(segment)
    early = attention[:, :, : len(flat(SEGMENTS)) - 9].sum(2).mean((0, 1))
    assert np.abs(early[:90] / drew[:90] - 1).max() > 6e-3, "the mutant: without the question's tokens"


def test_other_strategies_do_not_measure_received_attention():
    with MODEL.engine(max_model_len=512) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        assert not any(meta.token_received for meta in engine._chunks.variants)
        assert sorted(meta.start for meta in engine._chunks.variants) == [0, 7, 47, 77]
