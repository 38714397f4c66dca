"""Scores of given answers: by hand, and logits against a forward pass of the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.evaluation import forced
from ccjax.requests import Request, Response
from ccjax.types import ReuseReport
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments
from tests.oracles import llama_forward

MODEL = TinyModel(seed=11, num_hidden_layers=2)
REPORT = ReuseReport("off", "full", 1, 1, 0, 0, 1.0, True)
FULL = np.log([[0.6, 0.4], [0.2, 0.8]])
OWN = np.log([[0.3, 0.7], [0.2, 0.8]])


def test_kl_and_agreement_are_means_over_tokens():
    kl = 0.6 * np.log(0.6 / 0.3) + 0.4 * np.log(0.4 / 0.7)  # of the first token; the second has none
    assert forced.mean_kl(FULL, OWN) == pytest.approx(kl / 2)
    assert forced.mean_kl(OWN, FULL) != pytest.approx(kl / 2, rel=0.01), "full prefill's probabilities weigh"
    assert forced.mean_kl(FULL + 3.0, OWN - 2.0) == pytest.approx(kl / 2), "logits need not be normalized"
    assert forced.agreement(FULL, OWN) == 0.5 and forced.agreement(FULL, FULL) == 1.0


def test_nll_is_the_mean_over_answer_tokens():
    assert forced.nll(FULL + 7.0, [0, 1]) == pytest.approx(-(np.log(0.6) + np.log(0.8)) / 2)
    assert forced.nll(FULL, [1, 0]) == pytest.approx(-(np.log(0.4) + np.log(0.2)) / 2)


@pytest.mark.parametrize(
    ("token_ids", "finish", "wanted"), [((5, 6), "length", (5, 6)), ((5, 6), "stop", (5, 6, 9)), ((), "stop", (9,))]
)
def test_end_token_counts_as_part_of_the_answer(token_ids, finish, wanted):
    assert forced.drawn_tokens(Response("", token_ids, finish, REPORT, 1, 0.1, 0.1), 9) == wanted


@pytest.mark.parametrize(("reuse", "system"), [("off", 7), ("bounded", 0)])
def test_forced_logits_match_the_oracle_for_any_prompt_chunking(reuse, system):
    prompt, answer = draw_segments(np.random.default_rng(2), [40, 30], system=system), [3, 1, 4, 1, 5]
    token_ids = [token for segment in prompt for token in segment]
    wanted = llama_forward(MODEL.weights, MODEL.raw, np.asarray([*token_ids, *answer]))[0]
    first = len(token_ids) - 1
    for settings in ({}, {"max_num_batched_tokens": 32}):
        with MODEL.engine(max_model_len=512, **settings) as engine:
            got = forced.forced_logits(engine, Request(segments=prompt, reuse=reuse), answer)
            one = forced.forced_logits(engine, Request(segments=prompt, reuse=reuse), [9])
        np.testing.assert_allclose(got, wanted[first:-1], atol=TOLERANCE)
        assert np.abs(got - wanted[first + 1 :]).max() > 100 * TOLERANCE, "a row later would be another token's"
        np.testing.assert_allclose(one, wanted[first : first + 1], atol=TOLERANCE)


def test_empty_answer_is_rejected():
    with (
        MODEL.engine(max_model_len=512) as engine,
        pytest.raises(ValueError, match="answer: wanted at least one token"),
    ):
        forced.forced_logits(engine, Request(segments=draw_segments(np.random.default_rng(2), [20])), [])
