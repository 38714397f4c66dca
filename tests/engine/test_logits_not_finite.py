"""A request whose logits are not finite ends with an error, stores nothing, and leaves others as they are."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import numpy as np
import pytest

from ccjax import Request, SamplingParams
from ccjax.errors import LogitsError
from ccjax.prompts import chunk_id
from tests.engine.helpers import TinyModel, draw_segments

DAMAGED = 96


def damaged_model(value: float) -> TinyModel:
    """A model in which one token's embedding is damaged, but not its row of the output layer."""
    model = TinyModel(seed=4, tie_word_embeddings=False)
    params = model.loaded.params
    damaged = params.replace(embedding=params.embedding.at[DAMAGED].set(value))
    model.loaded = dataclasses.replace(model.loaded, params=damaged)
    return model


def segments_of(seed: int) -> list[list[int]]:
    return draw_segments(np.random.default_rng(seed), (40, 50), vocab=DAMAGED)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("reuse", ["bounded", "exact"])
def test_only_the_request_with_the_damaged_token_fails(value, reuse):
    good = [segments_of(seed) for seed in range(3)]
    bad = [segments_of(10), segments_of(11)]
    bad[0][1][7] = DAMAGED
    bad[1][-1][3] = DAMAGED
    with damaged_model(value).engine() as engine, concurrent.futures.ThreadPoolExecutor(5) as threads:
        requests = [Request(segments=one, sampling=SamplingParams(12), reuse=reuse) for one in (*bad, *good)]
        alone = [Request(segments=one, sampling=SamplingParams(12), reuse="off") for one in good]
        wanted = [engine.run(request).token_ids for request in alone]
        runs = [threads.submit(engine.run, request) for request in requests]
        for run in runs[:2]:
            with pytest.raises(LogitsError, match="token 0 of the answer are not finite"):
                run.result()
        if reuse == "exact":
            assert [run.result().token_ids for run in runs[2:]] == wanted
        for run in runs[2:]:
            assert len(run.result().token_ids) == 12
        again = [engine.run(request) for request in alone]  # over pages that held what is not finite
        assert [response.token_ids for response in again] == wanted
        with pytest.raises(LogitsError):
            engine.run(requests[0])
        stored = set(engine._chunks.variants.chunk_ids())
        assert {chunk_id(segment) for segment in good[0][:-1]} <= stored
        assert not {chunk_id(segment) for one in bad for segment in one if DAMAGED in segment} & stored
