"""The policy equations in exact fractions, NumPy float64 and SciPy. Imports nothing from the project."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np


def beta(old: Sequence[str], inter: Sequence[float], new: Sequence[str]) -> Fraction:
    """CacheCraft eq. 6 in fractions; each new chunk matches only the first old occurrence that claims it."""
    left = list(new)
    common = Fraction(0)
    for chunk, mass in zip(old, inter, strict=True):
        if chunk in left:
            left.remove(chunk)
            common += Fraction(mass)
    total = sum(map(Fraction, inter), Fraction(0))
    return common / total if total else Fraction(0)


def gamma(old: Sequence[str], new: Sequence[str]) -> float:
    """CacheCraft eq. 7 for distinct chunks, from SciPy's tau: distance = (1 - tau) / 2."""
    from scipy.stats import kendalltau

    common = [chunk for chunk in old if chunk in new]
    if len(common) < 2:
        return 0.0
    tau: Any = kendalltau(range(len(common)), [new.index(chunk) for chunk in common])[0]
    return (1.0 - float(tau)) / 2.0


def cci(a: float, b: float) -> float:
    """CacheCraft eq. 11 with SciPy's logistic function."""
    from scipy.special import expit

    return float(expit(a / b))


def cfo(cci_value: float, beta_adjusted: float, alpha: float) -> Fraction:
    """CacheCraft eq. 12 in fractions, clipped."""
    return min(Fraction(1), Fraction(alpha) * Fraction(cci_value) * (1 - Fraction(beta_adjusted)))


def focused(mass: list[float], rule: str) -> set[int]:
    """CacheCraft alg. 1 l. 4-9 with every gap as candidate; SciPy's `entr` is -p ln p. For positive, distinct gaps."""
    from scipy.special import entr

    order = np.argsort(-np.asarray(mass), kind="stable")
    gaps = -np.diff(np.asarray(mass, np.float64)[order])
    p = gaps / gaps.sum()
    kept = int(np.argmax(entr(p) if rule == "entropy" else p)) + 1
    return {int(index) for index in order[:kept]}


def attention_weights(num_layers: int, num_tokens: int, seed: int) -> np.ndarray:
    """Random causal softmax weights [layer, query, key], float64: rows sum to 1, zeros above the diagonal."""
    scores = np.random.default_rng(seed).normal(size=(num_layers, num_tokens, num_tokens)) * 2.0
    scores[:, ~np.tri(num_tokens, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def inter(weights: np.ndarray, keys: range, queries: range) -> float:
    """CacheCraft eq. 3 for one layer's weights [query, key], as a double sum."""
    return float(sum(weights[q, k] for q in queries for k in keys))


def intra(weights: np.ndarray, tokens: range) -> float:
    """CacheCraft eq. 4 for one layer: strictly earlier tokens of the same chunk."""
    return float(sum(weights[q, k] for q in tokens for k in tokens if k < q))


def a_b_mean(weights: np.ndarray, chunks: list[range]) -> tuple[float, float]:
    """CacheCraft eq. 9-10 for the last chunk, in the paper's order: normalise in each layer, then average."""
    own = chunks[-1]
    a = [sum(inter(layer, keys, own) / (len(own) * len(keys)) for keys in chunks[:-1]) for layer in weights]
    b = [intra(layer, own) / len(own) ** 2 for layer in weights]
    return float(np.mean(a)), float(np.mean(b))
