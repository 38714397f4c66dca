"""Where pages are kept on the device, whole pages are recomputed, and all others are read in place."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.config import EngineConfig
from ccjax.requests import Request, SamplingParams
from ccjax.runner import pages
from ccjax.runner.pool import PAGE_TOKENS
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer

MODEL = TinyModel(seed=23)
SEGMENTS = draw_segments(np.random.default_rng(23), [70, 64, 52, 85, 90, 40])
ORDERS = [0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]


def engine_with_known_deviations():
    """Each passage was computed behind two prefixes, so deviations choose what is recomputed."""
    engine = MODEL.engine(max_model_len=1024, device_cache_bytes=300 * MODEL.page_bytes)
    for order in ORDERS:
        answer(engine, permuted(SEGMENTS, order), "exact")
    engine._device.pool.reused_pages.clear()
    return engine


def test_runs_are_pages_where_pages_are_kept():
    config = EngineConfig(device_cache_bytes=1 << 30)
    assert config.planner_settings().run_tokens == PAGE_TOKENS
    assert config.replace(device_cache_bytes=0).planner_settings().run_tokens == 1


def stored(engine):
    pool = engine._device.pool
    variants = [meta.variant_id for meta in engine._chunks.variants]
    return {key: pool.get(key).read_layers(0, MODEL.config.num_layers) for key in variants if key in pool}


@pytest.mark.parametrize("order", [[3, 0, 5, 2, 4, 1], [2, 4, 4, 1]])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_pages_read_in_place_give_the_answers_of_copied_ones(order, num_answers, monkeypatch):
    sampling = SamplingParams(max_new_tokens=4, n=num_answers, logprobs=0)
    request = Request(segments=permuted(SEGMENTS, order), sampling=sampling)
    with engine_with_known_deviations() as engine:
        pool, before = engine._device.pool, stored(engine)
        got = engine.run(request)
        counted = dict(pool.reused_pages)
        after = stored(engine)
        assert before and before.keys() <= after.keys()
        for key, kv in before.items():
            np.testing.assert_array_equal(after[key], kv)
    with engine_with_known_deviations() as engine:
        fills = pages._fill_pages
        monkeypatch.setattr(pages, "_fill_pages", lambda segment: False)
        wanted = engine.run(request)
        assert engine._device.pool.reused_pages["copied"] > 0
        monkeypatch.setattr(pages, "_fill_pages", fills)
    for one, other in zip(got.choices, wanted.choices, strict=True):
        assert one.token_ids == other.token_ids
        values = [[token.logprob for token in choice.logprobs] for choice in (one, other)]
        np.testing.assert_allclose(*values, rtol=1e-4)
    assert got.reuse.recomputed_tokens == wanted.reuse.recomputed_tokens >= PAGE_TOKENS
    assert counted.get("copied", 0) == 0 and counted["in place"] > 3 * counted["recomputed"] > 0
