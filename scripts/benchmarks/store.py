"""The chunk store without a model: opening and planning at size, and the disk tier against plain files.

At size: a store of 100,000 variants in the shape of Llama-3-8B. Only their records are created, by the store's own
encoder, with empty folders instead of KV, which no timed operation reads. Each case is a new process, so only the page
cache is warm; the first one finds no catalog and writes one.

The disk tier: variants of 8 MB and 64 MB against plain files of the same bytes on the same file system: one write with
`fsync`, one read into existing memory. The tier also allocates memory, verifies checksums and commits a record. For
cold reads the kernel is told to drop the files (Linux only).

Keys of --json, besides those of every benchmark (`bench.py --help`):
  record_bytes, tokens, planned_chunks: of a variant, and of a planned prompt
  cases[]: `catalog` (whether the store had one), `variants` (at the end), `changes`; seconds: `open_s` the store,
    `index_s` build the engine's index over it, look up and plan a prompt of 20 random chunks `plan_first_s` and
    `plan_again_s` (medians of 100), look for changes of other processes when there are none (`refresh_unchanged_s`) and
    some (`refresh_changed_s`), `tidy_s` in idle time; `bytes_per_variant` (memory of store and index)
  disk[]: `variant`, `num_bytes`, and for `write`, `cold_read`, `warm_read`: `tier_gb_per_s`, `plain_gb_per_s`, `ratio`
    (of medians), `tier_runs_s`, `plain_runs_s`
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.cache.variants import VariantIndex
from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show
from ccjax.policy.eviction import DEFAULT_POLICY
from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.store import KVSpec, ShardRecord, StoreIdentity, TensorStoreTier, TieredStore
from ccjax.store.formats import expected_layout
from ccjax.store.records import encode_record
from ccjax.types import ChunkId
from scripts.benchmarks.common import environment, median, resident_bytes, stages, timed

QUICK = {"variants": 2_000, "repetitions": 2}
LLAMA3_8B = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
SHAPES = {"8 MB": (KVSpec(16, 8, 128, "bfloat16"), 128), "64 MB": (LLAMA3_8B, 512)}
"""Variant of the disk tier -> KV shape and tokens: 16 layers of half a megabyte; 32 layers of two."""
WAYS, OPERATIONS = ("tier", "plain"), ("write", "cold_read", "warm_read")
IDENTITY = StoreIdentity("benchmark")
NUM_TOKENS, PREFIX_CHUNKS, VARIANTS_PER_CHUNK, PLANNED_CHUNKS = 200, 5, 2, 20


def records(num_variants: int, seed: int) -> Iterator[ShardRecord]:
    """Variants as the engine stores them, `VARIANTS_PER_CHUNK` of each chunk, with random contents."""
    rng = random.Random(seed)
    chunks = [_digest(f"chunk {seed} {number}") for number in range(max(1, num_variants // VARIANTS_PER_CHUNK))]
    for number in range(num_variants):
        meta = {
            "prefix_ids": rng.choices(chunks, k=PREFIX_CHUNKS),
            "inter_by_prefix": [rng.random() for _ in range(PREFIX_CHUNKS)],
            "token_ranking": rng.sample(range(NUM_TOKENS), NUM_TOKENS),
            "token_ids": rng.choices(range(128_000), k=NUM_TOKENS),
        }
        meta |= {
            "fidelity": "exact",
            "token_deviations": [],
            "token_received": [],
            "start": 32,
            "platform": "cpu",
            "roles": ["instructions", *["passage"] * PREFIX_CHUNKS],
            **{k: rng.random() for k in ("a_mean", "b_mean", "cci")},
        }
        variant_id = _digest(f"variant {seed} {number}")
        yield ShardRecord(variant_id, chunks[number % len(chunks)], NUM_TOKENS, LLAMA3_8B.num_bytes(NUM_TOKENS), meta)


def add_records(root: Path, num_variants: int, seed: int) -> int:
    """Commits `num_variants` without KV and without waiting for the disk; returns the mean bytes of a record."""
    rng = random.Random(seed)
    space = root / IDENTITY.namespace
    plain = expected_layout(LLAMA3_8B, NUM_TOKENS, "auto")
    num_bytes = 0
    for record in records(num_variants, seed):
        object_id = f"{rng.getrandbits(128):032x}"
        layout = dataclasses.replace(plain, checksums=tuple(rng.getrandbits(32) for _ in plain.checksums))
        raw = encode_record(record, identity=IDENTITY, kv_spec=LLAMA3_8B, object_id=object_id, layout=layout)
        (space / "data" / object_id).mkdir(exist_ok=True)
        (space / "records" / f"{record.variant_id}.json").write_bytes(raw)
        num_bytes += len(raw)
    return num_bytes // num_variants


def _open(root: Path) -> TieredStore:
    return TieredStore.open(root.as_uri(), kv_spec=LLAMA3_8B, identity=IDENTITY, host_bytes=1 << 20)


def measure_index(root: Path, num_changes: int, num_plans: int) -> dict[str, Any]:
    """Figures of one process that opens the store; run in a new process, so that only the page cache is warm."""
    before = resident_bytes()
    open_s, store = timed(lambda: _open(root))
    costs = MeasuredCosts(Rates())
    index_s, index = timed(lambda: VariantIndex(store, costs, policy=DEFAULT_POLICY, max_variants=None))
    grown = resident_bytes() - before
    first, again, rng = [], [], random.Random(2)
    for _ in range(num_plans):
        chunks = [ChunkId(summary.chunk_id) for summary in rng.sample(store.summaries(), PLANNED_CHUNKS)]
        for runs in (first, again):
            runs.append(timed(lambda chunks=chunks: _plan(index, chunks))[0])
    unchanged_s, _ = timed(store.refresh)
    add_records(root, num_changes, seed=1)
    changed_s, (added, _) = timed(store.refresh)
    assert len(added) == num_changes
    followed_s, _ = timed(lambda: index.apply_changes(added, ()))
    figures = {"variants": len(store.summaries()), "open_s": open_s, "index_s": index_s, "plan_first_s": median(first)}
    figures |= {"plan_again_s": median(again), "refresh_unchanged_s": unchanged_s}
    figures |= {"changes": num_changes, "refresh_changed_s": changed_s + followed_s, "tidy_s": timed(store.tidy)[0]}
    store.close()
    return {**figures, "bytes_per_variant": grown // figures["variants"]}


def _plan(index: VariantIndex, chunks: list[ChunkId]) -> None:
    prompt = [*(PromptChunk(chunk, NUM_TOKENS) for chunk in chunks), PromptChunk(ChunkId("?"), 16, "question")]
    plan_prefill(prompt, index.of_chunks(set(chunks)), mode="bounded", settings=PlannerSettings())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--variants", type=positive_int, default=100_000, help="in the store (%(default)s)")
    add("--directory", type=Path, help="where to write (default: the directory for temporary files)")
    add("--repetitions", type=positive_int, default=9, help="of the disk tier; the median counts (%(default)s)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Creates a store of records, opens it in new processes, times the disk tier, and prints both tables."""
    num_changes = min(100, arguments.variants // 20)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder, stages() as say:
        say("create records")
        root = Path(folder) / "kv"
        _open(root).close()
        record_bytes = add_records(root, arguments.variants, seed=0)
        cases, disk = [], []
        for catalog in (False, True, True):
            say("open with a catalog" if catalog else "open without a catalog")
            command = [sys.executable, "-m", "scripts.benchmarks.store", str(root), str(num_changes), "100"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2])
            cases.append({"catalog": catalog, **json.loads(done.stdout.splitlines()[-1])})
            for record in records(num_changes, seed=1):
                (root / IDENTITY.namespace / "records" / f"{record.variant_id}.json").unlink()
        for name, (kv_spec, num_tokens) in SHAPES.items():
            say(f"write and read {name}")
            with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
                disk.append({"variant": name, **measure_disk(Path(place), kv_spec, num_tokens, arguments.repetitions)})
    _print(cases, record_bytes, disk)
    about = {"record_bytes": record_bytes, "tokens": NUM_TOKENS, "planned_chunks": PLANNED_CHUNKS}
    return {"benchmark": "store", **environment(), **about, "cases": cases, "disk": disk}


