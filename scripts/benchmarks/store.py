"""The chunk store by itself, without a model: how fast a store of many variants opens and plans.

The variants are records only, with empty folders in place of KV, which no timed operation reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.cache.variants import VariantIndex
from ccjax.evaluation.pages import show
from ccjax.policy.eviction import DEFAULT_POLICY
from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.store import KVSpec, ShardRecord, StoreIdentity, TieredStore
from ccjax.store.formats import AS_IT_IS, expected_layout
from ccjax.store.records import encode_record
from ccjax.types import ChunkId
from scripts.benchmarks.common import CallCost, environment, resident_bytes, stages, timed

QUICK = {"variants": 2_000}
LLAMA3_8B = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
IDENTITY = StoreIdentity("benchmark")
NUM_TOKENS = 200
PREFIX_CHUNKS = 5
VARIANTS_PER_CHUNK = 2
PLANNED_CHUNKS = 20


def records(num_variants: int, seed: int) -> Iterator[ShardRecord]:
    """Variants as the engine stores them, `VARIANTS_PER_CHUNK` of each chunk, with random contents."""
    rng = random.Random(seed)
    chunks = [_digest(f"chunk {seed} {number}") for number in range(max(1, num_variants // VARIANTS_PER_CHUNK))]
    for number in range(num_variants):
        meta = {
            "prefix_ids": rng.choices(chunks, k=PREFIX_CHUNKS),
            "inter_by_prefix": [rng.random() for _ in range(PREFIX_CHUNKS)],
            "a_mean": rng.random(),
            "b_mean": rng.random(),
            "cci": rng.random(),
            "token_ranking": rng.sample(range(NUM_TOKENS), NUM_TOKENS),
            "fidelity": "exact",
            "token_ids": rng.choices(range(128_000), k=NUM_TOKENS),
            "has_system": True,
        }
        variant_id = _digest(f"variant {seed} {number}")
        yield ShardRecord(variant_id, chunks[number % len(chunks)], NUM_TOKENS, LLAMA3_8B.num_bytes(NUM_TOKENS), meta)


def add_records(root: Path, num_variants: int, seed: int) -> int:
    """Commits `num_variants` without KV and without waiting for the disk; returns the mean bytes of a record."""
    rng = random.Random(seed)
    space = root / IDENTITY.namespace
    plain = expected_layout(LLAMA3_8B, NUM_TOKENS, 1, AS_IT_IS)
    num_bytes = 0
    for record in records(num_variants, seed):
        object_id = f"{rng.getrandbits(128):032x}"
        layout = dataclasses.replace(plain, checksums=tuple(rng.getrandbits(32) for _ in plain.checksums))
        raw = encode_record(record, identity=IDENTITY, kv_spec=LLAMA3_8B, object_id=object_id, layout=layout)
        (space / "data" / object_id).mkdir(exist_ok=True)
        (space / "records" / f"{record.variant_id}.json").write_bytes(raw)
        num_bytes += len(raw)
    return num_bytes // num_variants


def open_store(root: Path) -> TieredStore:
    """The store below `root`."""
    return TieredStore.open(root.as_uri(), kv_spec=LLAMA3_8B, identity=IDENTITY, host_bytes=1 << 20)


def new_index(store: TieredStore) -> VariantIndex:
    """The engine's index over the store."""
    return VariantIndex(store, MeasuredCosts(Rates()), policy=DEFAULT_POLICY, max_variants=None)


