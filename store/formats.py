"""Formats of a variant in its data object: dtype, compression, and an upper bound of the size."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ccjax.store.quantize import SCALE_ROWS, dequantize, quantize
from ccjax.store.spec import KVSpec

KV_DTYPES = ("auto", "int8", "fp8")
COMPRESSIONS = ("none", "zstd")

# Some bits of a zstd frame do not affect its contents; the crc32c protects these as well.
_CODECS = {"none": [], "zstd": [{"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}]}


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFormat:
    """Storage format of KV on disk. The default can be read by every version of the store.

    Attributes:
      kv_dtype: "auto" for the KV's own dtype, bit for bit; or 8 bits with scales (`store.quantize`), which is lossy:
        "int8", or "fp8", float8_e4m3fn.
      compression: "none", or "zstd" for links slower than about 0.3 GB/s; lossless.

    Raises:
      ValueError: an unknown value.
    """

    kv_dtype: str = "auto"
    compression: str = "none"

    def __post_init__(self) -> None:
        for name, known in (("kv_dtype", KV_DTYPES), ("compression", COMPRESSIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: wanted one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def is_lossy(self) -> bool:
        """True if the KV read may differ from the KV written."""
        return self.kv_dtype != "auto"

    @property
    def codecs(self) -> list[dict]:
        """zarr3 codecs after the `bytes` codec of an inner chunk."""
        return _CODECS[self.compression]

    def as_it_is(self) -> StorageFormat:
        """The same compression with the KV's own dtype."""
        return dataclasses.replace(self, kv_dtype="auto")

    def of(self, kv_spec: KVSpec, num_tokens: int) -> StorageFormat:
        """The format of a variant with this many tokens: 8 bits only if they save more bytes than the scales take."""
        saves = num_tokens + SCALE_ROWS < num_tokens * kv_spec.np_dtype.itemsize
        return self if saves or not self.is_lossy else self.as_it_is()

    def shape(self, kv_spec: KVSpec, num_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the stored array: that of the KV, plus rows for the scales after its tokens."""
        return kv_spec.shape(num_tokens + SCALE_ROWS if self.is_lossy else num_tokens)

    def dtype(self, kv_spec: KVSpec) -> str:
        """zarr3's name for the dtype of the stored array."""
        return "uint8" if self.is_lossy else kv_spec.dtype

    def encode(self, kv_spec: KVSpec, kv: np.ndarray) -> tuple[StorageFormat, np.ndarray]:
        """The array to store for `kv` `[L, 2, T, K, H]` and its format: `of`, or "auto" if 8 bits cannot represent
        it."""
        storage = self.of(kv_spec, kv.shape[2])
        stored = quantize(kv, storage.kv_dtype) if storage.is_lossy else kv
        return (storage.as_it_is(), kv) if stored is None else (storage, stored)

    def decode(self, stored: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` `[2, T, K, H]` from one layer of an array in a lossy format."""
        dequantize(stored, self.kv_dtype, out)


AS_IT_IS = StorageFormat()


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Description of a data object in its record.

    Attributes:
      head_groups: number of inner chunks per layer along K.
      storage: format of the KV.
      num_bytes: size of the object.
      checksums: checksum of each inner chunk's bytes (`store.arrays.checksum`), layer by layer, including scales,
        before compression. They also bind the object to the record: checksums inside the object would accept another
        variant's object in its place. They cover the encoded bytes, because these are fewer, and because decoding may
        differ in the last bits between processors.
    """

    head_groups: int
    storage: StorageFormat
    num_bytes: int
    checksums: tuple[int, ...]


def object_bytes(kv_spec: KVSpec, num_tokens: int, head_groups: int, storage: StorageFormat = AS_IT_IS) -> int:
    """Size of a data object (an upper bound with compression): the stored array and, per inner chunk, 16 bytes of shard
    index and 4 bytes of crc32c if compressed."""
    num_chunks = kv_spec.num_layers * head_groups
    itemsize = 1 if storage.is_lossy else kv_spec.np_dtype.itemsize
    chunk_bytes = math.prod(storage.shape(kv_spec, num_tokens)) * itemsize // num_chunks
    if storage.compression == "zstd":
        chunk_bytes += chunk_bytes // 256 + 64 + 4  # ZSTD_compressBound, crc32c
    return num_chunks * (chunk_bytes + 16)


def expected_layout(kv_spec: KVSpec, num_tokens: int, head_groups: int, storage: StorageFormat) -> ObjectLayout:
    """The layout of a variant with this many tokens before its KV exists, without checksums. Its size is an upper bound
    with compression; only KV that 8 bits cannot represent takes more."""
    storage = storage.of(kv_spec, num_tokens)
    num_bytes = object_bytes(kv_spec, num_tokens, head_groups, storage)
    return ObjectLayout(head_groups, storage, num_bytes, (0,) * (kv_spec.num_layers * head_groups))
