"""Initial weights for training: random, except for a constructed induction head.

Every answer of the demo depends on an induction head (layer 0: look one token back; layer 1: find the token that
followed an earlier copy of this one). From random weights 1,500 steps learnt half of it over this vocabulary, and the
questions then stayed at guessing; with the constructed head it exists at step 0, and is trained like any other weight.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.models.llama3 import LlamaConfig, Params, init_params
from ccjax.models.llama3.layers import rope_frequencies

CONSTANT = 4.0
"""Axis 0 of every embedding: queries and keys need a component common to all tokens to attend by position alone."""
BACK_SHARPNESS = 6.0
MATCH_SHARPNESS = 4.0
COPY_STRENGTH = 3.0


def initial_params(config: LlamaConfig, seed: int) -> Params:
    """Random weights with embeddings of unit scale, compensated in the final norm, and the induction head.

    A tied embedding small enough for the logits would vanish in the residual stream under the layers' outputs.
    """
    key, carry_key, copy_key = jax.random.split(jax.random.key(seed), 3)
    params = init_params(config, key)
    width, head_dim = config.d_model, config.head_dim
    embedding = (params.embedding * width**0.5).at[:, 0].set(CONSTANT)
    first, second, *rest = params.layers
    carry, copy = (jax.random.normal(k, (width, head_dim)).at[0].set(0.0) for k in (carry_key, copy_key))
    carry, copy = carry * width**-0.5, copy * width**-0.5
    query, back = _look_back(config)
    first = dataclasses.replace(
        first,
        wq=first.wq.at[:, 0].set(0.0).at[0, 0].set(query),
        wk=first.wk.at[:, 0].set(0.0).at[0, 0].set(back),
        wv=first.wv.at[:, 0].set(carry),
        wo=first.wo.at[0].set(_orthonormal(carry_key, head_dim, width)),
    )
    second = dataclasses.replace(
        second,
        wq=second.wq.at[:, 0].set(MATCH_SHARPNESS * carry),
        wk=second.wk.at[:, 0].set(MATCH_SHARPNESS * _orthonormal(carry_key, head_dim, width).T),
        wv=second.wv.at[:, 0].set(copy),
        wo=second.wo.at[0].set(COPY_STRENGTH * copy.T * (width / head_dim)),
    )
    return dataclasses.replace(
        params, embedding=embedding, final_norm=params.final_norm * width**-0.5, layers=(first, second, *rest)
    )


def _orthonormal(key: jax.Array, rows: int, columns: int) -> jax.Array:
    """`rows` orthonormal rows, without axis 0."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, 1), (columns - 1, rows)))[0]
    return jnp.pad(basis.T, ((0, 0), (1, 0)))


def _look_back(config: LlamaConfig) -> tuple[np.ndarray, np.ndarray]:
    """Query and key of the constant axis; their score after RoPE, a sum of cos(f (distance - 1)), peaks one token back.

    Only the fast frequencies distinguish neighbours.
    """
    frequencies = np.asarray(rope_frequencies(config))
    weight = np.where(frequencies > 0.2, BACK_SHARPNESS, 0.0)
    query = np.concatenate([weight, np.zeros_like(weight)])
    key = np.concatenate([np.cos(frequencies), np.sin(frequencies)]) * (np.tile(weight, 2) > 0)
    return query.astype(np.float32), key.astype(np.float32)