def measure_disk(folder: Path, kv_spec: KVSpec, num_tokens: int, repetitions: int) -> dict[str, Any]:
    """Writes new variants to the tier and to plain files, and reads them cold and warm."""
    seconds: dict[tuple[str, str], list[float]] = {}
    tier, num_layers = TensorStoreTier((folder / "store").as_uri(), kv_spec, IDENTITY), kv_spec.num_layers
    kv = np.random.default_rng(0).standard_normal(kv_spec.shape(num_tokens), np.float32).astype(kv_spec.np_dtype)
    buffer = np.ones_like(kv)  # touched, so that all its pages exist

    def read_tier(name: str) -> np.ndarray:  # starts all layers, then awaits them in order, as a prefill does
        reader = tier.open(name)
        reader.start(0, num_layers)
        for layer in range(num_layers):
            reader.wait(layer, layer + 1)
        return reader.wait(0, num_layers)

    def time_both(operation: str, ways: dict[str, Callable[[], Any]], *, is_reversed: bool) -> None:
        for who in WAYS[:: -1 if is_reversed else 1]:  # the disk is busier for the second one
            if operation == "cold_read":
                _drop_from_cache(folder)
            taken_s, got = timed(ways[who])
            seconds.setdefault((operation, who), []).append(taken_s)
            assert operation == "write" or got.view(np.uint16).sum() == kv.view(np.uint16).sum()

    for number in range(repetitions):
        name, path = f"v{number}", folder / f"v{number}"
        record = ShardRecord(name, "chunk", num_tokens, kv.nbytes, {})
        writes = {"tier": lambda r=record: tier.write(r, kv), "plain": lambda p=path: _write(p, kv)}
        reads = {"tier": lambda n=name: read_tier(n), "plain": lambda p=path: _read(p, buffer)}
        for operation, ways in zip(OPERATIONS, (writes, reads, reads), strict=True):
            time_both(operation, ways, is_reversed=number % 2 == 1)
    row: dict[str, Any] = {"num_bytes": kv.nbytes}
    for operation in OPERATIONS:
        runs_s = {who: seconds[operation, who] for who in WAYS}
        row[operation] = {f"{who}_gb_per_s": kv.nbytes / median(runs) / 1e9 for who, runs in runs_s.items()}
        row[operation]["ratio"] = median(runs_s["plain"]) / median(runs_s["tier"])
        row[operation] |= {f"{who}_runs_s": runs for who, runs in runs_s.items()}
    return row


