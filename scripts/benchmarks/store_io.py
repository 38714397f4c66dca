"""Disk tier against plain files: write, cold and warm read of 8 MB and 64 MB variants on one file system.

Plain files show the disk's own speed: one `write` and an `fsync`, one `readv` into existing memory. The tier also
allocates memory, verifies checksums, and commits a record. Needs Linux (for cold reads the kernel
is told to drop the file).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show
from ccjax.store import KVSpec, ShardRecord, StoreIdentity, TensorStoreTier
from scripts.benchmarks.common import drop_from_cache, environment, median, stages

QUICK = {"repetitions": 2}
SHAPES = {"8 MB": (KVSpec(16, 8, 128, "bfloat16"), 128), "64 MB": (KVSpec(32, 8, 128, "bfloat16"), 512)}
"""Variant -> KV shape and tokens: 16 layers of half a megabyte; Llama-3-8B's 32 layers of two."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", type=Path, help="where to write (default: the directory for temporary files)")
    parser.add_argument("--repetitions", type=positive_int, default=9, help="runs per case; the median counts")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases in alternation and prints the table."""
    repetitions = arguments.repetitions
    rows = []
    with stages() as say:
        for name, (kv_spec, num_tokens) in SHAPES.items():
            say(f"write and read {name}")
            folder = Path(tempfile.mkdtemp(prefix="ccjax-bench-", dir=arguments.directory))
            try:
                cases = _Cases(folder, kv_spec, num_tokens)
                for _ in range(repetitions):
                    cases.run_once()
            finally:
                shutil.rmtree(folder)
            rows.append(cases.figures(name))
    _print(rows)
    shapes = {name: {"kv": list(spec.shape(tokens)), "dtype": spec.dtype} for name, (spec, tokens) in SHAPES.items()}
    return {"benchmark": "store_io", **environment(), "shapes": shapes, "repetitions": repetitions, "cases": rows}


class _Cases:
    """One size of variant, in the tier and in plain files; `seconds` are the runs by (operation, who)."""

    def __init__(self, folder: Path, kv_spec: KVSpec, num_tokens: int) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._folder = folder
        self._kv_spec = kv_spec
        self._num_tokens = num_tokens
        self._tier = TensorStoreTier((folder / "store").as_uri(), kv_spec, StoreIdentity("benchmark"))
        self._kv = np.random.default_rng(0).standard_normal(kv_spec.shape(num_tokens), np.float32)
        self._kv = self._kv.astype(kv_spec.np_dtype)
        self._buffer = np.ones_like(self._kv)  # touched, so that all its pages exist
        self._number = 0

    def run_once(self) -> None:
        """Writes a new variant each way, then reads it cold and warm."""
        self._number += 1
        name = f"v{self._number}"
        plain = self._folder / name
        num_bytes = self._kv.nbytes
        record = ShardRecord(name, "chunk", self._num_tokens, num_bytes, {})
        ways: list[tuple[str, Callable[[], Any]]] = [
            ("tier", lambda: self._tier.write(record, self._kv)),
            ("plain", lambda: _write(plain, self._kv)),
        ]
        for who, call in ways[:: 1 if self._number % 2 else -1]:  # the disk is busier for the second one
            self._time("write", who, call)
        for temperature in ("cold", "warm"):
            reads = [("tier", lambda: self._read_tier(name)), ("plain", lambda: _read(plain, self._buffer))]
            for who, call in reads[:: 1 if self._number % 2 else -1]:
                if temperature == "cold":
                    drop_from_cache(self._folder)
                got = self._time(f"{temperature} read", who, call)
                assert got.view(np.uint16).sum() == self._kv.view(np.uint16).sum()

    def figures(self, name: str) -> dict[str, Any]:
        """Medians, rates and ratios of this size."""
        operations = list(dict.fromkeys(operation for operation, _ in self.seconds))
        row: dict[str, Any] = {"variant": name, "num_bytes": self._kv.nbytes}
        for operation in operations:
            tier_s, plain_s = (median(self.seconds[operation, who]) for who in ("tier", "plain"))
            row[operation.replace(" ", "_")] = {
                "tier_gb_per_s": self._kv.nbytes / tier_s / 1e9,
                "plain_gb_per_s": self._kv.nbytes / plain_s / 1e9,
                "ratio": plain_s / tier_s,
                "tier_runs_s": self.seconds[operation, "tier"],
                "plain_runs_s": self.seconds[operation, "plain"],
            }
        return row

    def _time(self, operation: str, who: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        self.seconds.setdefault((operation, who), []).append(time.perf_counter() - started)
        return result

    def _read_tier(self, name: str) -> np.ndarray:
        """Starts all layers, then awaits them in order, as a prefill does."""
        reader = self._tier.open(name)
        num_layers = self._kv_spec.num_layers
        reader.start(0, num_layers)
        for layer in range(num_layers):
            reader.wait(layer, layer + 1)
        return reader.wait(0, num_layers)


def _write(path: Path, kv: np.ndarray) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        rest = kv.view(np.uint8).data.cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, buffer: np.ndarray) -> np.ndarray:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        rest = buffer.view(np.uint8).data.cast("B")
        while rest:
            rest = rest[os.readv(descriptor, [rest]) :]
    finally:
        os.close(descriptor)
    return buffer


def _print(rows: list[dict[str, Any]]) -> None:
    cells = [
        (row["variant"], name.replace("_", " "), f"{rates['tier_gb_per_s']:.2f}", f"{rates['plain_gb_per_s']:.2f}")
        + (f"{rates['ratio']:.0%}",)
        for row in rows
        for name, rates in ((name, row[name]) for name in ("write", "cold_read", "warm_read"))
    ]
    show(("variant", "operation", "tier", "plain", "ratio"), cells, "Disk tier against plain files, GB/s")
