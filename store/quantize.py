"""KV in 8 bits: one code per value, one float32 scale per channel and layer, in one array.

A channel is K or V, one head and one of its H dimensions; its scale covers all tokens of the variant. Keys are stored
before RoPE, and some of their channels are large for every token (KIVI, arXiv:2402.02750, sec. 3), so that with a
common scale small channels would lose precision. Values have the same granularity: on the demo model it loses less than
a scale per token, which KIVI uses for values at 2 bits, and it takes 4/T bytes per value.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

SCALE_ROWS = 4
"""Token rows after the codes, for the bytes of the scales, least significant first."""

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)
_FP8_VALUES.flags.writeable = False

_LEAST_SCALE = np.finfo(
    np.float32
).tiny  # a smaller one is denormal: too coarse itself, and some machines flush it to 0
_LARGEST_VALUE = np.finfo(np.float32).max / 2  # above, a code times its scale may round to infinity


def quantize(kv: np.ndarray, kind: str) -> np.ndarray | None:
    """Codes and scales of `kv` `[L, 2, T, K, H]` as bytes `[L, 2, T + SCALE_ROWS, K, H]`, uint8; None if a value is
    NaN, infinite or above 1.7e38, for which there is no code.

    The result of `dequantize` differs from x, up to float32 rounding, by at most (s is the channel's scale)

        int8   s / 2                      with s = max |x| / 127
        fp8    max(|x| / 16, s / 1024)    with s = max |x| / 448 (float8_e4m3fn: 3 bits of mantissa, least code 2^-9)

    with s at least 1.2e-38; rounding to bfloat16 KV adds |x| / 256.
    """
    num_layers, _, num_tokens, num_heads, head_dim = kv.shape
    stored = np.empty((num_layers, 2, num_tokens + SCALE_ROWS, num_heads, head_dim), np.uint8)
    for layer, rows in zip(kv, stored, strict=True):  # one at a time: all float32 copies would be twice the KV
        values = layer.astype(np.float32, copy=False)
        largest = np.abs(values).max(axis=1)
        if not (largest <= _LARGEST_VALUE).all():  # also False for NaN
            return None
        scales = np.maximum(largest / np.float32(_LARGEST_CODE[kind]), _LEAST_SCALE)
        scaled = values / scales[:, None]
        codes = np.rint(scaled).astype(np.int8) if kind == "int8" else scaled.astype(_FP8)
        rows[:, :num_tokens] = codes.view(np.uint8)
        scale_bytes = scales.astype("<f4").view(np.uint8).reshape(2, num_heads, head_dim, 4)
        rows[:, num_tokens:] = np.moveaxis(scale_bytes, -1, 1)
    return stored


def dequantize(stored: np.ndarray, kind: str, out: np.ndarray) -> None:
    """Fills `out` `[2, T, K, H]`, float32 or bfloat16, from one layer of `quantize`, or from some heads of it."""
    num_tokens = out.shape[1]
    scales = np.ascontiguousarray(np.moveaxis(stored[:, num_tokens:], 1, -1)).view("<f4")[:, None, :, :, 0]
    codes: Any = stored[:, :num_tokens]
    # All 256 codes are valid; "wrap" only avoids the bounds check, which takes half of the time.
    codes = codes.view(np.int8) if kind == "int8" else np.take(_FP8_VALUES, codes, mode="wrap")
    # Every element is written once, with its final value, so two readers may do this concurrently.
    if out.dtype == np.float32:
        np.multiply(codes, scales, out=out)
    else:
        out[...] = codes * scales
