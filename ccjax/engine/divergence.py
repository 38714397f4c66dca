"""The divergence between two distributions over tokens."""

from __future__ import annotations

import numpy as np


def kl_divergence(full: np.ndarray, other: np.ndarray) -> float:
    """KL(full || other) in nats between the softmax distributions of two rows of logits [V]; 0 for equal ones.

    Raises:
      ValueError: they are not two rows of equal length.
    """
    if full.shape != other.shape or full.ndim != 1:
        raise ValueError(f"full, other: wanted two rows of logits of one length, got {full.shape} and {other.shape}")
    own, theirs = log_softmax(full), log_softmax(other)
    return max(0.0, float((np.exp(own) * (own - theirs)).sum()))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities [V], float64, of a row of logits."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
