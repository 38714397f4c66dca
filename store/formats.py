"""The stored form of KV: as it is, or as int8 codes with a float32 scale per channel and layer.

A channel is K or V, one head and one of its H dimensions; its scale covers all tokens of the variant. Keys are stored
before RoPE, and some of their channels are large for every token (KIVI, arXiv:2402.02750, sec. 3), so that with a
common scale small channels would lose precision. Values have the same granularity: on the demo model it loses less than
a scale per token, which KIVI uses for values at 2 bits, and it takes 4/T bytes per value.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import xxhash

from ccjax.store.spec import KVSpec

KV_DTYPES = ("auto", "int8")
"""Types of stored KV: its own dtype, bit for bit, or 8 bits, which is lossy."""

SCALE_ROWS = 4
"""Token rows after the codes, for the bytes of the scales, least significant first."""

_LARGEST_CODE = np.float32(127)
_LEAST_SCALE = np.finfo(
    np.float32
).tiny  # a smaller one is denormal: too coarse itself, and some machines flush it to 0
_LARGEST_VALUE = np.finfo(np.float32).max / 2  # above, a code times its scale may round to infinity


def check_kv_dtype(kv_dtype: object) -> str:
    """Returns `kv_dtype`, one of `KV_DTYPES`.

    Raises:
      ValueError: it is another value.
    """
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype: wanted one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
    return kv_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Description of a data object in its record.

    Attributes:
      kv_dtype: one of `KV_DTYPES`.
      checksums: checksum of each layer's bytes (`checksum`), including scales. They also bind the object
        to the record: checksums inside the object would accept another variant's object in its place. They cover the
        encoded bytes, because these are fewer, and because decoding may differ in the last bits between processors.
    """

    kv_dtype: str
    checksums: tuple[int, ...]

    @property
    def is_lossy(self) -> bool:
        """True if the KV read may differ from the KV written."""
        return self.kv_dtype != "auto"

    def shape(self, kv_spec: KVSpec, num_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the stored array: that of the KV, plus rows for the scales after its tokens."""
        return kv_spec.shape(num_tokens + SCALE_ROWS if self.is_lossy else num_tokens)

    def dtype(self, kv_spec: KVSpec) -> str:
        """zarr3's name for the dtype of the stored array."""
        return "uint8" if self.is_lossy else kv_spec.dtype

    def num_bytes(self, kv_spec: KVSpec, num_tokens: int) -> int:
        """Size of the object: the stored array, and 16 bytes of shard index per layer."""
        itemsize = 1 if self.is_lossy else kv_spec.np_dtype.itemsize
        return math.prod(self.shape(kv_spec, num_tokens)) * itemsize + 16 * kv_spec.num_layers


def expected_layout(kv_spec: KVSpec, num_tokens: int, kv_dtype: str) -> ObjectLayout:
    """The layout of a variant with this many tokens before its KV exists, without checksums: 8 bits only if they save
    more bytes than the scales take. Only KV that 8 bits cannot represent takes more space."""
    saves = num_tokens + SCALE_ROWS < num_tokens * kv_spec.np_dtype.itemsize
    return ObjectLayout(kv_dtype if saves else "auto", (0,) * kv_spec.num_layers)


def encode(kv_spec: KVSpec, kv: np.ndarray, kv_dtype: str) -> tuple[ObjectLayout, np.ndarray]:
    """The layout of the object for contiguous `kv` `[L, 2, T, K, H]`, and the array to store: in `kv_dtype`, if that
    takes less space and can represent it, else `kv`."""
    codes = quantize(kv) if expected_layout(kv_spec, kv.shape[2], kv_dtype).is_lossy else None
    stored = kv if codes is None else codes
    return ObjectLayout("auto" if codes is None else kv_dtype, tuple(map(checksum, stored))), stored


def checksum(layer: np.ndarray) -> int:
    """The xxh3 (64 bits) of the bytes of a contiguous array: detects damage at memory speed, but no forgery."""
    return xxhash.xxh3_64_intdigest(layer.view(np.uint8).data)


def quantize(kv: np.ndarray) -> np.ndarray | None:
    """Codes and scales of `kv` `[L, 2, T, K, H]` as bytes `[L, 2, T + SCALE_ROWS, K, H]`, uint8; None if a value is
    NaN, infinite or above 1.7e38, for which there is no code.

    The result of `dequantize` differs from x, up to float32 rounding, by at most s / 2, with the channel's scale
    s = max |x| / 127, at least 1.2e-38; rounding to bfloat16 KV adds |x| / 256.
    """
    num_layers, _, num_tokens, num_heads, head_dim = kv.shape
    stored = np.empty((num_layers, 2, num_tokens + SCALE_ROWS, num_heads, head_dim), np.uint8)
    for layer, rows in zip(kv, stored, strict=True):  # one at a time: all float32 copies would be twice the KV
        values = layer.astype(np.float32, copy=False)
        largest = np.abs(values).max(axis=1)
        if not (largest <= _LARGEST_VALUE).all():  # also False for NaN
            return None
        scales = np.maximum(largest / _LARGEST_CODE, _LEAST_SCALE)
        rows[:, :num_tokens] = np.rint(values / scales[:, None]).astype(np.int8).view(np.uint8)
        scale_bytes = scales.astype("<f4").view(np.uint8).reshape(2, num_heads, head_dim, 4)
        rows[:, num_tokens:] = np.moveaxis(scale_bytes, -1, 1)
    return stored


def dequantize(stored: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` `[2, T, K, H]`, float32 or bfloat16, from one layer of `quantize`."""
    num_tokens = out.shape[1]
    scales = np.ascontiguousarray(np.moveaxis(stored[:, num_tokens:], 1, -1)).view("<f4")[:, None, :, :, 0]
    codes = stored[:, :num_tokens].view(np.int8)
    # Every element is written once, with its final value, so two readers may do this concurrently.
    if out.dtype == np.float32:
        np.multiply(codes, scales, out=out)
    else:
        out[...] = codes * scales
