"""Paged decode attention on the device: bytes of keys and values per second, compared with JAX's own kernel where that
is possible (whole pages, one length per request)."""

from __future__ import annotations

import functools
import statistics
import warnings

import jax
import jax.numpy as jnp

from ccjax.kernels.decode import decode_attention
from ccjax.kernels.rope import llama3_frequencies
from scripts.gpucheck.ceilings import ceiling
from scripts.gpucheck.record import CheckRecord, table
from scripts.gpucheck.timing import calls_per_sample, interleaved, random_bfloat16, ratio, timed_jax

SUITE = "decode_timing"
PAGE_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 32, 8, 128
SIZES = ((1, 16384), (8, 8192), (32, 4096), (64, 8192))
"""Requests, and tokens of each one's context."""


def time_size(record: CheckRecord, num_requests: int, num_tokens: int) -> None:
    """Times one size, alternating between implementations."""
    num_entries = num_tokens // PAGE_SIZE
    num_pages = num_requests * num_entries
    q = random_bfloat16(0, num_requests, NUM_HEADS, HEAD_DIM)
    k, v = (random_bfloat16(seed, NUM_KV_HEADS, num_pages, PAGE_SIZE, HEAD_DIM) for seed in (1, 2))
    tables = jax.random.permutation(jax.random.key(3), num_pages).astype(jnp.int32).reshape(num_requests, num_entries)
    full = jnp.full(tables.shape, PAGE_SIZE, jnp.int32)
    starts = jnp.broadcast_to(jnp.arange(num_entries, dtype=jnp.int32)[None] * PAGE_SIZE, tables.shape)
    frequencies = llama3_frequencies(HEAD_DIM, 500000.0, factor=8.0)
    scale = HEAD_DIM**-0.5
    ours = functools.partial(decode_attention, scale=scale, implementation="triton")
    num_bytes = k.nbytes + v.nbytes
    calls = calls_per_sample(num_bytes / 2e12)
    timed = {
        "triton": timed_jax(
            lambda q, k, v, table, used: ours(q, k, v, page_table=table, page_length=used),
            (q, k, v, tables, full),
            calls,
        ),
        "triton, rotated": timed_jax(
            lambda q, k, v, table, used, start: ours(
                q, k, v, page_table=table, page_length=used, page_start=start, k_frequencies=frequencies
            ),
            (q, k, v, tables, full, starts),
            calls,
        ),
    }
    with warnings.catch_warnings():  # deprecated from jax 0.11 on, as is its backend
        warnings.simplefilter("ignore")
        try:
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

            lengths = jnp.full(num_requests, num_tokens, jnp.int32)
            timed["jax paged_attention"] = timed_jax(
                lambda q, k, v, table, length: paged_attention(q * scale, k, v, table, length),
                (q, k, v, tables, lengths),
                calls,
            )
        except Exception as error:  # another jax may have removed it; ours are still timed
            record.say(f"jax paged_attention: {type(error).__name__}: {error!s:.200}")
    seconds = interleaved(timed, 3 if record.is_quick else 7)
    for name, samples in seconds.items():
        median = statistics.median(samples)
        record.add(
            SUITE,
            implementation=name,
            num_requests=num_requests,
            num_tokens=num_tokens,
            ms=1e3 * median,
            gbps=num_bytes / median / 1e9,
            against_triton=ratio(samples, seconds["triton"]),
        )
    record.say(f"decode timed: {num_requests} requests of {num_tokens:,} tokens")


def run(record: CheckRecord) -> None:
    """Times every size while there is time."""
    for num_requests, num_tokens in SIZES[1:2] if record.is_quick else SIZES:
        if record.seconds_left() > 0:
            time_size(record, num_requests, num_tokens)


def tables(record: CheckRecord) -> list[str]:
    """One row per size and implementation."""
    best = ceiling(record, "copy_gbps")
    rows = [
        (
            f"{row['num_requests']} x {row['num_tokens']:,}, {row['implementation']}",
            row["ms"],
            row["gbps"],
            None if best is None else 100 * row["gbps"] / best,
            row["against_triton"],
        )
        for row in record.rows.get(SUITE, [])
    ]
    title = "Paged decode, Llama-3-8B heads, pages of 16, bfloat16; bytes are keys and values"
    return [table(title, ("requests x tokens", "ms", "GB/s", "% of copy", "time / triton"), rows)]