def _write(path: Path, kv: np.ndarray) -> None:
    with path.open("xb", buffering=0) as file:
        assert file.write(kv.view(np.uint8).data) == kv.nbytes
        os.fsync(file)


def _read(path: Path, buffer: np.ndarray) -> np.ndarray:
    with path.open("rb", buffering=0) as file:
        assert file.readinto(buffer.view(np.uint8).data) == buffer.nbytes
    return buffer


def _drop_from_cache(folder: Path) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _print(cases: list[dict[str, Any]], record_bytes: int, disk: list[dict[str, Any]]) -> None:
    rows = [(name[:-2], *(f"{1e3 * case[name]:.2f}" for case in cases)) for name in cases[0] if name.endswith("_s")]
    rows.append(("bytes per variant", *(str(case["bytes_per_variant"]) for case in cases)))
    title = f"{cases[0]['variants']} variants, records of {record_bytes} bytes, {cases[0]['changes']} changed; ms"
    show(("", *("catalog" if case["catalog"] else "no catalog" for case in cases)), rows, title)
    cells = [
        (
            row["variant"],
            name,
            f"{rates['tier_gb_per_s']:.2f}",
            f"{rates['plain_gb_per_s']:.2f}",
            f"{rates['ratio']:.0%}",
        )
        for row in disk
        for name, rates in row.items()
        if isinstance(rates, dict)
    ]
    show(("variant", "operation", "tier", "plain", "ratio"), cells, "Disk tier against plain files, GB/s")


if __name__ == "__main__":
    print(json.dumps(measure_index(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
