"""Which tokens draw attention, for the baseline that recomputes those (H2O, Zhang et al. 2023).

Serving's attention says what a query looks at, not what looks at a key; so a prompt is run once more, with attention
written out. Only engines of strategy `h2o` pay for that.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ccjax.models.llama3.steps import embed_step, received_step
from ccjax.models.lockstep import fetch
from ccjax.runner.buckets import token_bucket
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.plan_rows import padded_to
from ccjax.types import VariantMeta


def received_mass(model: DeviceModel, token_ids: np.ndarray) -> np.ndarray:
    """Softmax mass [n], float64, that each token of a prompt draws from all its tokens, mean over layers and heads."""
    count = len(token_ids)
    x = embed_step(model.top, padded_to(token_ids, token_bucket(count), 0))
    total = np.zeros(count)
    for layer in model.params.layers:
        x, received = received_step(layer, x, np.int32(count), config=model.config)
        total += fetch(received).astype(np.float64)[:count]
    return total / len(model.params.layers)


def with_received(meta: VariantMeta, received: np.ndarray) -> VariantMeta:
    """The variant with what its tokens drew, to three digits."""
    return dataclasses.replace(meta, token_received=tuple(float(f"{value:.3g}") for value in received))
