"""Compiles kernel calls for a described device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

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
