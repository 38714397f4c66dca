"""A second process for the store's tests: `python -m tests.store.worker COMMAND URL ...`; prints one JSON line. The
commands that fill a disk take a path in place of the URL."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import resource
import sys
import time
from pathlib import Path

import ccjax.store.catalog
import ccjax.store.commits
from ccjax.store import KVSpec, StoreUnavailableError, TensorStoreTier
from tests.store.kv import OURS, SPEC, bytes_on_disk, get, make_kv, make_record, open_store, put

WIDE = KVSpec(num_layers=8, num_kv_heads=4, head_dim=64, dtype="bfloat16")  # 64 tokens = 512 KiB
WIDE_TOKENS = 64


def dump(url: str) -> None:
    """variant id -> sha256 of its KV and its metadata."""
    with open_store(url) as store:
        print(
            json.dumps(
                {
                    record.variant_id: [
                        hashlib.sha256(get(store, record.variant_id).tobytes()).hexdigest(),
                        record.meta,
                    ]
                    for record in store.records()
                }
            )
        )


def save(url: str, *variant_ids: str) -> None:
    """Stores the variants and exits without `flush` or `close`."""
    store = open_store(url)
    for variant_id in variant_ids:
        ticket = store.prepare_store(make_record(variant_id))
        store.complete_store(ticket, make_kv(variant_id))


def write_forever(url: str, prefix: str, kv_dtype: str) -> None:
    tier = TensorStoreTier(url, WIDE, OURS, kv_dtype=kv_dtype)
    print("started", flush=True)
    for number in itertools.count():
        variant_id = f"{prefix}-{number}"
        tier.write(make_record(variant_id, WIDE_TOKENS, WIDE), make_kv(variant_id, WIDE_TOKENS, WIDE))


def catalog_forever(url: str, prefix: str) -> None:
    """Writes variants, and a catalog of small parts after each one."""
    ccjax.store.commits.LEAST_CHANGES, ccjax.store.catalog.RECORDS_PER_PART = 1, 2
    tier = TensorStoreTier(url, WIDE, OURS)
    for number in itertools.count():
        variant_id = f"{prefix}-{number}"
        tier.write(make_record(variant_id, WIDE_TOKENS, WIDE), make_kv(variant_id, WIDE_TOKENS, WIDE))
        tier.tidy()
        if number == 0:
            print("started", flush=True)


def hold_lease(url: str, key: str, seconds: str) -> None:
    """Claims a variant that it never writes, and prints the expiry."""
    store = open_store(url)
    assert store.claims is not None and store.claims.claim([key], float(seconds)) == (key,)
    print(store.claims._held[key].expires_s, flush=True)
    time.sleep(3600)


def await_lease(url: str, key: str) -> None:
    """Once another process has claimed the variant, tries to claim it until this or a third process has it; never
    releases the claim."""
    store = open_store(url)
    assert store.claims is not None and store._disk is not None
    print("started", flush=True)
    while not (latest := store._disk.leases._latest([key])):
        time.sleep(0.02)
    while not (won := store.claims.claim([key], 3600) == (key,)) and latest[key].epoch == 1:
        time.sleep(0.02)
        latest = store._disk.leases._latest([key])
    print(json.dumps({"won": won, "at": time.time()}))
    sys.stdout.flush()
    os._exit(0)


def race(url: str, writer: str, start_file: str, num_keys: str) -> None:
    """Writes keys at the same time as another process; prints the keys that it won."""
    tier = TensorStoreTier(url, SPEC, OURS)
    print("started", flush=True)
    while not Path(start_file).exists():
        time.sleep(0.001)
    ids = [f"k{number}" for number in range(int(num_keys))]
    print(json.dumps([key for key in ids if tier.write(make_record(key), make_kv(key, writer=int(writer)))]))


def _report(path: Path, make_space) -> None:
    """Fills the disk until writes fail, frees space, continues; reports every step."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ccjax.store").addHandler(handler)
    with open_store(path, kv_spec=WIDE, host_bytes=0) as store:
        ids = [f"v{number}" for number in range(6)]
        for variant_id in ids:
            put(store, variant_id, WIDE_TOKENS)
        full = store.usage()["disk"]
        kept = [record.variant_id for record in store.records()]
        readable = all(get(store, key).tobytes() == make_kv(key, WIDE_TOKENS, WIDE).tobytes() for key in kept)
        bytes_full = bytes_on_disk(path)
        make_space(store)
        put(store, "after", WIDE_TOKENS)
        result = {
            "kept": kept,
            "failed": full.failed_writes,
            "used": full.used_bytes,
            "on_disk": bytes_full,
            "readable": readable,
            "after": store.tier_of("after"),
            "messages": messages,
        }
    print(json.dumps(result))


def fill_disk(folder: str) -> None:
    """On a file system of 2 MiB."""
    path = Path(folder)
    _report(path / "kv", lambda store: store.evict("disk", ["v0"]))
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            reason = error.strerror
    try:
        open_store(path / "kv", kv_spec=WIDE)
    except StoreUnavailableError as error:
        print(json.dumps({"open": str(error), "reason": reason}))


def limit_file_size(folder: str) -> None:
    """The kernel refuses files over 100 KiB while the limit is set."""
    path = Path(folder)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    open_store(path, kv_spec=WIDE).close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, hard))
    _report(path, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))


if __name__ == "__main__":
    commands = (dump, save, write_forever, catalog_forever, hold_lease, await_lease, race, fill_disk, limit_file_size)
    {command.__name__: command for command in commands}[sys.argv[1]](*sys.argv[2:])
