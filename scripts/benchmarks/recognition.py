"""Finding known text in prompts: an index of stored chunks, prompts half of which are chunks or slices of them.

The chunks are random token ids, as different from each other as texts can be; a prompt alternates between the middle of
a chunk, or all of it, and tokens that no chunk has. What is found is compared with what was put in.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  chunks, chunk_tokens, prompt_tokens, prompts, load (average of the machine's load over the last minute, at the end)
  add_s (to index all), bytes_per_token (of the index, token ids included), resident_bytes_per_token (what the process
    grew by, chunk ids included)
  find_ms: `p50`, `p95`, `p99` of the time to find a prompt's known text, verified; cpu_ms: the same of the thread's
    CPU time
  repetitive_ms: `p50`, `p95`, `p99` for prompts that consist of one line over and over, which chunks have, too
  found_share: known tokens that were found, of those that the prompts have
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np

from ccjax.cache.known_text import KnownText
from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show
from ccjax.types import ChunkId
from scripts.benchmarks.common import environment, resident_bytes, stages

QUICK = {"chunks": 20_000, "prompts": 50}
VOCABULARY = 49_152


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--chunks", type=positive_int, default=1_000_000, help="stored chunks (%(default)s)")
    add("--chunk-tokens", type=positive_int, default=200, help="tokens of each (%(default)s)")
    add("--prompt-tokens", type=positive_int, default=8192, help="half of them known (%(default)s)")
    add("--prompts", type=positive_int, default=1000, help="prompts to find known text in (%(default)s)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints a table."""
    random, length = np.random.default_rng(0), arguments.chunk_tokens
    with stages() as say:
        say("index the chunks")
        before, index, add_s, kept = resident_bytes(), KnownText(), 0.0, []
        line = random.integers(0, VOCABULARY, 30).astype(np.int32)
        for number in range(arguments.chunks):
            ids = random.integers(0, VOCABULARY, length).astype(np.int32)
            if number % max(1, arguments.chunks // 1000) == 0:
                kept.append(ids)
            elif number % 1000 == 1:
                ids = np.resize(line, length)
                ids[-10:] = random.integers(0, VOCABULARY, 10)
            started = time.perf_counter()
            index.add(ChunkId(f"{number:064x}"), ids)
            add_s += time.perf_counter() - started
        num_stored = arguments.chunks * length
        num_bytes, grown = index.nbytes, resident_bytes() - before
        say("find known text")
        times, shares = [], []
        for _ in range(arguments.prompts):
            prompt, num_known = _prompt(random, kept, arguments.prompt_tokens)
            found, *taken = _timed(index, prompt)
            times.append(taken)
            shares.append(found / num_known)
        say("find repetitive text")
        repetitive = [_timed(index, np.resize(line, arguments.prompt_tokens))[1:] for _ in range(20)]
    wall, cpu = np.asarray(times).T * 1e3
    figures = {
        "benchmark": "recognition",
        **environment(),
        "chunks": arguments.chunks,
        "chunk_tokens": length,
        "prompt_tokens": arguments.prompt_tokens,
        "prompts": arguments.prompts,
        "load": round(os.getloadavg()[0], 1),
        "add_s": add_s,
        "bytes_per_token": num_bytes / num_stored,
        "resident_bytes_per_token": grown / num_stored,
        "find_ms": _percentiles(wall),
        "cpu_ms": _percentiles(cpu),
        "repetitive_ms": _percentiles(np.asarray(repetitive)[:, 0] * 1e3),
        "found_share": float(np.mean(shares)),
    }
    rows = [
        [name, *(f"{figures[key][part]:.2f} ms" for part in ("p50", "p95", "p99"))]
        for name, key in (("find", "find_ms"), ("CPU time", "cpu_ms"), ("repetitive text", "repetitive_ms"))
    ]
    show(["", "p50", "p95", "p99"], rows)
    print(
        f"{arguments.chunks:,} chunks of {length} tokens: {figures['bytes_per_token']:.2f} bytes a token, indexed in "
        f"{add_s:.0f} s; {figures['found_share']:.1%} of the known tokens were found; load {figures['load']}"
    )
    return figures


def _prompt(random: np.random.Generator, kept: list[np.ndarray], num_tokens: int) -> tuple[np.ndarray, int]:
    """A prompt, and how many of its tokens are known."""
    parts, num_known = [], 0
    while sum(map(len, parts)) < num_tokens:
        chunk = kept[random.integers(len(kept))]
        start = int(random.integers(len(chunk) // 3)) if random.integers(2) else 0
        known = chunk[start : len(chunk) - start]
        parts += [known, random.integers(0, VOCABULARY, len(known)).astype(np.int32)]
        num_known += len(known)
    return np.concatenate(parts), num_known


def _timed(index: KnownText, prompt: np.ndarray) -> tuple[int, float, float]:
    """Tokens found, seconds, and CPU seconds of this thread."""
    started, cpu = time.perf_counter(), time.thread_time()
    found = index.find(prompt)
    return sum(run.end - run.start for run in found), time.perf_counter() - started, time.thread_time() - cpu


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{part}": float(np.percentile(values, part)) for part in (50, 95, 99)}
