"""RoPE in float64, from its definition."""

from __future__ import annotations

import numpy as np


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`x` [T, A, H] with each pair (x[i], x[i + H/2]) turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.multiply.outer(positions, frequencies))[:, None, :]
    return np.concatenate([turned.real, turned.imag], -1)
