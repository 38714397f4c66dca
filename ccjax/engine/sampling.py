"""Draws a token from logits: greedy, temperature, nucleus. Knows no model and no text."""

from __future__ import annotations

import numpy as np

from ccjax.engine.requests import SamplingParams
from models.llama3.sampling import GREEDY_BELOW


class Sampler:
    """Draws the tokens of one request; the same seed draws the same tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.default_rng(params.seed)

    def draw(self, logits: np.ndarray) -> int:
        """A token id from logits [V]; ties of greedy decoding go to the lowest id."""
        if self._params.temperature < GREEDY_BELOW:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        scaled = logits[order].astype(np.float64) / self._params.temperature
        weights = np.exp(scaled - scaled[0])
        cumulated = np.cumsum(weights / weights.sum())
        # Nucleus: the smallest set of likeliest tokens that reaches top_p; the likeliest one always stays.
        kept = int(np.searchsorted(cumulated, self._params.top_p)) + 1
        cumulated = cumulated[:kept] / cumulated[min(kept, len(cumulated)) - 1]
        return int(order[min(int(np.searchsorted(cumulated, self._random.random(), side="right")), len(cumulated) - 1)])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Log-softmax [V], float64, of logits [V]: the model's own distribution, before temperature and nucleus."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    return shifted - np.log(np.exp(shifted).sum())
