"""The kernel calls that serving makes, as abstract shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One call of `ccjax.kernels.attention`; the defaults are Llama-3-8B on one chip, 15 % of 16k computed."""

    kernel: ClassVar[str] = "partial_prefill"
    name: str
    num_queries: int = 2560
    num_slots: int = 16384
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_segments: int = 16
    is_packed: bool = False
    is_rotated: bool = False
    dtype: str = "bfloat16"

    def arrays(self, sharding: Sharding) -> dict[str, jax.ShapeDtypeStruct]:
        """The array arguments, by name."""

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        n, s, h, dtype = self.num_queries, self.num_slots, self.head_dim, jnp.dtype(self.dtype)
        arrays = {
            "q": array(n, self.num_heads, h, dtype=dtype),
            "k": array(s, self.num_kv_heads, h, dtype=dtype),
            "v": array(s, self.num_kv_heads, h, dtype=dtype),
            "q_pos": array(n),
            "k_pos": array(s),
        }
        if self.num_segments:
            arrays["k_segment"] = array(s)
        if self.is_packed:
            arrays |= {"q_request": array(n), "k_request": array(s)}
        if self.is_rotated:
            arrays["k_frequencies"] = array(h // 2, dtype=jnp.float32)
        return arrays

    def statics(self) -> dict[str, Any]:
        """The other arguments."""
        return {"scale": self.head_dim**-0.5, "num_segments": self.num_segments}


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One call of `ccjax.kernels.decode`; the defaults are Llama-3-8B on one chip, 32 requests with up to 8k each."""

    kernel: ClassVar[str] = "paged_decode"
    name: str
    num_requests: int = 32
    num_entries: int = 512
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"

    def arrays(self, sharding: Sharding) -> dict[str, jax.ShapeDtypeStruct]:
        """The array arguments, by name."""
        array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        pool = (self.num_kv_heads, self.num_requests * self.num_entries, self.page_size, self.head_dim)
        table = (self.num_requests, self.num_entries)
        dtype = jnp.dtype(self.dtype)
        return {
            "q": array((self.num_requests, self.num_heads, self.head_dim), dtype),
            "k_pages": array(pool, dtype),
            "v_pages": array(pool, dtype),
            "page_table": array(table, jnp.int32),
            "page_length": array(table, jnp.int32),
            "page_rotation": array((*table, self.head_dim), jnp.float32),
            "k_frequencies": array((self.head_dim // 2,), jnp.float32),
        }

    def statics(self) -> dict[str, Any]:
        """The other arguments."""
        return {"scale": self.head_dim**-0.5}


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


# Query heads and kv heads of one chip.
_MODELS = {"8B TP1": (32, 8), "8B TP4": (8, 2), "70B TP8": (8, 1)}
# Computed tokens, padded to the engine's buckets, and context slots.
_SIZES = {"2k": (2048, 2048), "15 % of 16k": (2560, 16384)}

CASES = tuple(
    KernelCase(f"{model}, {size}", num_queries, num_slots, num_heads, num_kv_heads)
    for model, (num_heads, num_kv_heads) in _MODELS.items()
    for size, (num_queries, num_slots) in _SIZES.items()
) + (
    KernelCase("no mass", num_segments=0),
    KernelCase("64 segments", num_segments=64),
    KernelCase("packed", is_packed=True),
    KernelCase("rotated", is_rotated=True),
    KernelCase("packed, rotated, 64 segments", num_segments=64, is_packed=True, is_rotated=True),
    KernelCase("one token", num_queries=1, num_segments=0),
    KernelCase("32 tokens", num_queries=32),
    KernelCase("heads of 64", head_dim=64),
    KernelCase("heads of 16, rotated", head_dim=16, is_rotated=True),
    KernelCase("heads of 256", num_heads=16, head_dim=256),
    KernelCase("groups of 3 heads", num_heads=24),
    KernelCase("groups of 7 heads", num_heads=28, num_kv_heads=4),
    KernelCase("float32", dtype="float32"),
)

DECODE_CASES = (
    *(DecodeCase(f"decode, {model}", num_heads=heads, num_kv_heads=kv) for model, (heads, kv) in _MODELS.items()),
    DecodeCase("decode, 32 kv heads, float32", num_kv_heads=32, dtype="float32"),
    DecodeCase("decode, 70B TP8, up to 128k", num_entries=8192, num_heads=8, num_kv_heads=1),
)

ALL_CASES = (*CASES, *DECODE_CASES)
CONTROL, DECODE_CONTROL = CASES[1], DECODE_CASES[0]
"""Shapes of the controls, which must fail to compile."""

QUICK = frozenset({CONTROL.name, "rotated", DECODE_CONTROL.name})
"""Names of the cases that every push compiles: each kernel, and the attention also with rotation."""
