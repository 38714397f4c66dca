"""The sampler's distribution against softmax with temperature, cut to the nucleus; mutants would shift it by far."""

import numpy as np
import pytest

from ccjax.engine import SamplingParams
from ccjax.engine.sampling import Sampler, log_probabilities

LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 0.5], np.float32)


def nucleus(temperature, top_p):
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    weights /= weights.sum()
    kept = []
    for token in np.argsort(-weights):
        kept.append(token)
        if weights[kept].sum() >= top_p:
            break
    cut = np.zeros(5)
    cut[kept] = weights[kept] / weights[kept].sum()
    return cut


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.8, 1.0), (1.0, 0.8), (0.7, 0.5)])
def test_draws_follow_the_distribution(temperature, top_p):
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=top_p, seed=3))
    draws = np.bincount([sampler.draw(LOGITS) for _ in range(20_000)], minlength=5) / 20_000
    wanted = nucleus(temperature, top_p)
    # Three standard deviations of a share of 20,000 draws are 0.0106 at most.
    np.testing.assert_allclose(draws, wanted, atol=0.0106)
    assert not draws[wanted == 0].any()
    for other in (temperature**2 if temperature != 1.0 else 1.3, 1 / temperature if temperature != 1.0 else 0.8):
        assert np.abs(nucleus(other, top_p) - wanted).max() > 0.0106 or top_p < 1.0


def test_temperature_zero_and_almost_zero_take_the_likeliest():
    for temperature in (0.0, 1e-310, 1e-6):
        assert Sampler(SamplingParams(temperature=temperature)).draw(LOGITS) == 1


def test_log_probabilities_are_log_softmax():
    wanted = np.log(nucleus(1.0, 1.0))
    np.testing.assert_allclose(log_probabilities(LOGITS), wanted, atol=1e-12)
    np.testing.assert_allclose(log_probabilities(LOGITS * 1000)[1], 0.0, atol=1e-12)
