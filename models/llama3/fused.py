"""Matrices with the same input as one, so that a product reads it once: queries, keys and values; gate and up.

Not on several devices: the heads that each takes would not be adjacent.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from ccjax.models.llama3.params import LayerParams, Params, RoutedLayerParams
from ccjax.models.llama3.quantized import QuantizedWeight, Weight


def fuse(params: Params) -> Params:
    """The weights with these matrices joined, except gate and up of experts. Those of `params` are deleted: in memory
    besides are the matrices of one layer."""
    return dataclasses.replace(params, layers=tuple(_fused(layer) for layer in params.layers))


def unfuse(params: Params) -> Params:
    """The weights with every matrix by itself."""
    return dataclasses.replace(params, layers=tuple(_unfused(layer) for layer in params.layers))


def _fused(layer: LayerParams) -> LayerParams:
    if layer.wk is None or layer.wv is None:
        return layer
    layer = dataclasses.replace(layer, wq=_joined([layer.wq, layer.wk, layer.wv]), wk=None, wv=None)
    if layer.w_up is None or isinstance(layer, RoutedLayerParams):
        return layer
    return dataclasses.replace(layer, w_gate=_joined([layer.w_gate, layer.w_up]), w_up=None)


def _unfused(layer: LayerParams) -> LayerParams:
    if layer.wk is None:
        num_heads = layer.wo.shape[0]
        num_kv_heads = (layer.wq.shape[1] - num_heads) // 2
        wq, wk, wv = _parts(layer.wq, [num_heads, num_kv_heads, num_kv_heads])
        layer = dataclasses.replace(layer, wq=wq, wk=wk, wv=wv)
    if layer.w_up is None:
        w_gate, w_up = _parts(layer.w_gate, [layer.w_down.shape[0]] * 2)
        layer = dataclasses.replace(layer, w_gate=w_gate, w_up=w_up)
    return layer


def _joined(weights: Sequence[Weight]) -> Weight:
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return _concatenated([weight for weight in weights if isinstance(weight, Array)], 1)
    values = _concatenated([weight.values for weight in quantized], 1)
    return QuantizedWeight(values, _concatenated([weight.scales for weight in quantized], 0))


def _concatenated(arrays: Sequence[Array], axis: int) -> Array:
    whole = jnp.concatenate(arrays, axis)
    for array in arrays:
        array.delete()
    return whole


def _parts(weight: Weight, sizes: Sequence[int]) -> list[Weight]:
    bounds = tuple(itertools.accumulate(sizes))[:-1]
    if not isinstance(weight, QuantizedWeight):
        return list(jnp.split(weight, bounds, 1))
    values, scales = jnp.split(weight.values, bounds, 1), jnp.split(weight.scales, bounds, 0)
    return [QuantizedWeight(*part) for part in zip(values, scales, strict=True)]
