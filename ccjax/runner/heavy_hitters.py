"""Measures which tokens receive attention, for the baseline that recomputes those (H2O, Zhang et al. 2023).

The serving kernels return the mass of each query on the segments, not the mass received by each key, so the prompt is
run a second time with explicit attention matrices. Only engines of strategy `h2o` do this.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ccjax.models.llama3.steps import embed_step, received_step
from ccjax.runner.buckets import token_bucket
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.plan_rows import padded_to
from ccjax.types import VariantMeta


def received_mass(model: DeviceModel, token_ids: np.ndarray) -> np.ndarray:
    """Softmax mass [n], float64, that each token of a prompt receives from all tokens, averaged over layers and
    heads."""
    count = len(token_ids)
    x = embed_step(model.top, padded_to(token_ids, token_bucket(count), 0))
    total = np.zeros(count)
    for layer in model.params.layers:
        x, received = received_step(layer, x, np.int32(count), config=model.config)
        total += jax.device_get(received).astype(np.float64)[:count]
    return total / len(model.params.layers)


def with_received(meta: VariantMeta, received: np.ndarray) -> VariantMeta:
    """The variant's metadata with the mass that its tokens received, to three digits."""
    return dataclasses.replace(meta, token_received=tuple(float(f"{value:.3g}") for value in received))
