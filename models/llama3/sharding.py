"""Tensor parallelism: the layout of the model's weights, keys and values on a mesh of devices (as in Megatron-LM).

Attention heads, the MLP's inner width and the vocabulary are split over all devices; hidden states are replicated. A
mesh has two axes: kv heads are split over the first and replicated over the second, whose size is 1 unless there are
more devices than kv heads. Query heads are on the devices of their kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import Params, ParamSpec, build_params
from ccjax.models.llama3.quantized import QuantizedWeight, Weight

_KV, _GROUP = "kv", "group"
_ALL = (_KV, _GROUP)
_SPLIT = {"heads": _ALL, "kv_heads": _KV, "ffn": _ALL, "vocab": _ALL}
"""Logical axis of a weight -> mesh axes; other axes are not split."""

HEADS = PartitionSpec(None, _ALL)
"""Queries [N, Q, H], and the output of attention for them."""

KV_ROWS = PartitionSpec(None, _KV)
"""Keys or values [N, K, H] of tokens."""

PAGES = PartitionSpec(_KV)
"""Keys or values [K, P, T, H] of a pool."""

VARIANT = PartitionSpec(None, None, None, _KV)
"""Keys and values [L, 2, N, K, H] of a chunk variant."""

EVERYWHERE = PartitionSpec()
ATTENTION_OUTPUT = (HEADS, HEADS, HEADS)
"""Layouts of the fields of `ccjax.kernels.attention.AttentionOutput`."""

Value = TypeVar("Value")


def make_mesh(config: LlamaConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh of a model over these devices, with two axes.

    Raises:
      ValueError: the model's heads or its MLP cannot be split evenly over them.
    """
    size = len(devices)
    for name, number in (("attention heads", config.num_heads), ("MLP columns", config.d_ff)):
        if size < 1 or number % size:
            raise ValueError(f"tensor_parallel_size: wanted a divisor of the model's {number} {name}, got {size}")
    if max(size, config.num_kv_heads) % min(size, config.num_kv_heads):
        raise ValueError(
            f"tensor_parallel_size: wanted a divisor or a multiple of the model's {config.num_kv_heads} kv heads, "
            f"got {size}"
        )
    num_kv = min(size, config.num_kv_heads)
    return Mesh(np.asarray(devices, object).reshape(num_kv, size // num_kv), _ALL)


def param_sharding(mesh: Mesh | AbstractMesh, spec: ParamSpec) -> NamedSharding:
    """Layout of a weight."""
    return axes_sharding(mesh, spec.axes, spec.shape)


def axes_sharding(mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Layout of an array with these axis names, as in the table of weights; None for an unsplit axis. The vocabulary is
    replicated if the number of devices does not divide it."""
    split = [
        None if axis is None or (axis == "vocab" and length % mesh.size) else _SPLIT.get(axis)
        for axis, length in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*split))


def shard_params(params: Params, config: LlamaConfig, mesh: Mesh) -> Params:
    """The weights, laid out over the mesh."""

    def place(spec: ParamSpec, leaf: Weight) -> Weight:
        if isinstance(leaf, QuantizedWeight):
            assert spec.scales is not None
            scales = jax.device_put(leaf.scales, param_sharding(mesh, spec.scales))
            return QuantizedWeight(jax.device_put(leaf.values, param_sharding(mesh, spec)), scales)
        return jax.device_put(leaf, param_sharding(mesh, spec))

    specs = build_params(config, lambda _, spec: spec)
    return jax.tree.map(place, specs, params, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def mesh_of(params: Params) -> Mesh | None:
    """The mesh of the weights; None for a single device."""
    sharding = params.embedding.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def num_kv_shards(mesh: Mesh | AbstractMesh) -> int:
    """Number of devices that the kv heads are split over; they are replicated on the others."""
    return mesh.shape[_KV]


def placement(mesh: Mesh | None, spec: PartitionSpec) -> NamedSharding | None:
    """The sharding of an array of that layout, for `jax.device_put`; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, spec)


def constrain(value: Value, mesh: Mesh | None, spec: PartitionSpec) -> Value:
    """Constrains `value` inside a jitted step to the layout `spec`."""
    return value if mesh is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def over_heads(
    function: Callable[..., Value], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Value]:
    """Runs `function` on each device with its own heads; needed for kernels, which the compiler cannot split."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
