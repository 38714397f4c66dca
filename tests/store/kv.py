"""KV, records and stores shared by the store's tests. Imports no jax."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.store import KVSpec, ShardCorruptError, ShardRecord, StoreIdentity, TieredStore

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
BF16 = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype="bfloat16")
OURS = StoreIdentity("model-a")
OTHERS = StoreIdentity("model-b")


def make_kv(variant_id: str, num_tokens: int = 5, kv_spec: KVSpec = SPEC, writer: int = 0) -> np.ndarray:
    """Signed normal KV unique to this variant (and writer); any process can generate it again."""
    rng = np.random.default_rng([zlib.crc32(variant_id.encode()), num_tokens, writer])
    return rng.standard_normal(kv_spec.shape(num_tokens), dtype=np.float32).astype(kv_spec.np_dtype)


def make_record(variant_id: str, num_tokens: int = 5, kv_spec: KVSpec = SPEC) -> ShardRecord:
    meta = {"token_ranking": list(range(num_tokens)), "cci": 0.625, "text": 'é\n"'}
    return ShardRecord(variant_id, f"chunk-of-{variant_id}", num_tokens, kv_spec.num_bytes(num_tokens), meta)


def url_of(where: Path | str) -> str:
    """The URL of a directory; a URL is unchanged."""
    return where.as_uri() if isinstance(where, Path) else where


def open_store(
    where: Path | str | None, *, kv_spec: KVSpec = SPEC, identity: StoreIdentity = OURS, **options: Any
) -> TieredStore:
    options.setdefault("host_bytes", 1 << 20)
    url = None if where is None else url_of(where)
    return TieredStore.open(url, kv_spec=kv_spec, identity=identity, **options)


def put(store: TieredStore, variant_id: str, num_tokens: int = 5) -> tuple[str, ...]:
    """Stores `make_kv` under `variant_id` and waits for the disk."""
    ticket = store.prepare_store(make_record(variant_id, num_tokens, store.kv_spec))
    took = store.complete_store(ticket, make_kv(variant_id, num_tokens, store.kv_spec))
    assert store.flush(120)
    return took


def get(store: TieredStore, variant_id: str, *, ok: bool = True) -> np.ndarray:
    """The whole KV of a variant."""
    ticket = store.prepare_load([variant_id])
    try:
        return ticket.read_layers(variant_id, 0, store.kv_spec.num_layers)
    finally:
        store.complete_load(ticket, ok)


def assert_same_bytes(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def namespace_of(path: Path, identity: StoreIdentity = OURS) -> Path:
    return path / identity.namespace


def record_file(path: Path, variant_id: str) -> Path:
    return namespace_of(path) / "records" / f"{variant_id}.json"


def object_files(path: Path) -> list[Path]:
    return sorted(file for file in (namespace_of(path) / "data").rglob("*") if file.is_file())


def bytes_on_disk(path: Path) -> int:
    """Bytes of all data objects and records of our namespace."""
    folders = [namespace_of(path) / name for name in ("data", "records")]
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def object_of(place: Any, variant_id: str, store: TieredStore, identity: StoreIdentity = OURS) -> str:
    """Stores a variant; returns its data object."""
    before = set(place.object_keys(identity))
    put(store, variant_id)
    (new,) = set(place.object_keys(identity)) - before
    return new


def assert_swapped_objects_are_refused(
    place: Any, store: TieredStore, identity: StoreIdentity = OURS, match: str | None = None
) -> None:
    first, second = (object_of(place, variant_id, store, identity) for variant_id in ("v", "w"))
    raw = place.read(first)
    place.write(first, place.read(second))
    place.write(second, raw)
    for variant_id in ("v", "w"):
        with pytest.raises(ShardCorruptError, match=match):
            get(store, variant_id)
