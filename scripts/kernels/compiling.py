"""Compiles kernel calls and whole layer steps for a described device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ccjax.models.llama3 import LLAMA3_8B, abstract_params
from ccjax.models.llama3.steps import layer_step
from scripts.kernels.cases import DecodeCase, KernelCase


def compile_case(
    attend: Callable[..., Any],
    case: KernelCase | DecodeCase,
    device: Any,
    platform: str,
    options: dict[str, Any] | None = None,
) -> Any:
    """The executable of one attention call for `device`."""

    def call(arrays: dict[str, jax.Array]) -> Any:
        return attend(**arrays, **case.statics())

    traced = jax.jit(call).trace(case.arrays(SingleDeviceSharding(device)))
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def compile_layer_step(
    implementation: str, case: KernelCase, device: Any, platform: str, options: dict[str, Any] | None = None
) -> tuple[Any, int]:
    """The engine's own step, one layer of Llama-3-8B with the case's sizes: its executable, and bytes of device memory.

    With fewer heads than the model's, the step is that of one chip of several, which holds that share of every weight;
    the sums over chips between the products are not part of it. The memory is that of a prefill: weights and context of
    all layers, embeddings, and what one step takes besides.
    """
    sharding = SingleDeviceSharding(device)
    share = LLAMA3_8B.num_heads // case.num_heads
    config = dataclasses.replace(
        LLAMA3_8B,
        num_layers=1,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        d_ff=LLAMA3_8B.d_ff // share,
    )

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = jax.tree.map(lambda x: array(*x.shape, dtype=jnp.bfloat16), abstract_params(config))
    layer = params.layers[0]
    arrays = case.arrays(sharding)
    traced = layer_step.trace(
        layer,
        array(case.num_queries, config.d_model, dtype=jnp.bfloat16),
        arrays["k"],
        arrays["v"],
        arrays["q_pos"],
        arrays["q_pos"],
        arrays["k_pos"],
        arrays["k_segment"],
        config=config,
        num_segments=case.num_segments,
        implementation=implementation,
        mesh=None,
    )
    executable = traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)
    used = executable.memory_analysis()
    if used is None:
        raise ValueError("the compiler gives no memory analysis of the layer step")
    kept = _num_bytes((layer, arrays["k"], arrays["v"]))
    step = used.argument_size_in_bytes - kept + used.temp_size_in_bytes
    step += used.output_size_in_bytes - used.alias_size_in_bytes
    embeddings = (_num_bytes(params) - _num_bytes(layer)) // share
    return executable, LLAMA3_8B.num_layers * kept + embeddings + step


def _num_bytes(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
