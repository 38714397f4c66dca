"""KV shards: their shape, their owner, and their records."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

FORMAT_VERSION = 2
"""Format version of all stored data; part of every namespace, record and marker."""

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def positive_int(name: str, value: Any, *, minimum: int = 1) -> int:
    """Returns `value` unchanged.

    Raises:
      ValueError: `value` is not an int of at least `minimum`; the message names `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}: wanted an int >= {minimum}, got {value!r}")
    return value


def is_id(value: Any) -> bool:
    """True for a valid id of a variant, chunk or data object: ids become file names."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and dtype of the KV of one model; one variant is `[L, 2, T, K, H]`: index 0 = K before RoPE, 1 = V."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            positive_int(name, getattr(self, name))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: wanted one of {sorted(_DTYPES)}, got {self.dtype!r}")

    @property
    def np_dtype(self) -> np.dtype:
        """`dtype` as a NumPy dtype; bfloat16 is that of ml_dtypes, which JAX uses."""
        return _DTYPES[self.dtype]

    def shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """`(L, 2, num_tokens, K, H)`."""
        return (self.num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the KV of `num_tokens` tokens in memory."""
        return math.prod(self.shape(num_tokens)) * self.np_dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The owner of a namespace. Two identities never see each other's variants.

    Attributes:
      model_fingerprint: digest of everything that determines KV values: weights, tokenizer, RoPE, dtype.
      tenant_salt: separates tenants of one model. It is hashed into the namespace and never stored.
    """

    model_fingerprint: str
    tenant_salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model_fingerprint, str) or not self.model_fingerprint:
            raise ValueError(f"model_fingerprint: wanted a non-empty string, got {self.model_fingerprint!r}")
        if not isinstance(self.tenant_salt, str):
            raise ValueError(f"tenant_salt: wanted a string, got {type(self.tenant_salt).__name__}")

    @property
    def namespace(self) -> str:
        """sha256 (hex) of format version, model fingerprint and tenant salt."""
        whole = [FORMAT_VERSION, self.model_fingerprint, self.tenant_salt]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


class ShardSummary(NamedTuple):
    """The part of a `ShardRecord` that is in memory for every variant; the rest has to be decoded."""

    variant_id: str
    chunk_id: str
    num_tokens: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShardRecord:
    """Metadata of one stored variant.

    Attributes:
      variant_id, chunk_id: ids of 1 to 128 letters, digits, `_` or `-`.
      num_tokens: T of the KV `[L, 2, T, K, H]`.
      num_bytes: bytes of the KV in memory.
      meta: JSON that the store does not interpret. Normalised by JSON (tuples become lists), the same in every tier.
    """

    variant_id: str
    chunk_id: str
    num_tokens: int
    num_bytes: int
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("variant_id", "chunk_id"):
            value = getattr(self, name)
            if not is_id(value):
                raise ValueError(f"{name}: wanted 1 to 128 letters, digits, '_' or '-', got {value!r}")
        positive_int("num_tokens", self.num_tokens)
        positive_int("num_bytes", self.num_bytes)
        if not isinstance(self.meta, Mapping):
            raise ValueError(f"meta: wanted a mapping, got {type(self.meta).__name__}")
        try:
            meta = json.loads(json.dumps(dict(self.meta), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"meta: wanted JSON values, finite numbers and string keys: {error}") from error
        object.__setattr__(self, "meta", meta)

    @classmethod
    def of_json(
        cls, variant_id: str, chunk_id: str, num_tokens: int, num_bytes: int, meta: Mapping[str, Any]
    ) -> ShardRecord:
        """A record of values that were validated before they were encoded as JSON; checks and copies nothing."""
        record = object.__new__(cls)
        for name, value in zip(cls.__slots__, (variant_id, chunk_id, num_tokens, num_bytes, meta), strict=True):
            object.__setattr__(record, name, value)
        return record

    @property
    def summary(self) -> ShardSummary:
        """All fields except `meta`."""
        return ShardSummary(self.variant_id, self.chunk_id, self.num_tokens, self.num_bytes)


IsCovered = Callable[[ShardRecord], bool]
"""Selects records whose variants are to be removed."""


def check_kv(kv: Any, record: ShardRecord, kv_spec: KVSpec) -> np.ndarray:
    """`kv` as a NumPy array, with the shape and dtype required by `record` and `kv_spec`.

    Raises:
      ValueError: `kv` has another shape or dtype.
    """
    array = np.asarray(kv)
    shape = kv_spec.shape(record.num_tokens)
    if array.shape != shape or array.dtype != kv_spec.np_dtype:
        raise ValueError(f"kv: wanted {kv_spec.dtype}{list(shape)}, got {array.dtype}{list(array.shape)}")
    return array


def check_record(record: ShardRecord, kv_spec: KVSpec) -> None:
    """Raises ValueError unless `record.num_bytes` matches `kv_spec` and the number of tokens."""
    expected = kv_spec.num_bytes(record.num_tokens)
    if record.num_bytes != expected:
        raise ValueError(
            f"record.num_bytes: wanted {expected} for {record.num_tokens} tokens of {kv_spec}, got {record.num_bytes}"
        )