def measure_index(root: Path, num_changes: int, num_plans: int) -> dict[str, Any]:
    """Figures of one process that opens the store; run in a new process, so that only the page cache is warm."""
    before = resident_bytes()
    opened, store = timed(lambda: open_store(root))
    after_open = resident_bytes()
    indexed, index = timed(lambda: new_index(store))
    after_index = resident_bytes()
    first, again = [], []
    rng = random.Random(2)
    for _ in range(num_plans):
        chunks = [ChunkId(summary.chunk_id) for summary in rng.sample(store.summaries(), PLANNED_CHUNKS)]
        first.append(timed(lambda chunks=chunks: _plan(index, chunks))[0])
        again.append(timed(lambda chunks=chunks: _plan(index, chunks))[0])
    unchanged = timed(store.refresh)[0]
    add_records(root, num_changes, seed=1)
    changed, (added, _) = timed(store.refresh)
    assert len(added) == num_changes, len(added)
    followed = timed(lambda: index.apply_changes(added, ()))[0]
    tidied = timed(store.tidy)[0]
    num_variants = len(store.summaries())
    store.close()
    return {
        "variants": num_variants,
        "open": opened,
        "index": indexed,
        "plan_first": _median(first),
        "plan_again": _median(again),
        "refresh_0": unchanged,
        f"refresh_{num_changes}": CallCost(changed.wall_s + followed.wall_s, changed.cpu_s + followed.cpu_s),
        "tidy": tidied,
        "store_bytes_per_variant": (after_open - before) // num_variants,
        "index_bytes_per_variant": (after_index - after_open) // num_variants,
    }


def _plan(index: VariantIndex, chunks: list[ChunkId]) -> None:
    prompt = [PromptChunk(chunk, NUM_TOKENS) for chunk in chunks]
    plan_prefill(prompt, 16, index.of_chunks(set(chunks)), mode="bounded", settings=PlannerSettings())


def _median(costs: list[CallCost]) -> CallCost:
    return CallCost(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, costs), strict=True)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--variants", type=int, metavar="N", default=100_000, help="in the store (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to put the store (default: a temporary directory)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Creates a store of records, opens it in new processes, first without a catalog, and prints the table."""
    num_variants = arguments.variants
    num_changes = min(100, num_variants // 20)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, stages() as say:
        say("create records")
        root = Path(folder) / "kv"
        open_store(root).close()
        record_bytes = add_records(root, num_variants, seed=0)
        cases = []
        for catalog in (False, True, True):
            say("open with a catalog" if catalog else "open without a catalog")
            command = [sys.executable, "-m", "scripts.benchmarks.store", str(root), str(num_changes), "100"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2])
            cases.append({"catalog": catalog, **json.loads(done.stdout.splitlines()[-1])})
            _remove_records(root, seed=1, num_variants=num_changes)
    _print(cases, record_bytes)
    shapes = {"tokens": NUM_TOKENS, "prefix_chunks": PREFIX_CHUNKS, "planned_chunks": PLANNED_CHUNKS}
    shapes |= {"variants_per_chunk": VARIANTS_PER_CHUNK, "record_bytes": record_bytes, "model": "Llama-3-8B"}
    return {"benchmark": "store", **environment(), "shapes": shapes, "cases": cases}


def _remove_records(root: Path, seed: int, num_variants: int) -> None:
    for record in records(num_variants, seed):
        (root / IDENTITY.namespace / "records" / f"{record.variant_id}.json").unlink()


def _print(cases: list[dict[str, Any]], record_bytes: int) -> None:
    rows = []
    for name, value in cases[0].items():
        if isinstance(value, dict):
            rows.append((name, *(f"{1e3 * c[name]['wall_s']:.2f} ({1e3 * c[name]['cpu_s']:.2f})" for c in cases)))
        elif name.endswith("bytes_per_variant"):
            rows.append((name, *(str(case[name]) for case in cases)))
    title = f"{cases[0]['variants']} variants, records of {record_bytes} bytes; ms of wall-clock (processor) time"
    show(("", *("catalog" if case["catalog"] else "no catalog" for case in cases)), rows, title)


if __name__ == "__main__":
    figures = measure_index(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(
        json.dumps(
            {
                key: dataclasses.asdict(figure) if isinstance(figure, CallCost) else figure
                for key, figure in figures.items()
            }
        )
    )
