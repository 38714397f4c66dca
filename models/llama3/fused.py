"""The weights of a model on one device as its steps multiply them: one row for each output, and matrices with the same
input as one (queries, keys and values; gate and up).

Not on several devices, where the outputs of one of them would not be adjacent, nor the matrices of experts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from ccjax.models.llama3.params import LayerParams, Params, RoutedLayerParams
from ccjax.models.llama3.quantized import LinearWeight, QuantizedWeight, Weight


def fuse(params: Params) -> Params:
    """The weights in this form. Those of `params` are deleted: in memory besides are some of one layer, or the head."""
    head = params.lm_head
    layers = tuple(_fused(layer) for layer in params.layers)
    return dataclasses.replace(params, layers=layers, lm_head=None if head is None else _joined(1, head))


def unfuse(params: Params) -> Params:
    """The weights with every matrix by itself and its axes as in the table of weights."""
    head = params.lm_head
    if isinstance(head, LinearWeight):
        (head,) = _parts(head, 1, [head.shape[1]])
    return dataclasses.replace(params, layers=tuple(_unfused(layer) for layer in params.layers), lm_head=head)


def _fused(layer: LayerParams) -> LayerParams:
    if layer.wk is not None and layer.wv is not None:
        wq, wo = _joined(1, layer.wq, layer.wk, layer.wv), _joined(2, layer.wo)
        layer = dataclasses.replace(layer, wq=wq, wk=None, wv=None, wo=wo)
    if layer.w_up is None or isinstance(layer, RoutedLayerParams):
        return layer
    w_gate, w_down = _joined(1, layer.w_gate, layer.w_up), _joined(1, layer.w_down)
    return dataclasses.replace(layer, w_gate=w_gate, w_up=None, w_down=w_down)


def _unfused(layer: LayerParams) -> LayerParams:
    if isinstance(layer.wq, LinearWeight) and isinstance(layer.wo, LinearWeight):
        num_heads = layer.wo.shape[0]
        num_kv_heads = (layer.wq.shape[1] - num_heads) // 2
        wq, wk, wv = _parts(layer.wq, 1, [num_heads, num_kv_heads, num_kv_heads])
        (wo,) = _parts(layer.wo, 2, [layer.wo.shape[2]])
        layer = dataclasses.replace(layer, wq=wq, wk=wk, wv=wv, wo=wo)
    if isinstance(layer.w_gate, LinearWeight) and isinstance(layer.w_down, LinearWeight):
        w_gate, w_up = _parts(layer.w_gate, 1, [layer.w_down.shape[0]] * 2)
        (w_down,) = _parts(layer.w_down, 1, [layer.w_down.shape[1]])
        layer = dataclasses.replace(layer, w_gate=w_gate, w_up=w_up, w_down=w_down)
    return layer


def _joined(num_inputs: int, *weights: Weight) -> Weight:
    """Weights with the same `num_inputs` first axes as one, with the outputs of all; they are deleted."""
    first = weights[0]
    if isinstance(first, LinearWeight):
        return first
    inputs, outputs = first.shape[:num_inputs], first.shape[num_inputs + 1 :]
    number = sum(weight.shape[num_inputs] for weight in weights)
    rows, scales = [], []
    for weight in weights:
        assert not isinstance(weight, LinearWeight)
        values = weight.values if isinstance(weight, QuantizedWeight) else weight
        rows.append(values.reshape(math.prod(inputs), -1).T)
        values.delete()
        if isinstance(weight, QuantizedWeight):
            scales.append(weight.scales.reshape(-1))
    return LinearWeight(jnp.concatenate(rows), jnp.concatenate(scales) if scales else None, (*inputs, number, *outputs))


def _parts(weight: LinearWeight, num_inputs: int, numbers: Sequence[int]) -> list[Weight]:
    """Weights with these numbers of outputs (first of their axes) of `weight`."""
    inputs, outputs = weight.shape[:num_inputs], weight.shape[num_inputs + 1 :]
    bounds = [number * math.prod(outputs) for number in itertools.accumulate(numbers)][:-1]

    def part(rows: Array, scales: Array | None) -> Weight:
        values = rows.T.reshape(*inputs, -1, *outputs)
        return values if scales is None else QuantizedWeight(values, scales.reshape(-1, *outputs))

    rows = jnp.split(weight.rows, bounds)
    scales = [None] * len(rows) if weight.scales is None else jnp.split(weight.scales, bounds)
    return [part(*one) for one in zip(rows, scales, strict=True)]
