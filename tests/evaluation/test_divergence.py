"""The first token's distribution comes nearer to full prefill's the more is recomputed, on random weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ccjax.engine import Request
from ccjax.engine.divergence import kl_divergence
from ccjax.requests import SamplingParams
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.oracles import llama_forward

MODEL = TinyModel(seed=11, num_hidden_layers=4)
RATIOS = (0.0, 0.2, 0.6, 1.0)
NUM_PROMPTS = 3


def first_logits(engine, segments, reuse="bounded"):
    response = engine.run(Request(segments=segments, sampling=SamplingParams(1, first_logits=True), reuse=reuse))
    assert response.first_logits is not None
    return response.first_logits


def test_first_token_logits_match_the_oracle():
    segments = draw_segments(np.random.default_rng(0), [40, 30])
    wanted = llama_forward(MODEL.weights, MODEL.raw, np.concatenate([np.asarray(one) for one in segments]))[0][-1]
    with MODEL.engine(max_model_len=512) as engine:
        got = first_logits(engine, segments, "off")
        assert got.dtype == np.float32 and not np.shares_memory(got, first_logits(engine, segments, "off"))
        several = SamplingParams(3, n=2, temperature=1.0, first_logits=True)
        answers = engine.run(Request(segments=segments, sampling=several, reuse="off"))
        plain = engine.run(Request(segments=segments, sampling=SamplingParams(3), reuse="off"))
    np.testing.assert_allclose(got, wanted, atol=3e-5)
    np.testing.assert_array_equal(answers.first_logits, got)
    assert plain.first_logits is None


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Prompts, the URL of a store with their passages, and the logits of full prefill in another order."""
    store = tmp_path_factory.mktemp("store").as_uri()
    prompts = [draw_segments(np.random.default_rng(seed), [60, 50, 40, 30]) for seed in range(NUM_PROMPTS)]
    with MODEL.engine(max_model_len=512, store=store) as engine:
        for segments in prompts:
            engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
            engine.generate_from_tokens(permuted(segments, [3, 1, 0, 2]), max_new_tokens=1, reuse="exact")
        full = [first_logits(engine, permuted(segments, [2, 0, 3, 1]), "off") for segments in prompts]
    return prompts, store, full


@pytest.mark.parametrize("strategy", ["auto", "cachecraft", "cacheblend", "legolink"])
def test_divergence_falls_as_recompute_ratio_grows(strategy, stored):
    prompts, store, full = stored
    means = []
    for ratio in RATIOS:
        settings = {"strategy": strategy, "recompute_ratio": ratio, "focus_window": None, "read_only": True}
        with MODEL.engine(max_model_len=512, store=store, **settings) as engine:
            reused = [first_logits(engine, permuted(segments, [2, 0, 3, 1])) for segments in prompts]
        means.append(np.mean([kl_divergence(own, other) for own, other in zip(full, reused, strict=True)]))
    assert all(less < more for more, less in itertools.pairwise(means)), means
    assert means[-1] < 1e-6 < means[-2]
