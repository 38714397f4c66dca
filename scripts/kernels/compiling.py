"""Compiles attention calls and whole layer steps for a described device. Knows no chip's name and reads no figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from models.llama3 import LLAMA3_8B, abstract_params
from models.llama3.steps import layer_step
from scripts.kernels.cases import Case

KERNEL_NAME = "partial_prefill"


def compile_case(
    attend: Callable[..., Any], case: Case, device: Any, platform: str, options: dict[str, Any] | None = None
) -> Any:
    """The executable of one attention call for `device`."""

    def call(arrays: dict[str, jax.Array]) -> Any:
        named = dict(arrays)
        return attend(named.pop("q"), named.pop("k"), named.pop("v"), **named, **case.statics())

    traced = jax.jit(call).trace(case.arrays(SingleDeviceSharding(device)))
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def compile_layer_step(
    implementation: str, case: Case, device: Any, platform: str, options: dict[str, Any] | None = None
) -> Any:
    """The executable of the engine's own step: one layer of Llama-3-8B with the case's sizes."""
    sharding = SingleDeviceSharding(device)
    config = dataclasses.replace(LLAMA3_8B, num_layers=1)

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    layer = jax.tree.map(lambda x: array(*x.shape, dtype=jnp.bfloat16), abstract_params(config).layers[0])
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
    )
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)
