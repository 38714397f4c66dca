"""Chunk-caches without a model for the snapshot tests. Run as `python -m tests.cache.snapshots COMMAND ...`, a second
process: `save PATH NUM`, `dump PATH` (restores, prints JSON) or `save_forever PATH NUM`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.cache.snapshot import IndexedStore, restore_snapshot, save_snapshot
from ccjax.cache.snapshot.index import KEY, _canonical
from ccjax.cache.variants import VariantIndex
from ccjax.policy.capture import make_variant_id
from ccjax.policy.eviction import DEFAULT_POLICY
from ccjax.prompts import chunk_id
from ccjax.store import KVSpec, ShardRecord, StoreIdentity, TieredStore

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
BF16 = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype="bfloat16")
WIDE = KVSpec(num_layers=8, num_kv_heads=4, head_dim=64, dtype="bfloat16")
BYTES = SPEC.num_bytes(5)
OURS = StoreIdentity("model-a", "a tenant's own words")


def make_record(number: int, num_tokens: int = 5, kv_spec: KVSpec = SPEC, **changes: Any) -> ShardRecord:
    token_ids = [number, *range(1, num_tokens)]
    chunk, prefix = chunk_id(token_ids), [chunk_id([9, 9, number])]
    meta = {
        "prefix_ids": prefix,
        "inter_by_prefix": [0.125],
        "a_mean": 0.5,
        "b_mean": 1 / 3,
        "cci": 0.625,
        "token_ranking": list(reversed(range(num_tokens))),
        "fidelity": "exact",
        "token_ids": token_ids,
        "roles": ["instructions" if number % 2 == 0 else "passage", "passage"],
        "token_deviations": [],
        "token_received": [],
        "start": 1,
        "platform": "cpu",
        **changes,
    }
    variant_id = make_variant_id(chunk, prefix, meta["fidelity"])  # type: ignore[arg-type]
    return ShardRecord(variant_id, chunk, num_tokens, kv_spec.num_bytes(num_tokens), meta)


def make_kv(number: int, num_tokens: int = 5, kv_spec: KVSpec = SPEC) -> np.ndarray:
    """Signed normal KV that any process can make again."""
    random = np.random.default_rng([number, num_tokens])
    return random.standard_normal(kv_spec.shape(num_tokens), dtype=np.float32).astype(kv_spec.np_dtype)


@contextlib.contextmanager
def open_cache(
    url: str | None = None,
    *,
    kv_spec: KVSpec = SPEC,
    identity: StoreIdentity = OURS,
    host_bytes: int = 1 << 30,
    max_variants: int | None = None,
    disk_bytes: int | None = None,
) -> Iterator[IndexedStore]:
    """An empty cache, in host memory where there is no URL."""
    with TieredStore.open(
        url, kv_spec=kv_spec, identity=identity, host_bytes=host_bytes, disk_bytes=disk_bytes
    ) as store:
        costs = MeasuredCosts(Rates())
        variants = VariantIndex(store, costs, policy=DEFAULT_POLICY, max_variants=max_variants)
        yield IndexedStore(store, variants, identity, "a model", max_variants)


def put(cache: IndexedStore, number: int, frequency: float = 0.0, num_tokens: int = 5, **changes: Any) -> str:
    """Stores a variant; its id."""
    spec = cache.store.kv_spec
    record = make_record(number, num_tokens, spec, **changes)
    took = cache.store.complete_store(cache.store.prepare_store(record), make_kv(number, num_tokens, spec))
    assert took and cache.store.flush(120)
    cache.variants.restore([(record, frequency)])
    return record.variant_id


def fill(cache: IndexedStore, num_variants: int, num_tokens: int = 5) -> list[str]:
    """Variants 0, 1, ... with `f_r` of 1, 2, ...; their ids, hottest first."""
    return [put(cache, number, number + 1.0, num_tokens) for number in range(num_variants)][::-1]


def kv_of(cache: IndexedStore, variant_id: str) -> np.ndarray:
    ticket = cache.store.prepare_load([variant_id])
    try:
        return ticket.read_layers(variant_id, 0, cache.store.kv_spec.num_layers)
    finally:
        cache.store.complete_load(ticket, ok=False)


def contents(cache: IndexedStore) -> dict[str, tuple[bytes, dict[str, Any], float]]:
    """Variant id -> KV bytes, metadata, `f_r`; of what index and store both hold."""
    frequencies = {meta.variant_id: meta.frequency_reuse for meta in cache.variants}
    records = {record.variant_id: record for record in cache.store.records()}
    assert records.keys() == frequencies.keys()
    return {key: (kv_of(cache, key).tobytes(), dict(records[key].meta), frequencies[key]) for key in records}


def save_ten(place: Path | str) -> tuple[list[str], dict[str, tuple[bytes, dict[str, Any], float]]]:
    """A snapshot of ten variants; their ids, hottest first, and what the cache held."""
    with open_cache() as cache:
        ids = fill(cache, 10)
        assert save_snapshot(cache, place).num_variants == 10
        return ids, contents(cache)


def data_files(place: Path) -> list[Path]:
    """The files that KV lies in."""
    return sorted(place.glob("parts/*/*/pack-*/0.*"))


def changed(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the index by `change(body)`, checksum and all."""
    body = json.loads((place / KEY).read_bytes())
    del body["checksum"]
    change(body)
    raw = _canonical(body | {"checksum": hashlib.sha256(_canonical(body)).hexdigest()})
    (place / KEY).write_bytes(raw)


def save(path: str, num_variants: str) -> None:
    with open_cache() as cache:
        fill(cache, int(num_variants))
        save_snapshot(cache, path)


def dump(path: str) -> None:
    """variant id -> sha256 of its KV, after a restore."""
    with open_cache() as cache:
        restore_snapshot(cache, path)
        print(json.dumps({key: hashlib.sha256(kv).hexdigest() for key, (kv, _, _) in contents(cache).items()}))


def save_forever(path: str, num_variants: str) -> None:
    """Saves to PATH/0, PATH/1, ... with small parts, and keeps the last two."""
    from ccjax.cache.snapshot import save as module

    module.PACK_BYTES, module.PART_BYTES = 1 << 20, 2 << 20
    with open_cache(kv_spec=WIDE) as cache:
        fill(cache, int(num_variants), num_tokens=64)
        print("started", flush=True)
        for number in range(1 << 30):
            save_snapshot(cache, Path(path) / str(number))
            shutil.rmtree(Path(path) / str(number - 2), ignore_errors=True)


if __name__ == "__main__":
    {command.__name__: command for command in (save, dump, save_forever)}[sys.argv[1]](*sys.argv[2:])
