"""Kernels on this machine's device: attention of a prefill, paged decode and RoPE, against XLA and the device's limits.

Llama-3-8B's heads, in bfloat16 (float32 on a CPU), random numbers. Many calls are one compiled loop, so that no time of
Python is included; the ways of a case alternate. A barrier makes the inputs of each turn depend on the last result, so
that XLA neither moves work out of the loop nor merges turns. A way fails that differs from the first of its case.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  shapes
  limits: `tflops` of a square product; `gbps`, read plus written, of a pass over an array
  cases[]: `kernel` (attention | decode | rope), `case`, `implementation`; `ms` (median of `runs_ms`); `tflops` on
    visible pairs (attention) or `gbps` of keys and values (decode), read plus written (rope); `share` of that limit;
    `difference`, relative, from the first way; `note`: why a figure is missing or wrong
  failures[]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show, text
from ccjax.kernels.attention import attention
from ccjax.kernels.decode import decode_attention
from ccjax.kernels.dispatch import BEST
from ccjax.kernels.inputs import AttentionInputs, KVPages, PageTables
from ccjax.kernels.rope import llama3_frequencies, move_keys, rotation_rows
from scripts.benchmarks.common import environment, median, stages

QUICK = {"context_tokens": 256, "repetitions": 2}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SEGMENTS, PAGE_TOKENS = 32, 8, 128, 16, 16
SCALE, FREQUENCIES = HEAD_DIM**-0.5, llama3_frequencies(HEAD_DIM, 500000.0, factor=8.0)
SAME = 3e-2
"""Largest difference of two ways; rounding to bfloat16 alone is 0.004."""
_SAMPLE_S = 0.02


class Way(NamedTuple):
    """One way to compute a case; `work` in operations for attention, else in bytes."""

    kernel: str
    case: str
    implementation: str
    function: Callable[..., jax.Array]
    arrays: Sequence[jax.Array]
    work: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--context-tokens", type=positive_int, help="of a context (default 16384, on a CPU 1024)")
    parser.add_argument("--repetitions", type=positive_int, default=7, help="samples per way; the median counts")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the limits, then the ways of each case in turn; prints the table."""
    platform = jax.default_backend()
    context = arguments.context_tokens or (1024 if platform == "cpu" else 16384)
    rows: list[dict[str, Any]] = []
    with stages() as say:
        say("limits")
        limits = _limits(platform, arguments.repetitions)
        for ways in (*_attention(context, platform), *_decode(context, platform), _rope(context, platform)):
            say(f"{ways[0].kernel}, {ways[0].case}")
            rows += _measure(ways, limits, arguments.repetitions)
    names = ("kernel", "case", "implementation")
    forms = {"ms": ".3g", "tflops": ".3g", "gbps": ".3g", "share": ".0%", "difference": ".2g"}
    cells = [(*(row[key] for key in names), *(text(row.get(key), form) for key, form in forms.items())) for row in rows]
    notes = [f"{row['implementation']}, {row['case']}: {row['note']}" for row in rows if "note" in row]
    show((*names, *forms), cells, f"limits: {limits['tflops']:.3g} TFLOP/s, {limits['gbps']:.3g} GB/s", says=notes)
    failed = [row for row in rows if row.get("note", "").startswith("FAILED")]
    shapes = {"context_tokens": context, "heads": NUM_HEADS, "kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    shapes |= {"segments": NUM_SEGMENTS, "page_tokens": PAGE_TOKENS, "dtype": str(_dtype())}
    failures = [" ".join(row[key] for key in (*names, "note")) for row in failed]
    figures = {"shapes": shapes, "limits": limits, "cases": rows, "failures": failures}
    return {"benchmark": "kernels", **environment(), **figures}


def _dtype() -> np.dtype[Any]:
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


def _random(seed: int, *shape: int) -> jax.Array:
    """Signed normal numbers; zeros would run faster than real data."""
    return jax.random.normal(jax.random.key(seed), shape, _dtype())


def _attention(context: int, platform: str) -> Iterator[list[Way]]:
    """15 % of a context, scattered, and all of it, each with the mass and without; cuDNN has only the last."""
    slots = jnp.arange(context, dtype=jnp.int32)
    k, v = (_random(seed, context, NUM_KV_HEADS, HEAD_DIM) for seed in (1, 2))
    question = context // 64
    before = np.random.default_rng(0).choice(context - question, context * 5 // 32 - question, replace=False)
    some = jnp.asarray(np.concatenate([np.sort(before), np.arange(context - question, context)]).astype(np.int32))

    def attend(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, *segment: Any, name: str) -> jax.Array:
        mass: dict[str, Any] = {"k_segment": segment[0], "num_segments": NUM_SEGMENTS} if segment else {}
        inputs = AttentionInputs(q_pos=q_pos, k_pos=k_pos, **mass)
        result = attention(q, k, v, inputs, scale=SCALE, implementation=name)
        return result.out if result.mass is None else jnp.concatenate([result.out.astype(jnp.float32), result.mass], -1)

    def cudnn(q: Any, k: Any, v: Any, *_: Any) -> jax.Array:
        batch = q[None], k[None], v[None]
        return jax.nn.dot_product_attention(*batch, scale=SCALE, is_causal=True, implementation="cudnn")[0]

    for case, q_pos, names in (("15 %", some, [BEST[platform], "xla"]), ("100 %", slots, [BEST[platform]])):
        arrays = (_random(3, len(q_pos), NUM_HEADS, HEAD_DIM), k, v, q_pos, slots)
        work = 4 * HEAD_DIM * NUM_HEADS * int((np.asarray(q_pos, np.int64) + 1).sum())
        for what, given in (("mass, ", (*arrays, slots * NUM_SEGMENTS // context)), ("", arrays)):
            calls = {name: functools.partial(attend, name=name) for name in names}
            calls |= {"cudnn": cudnn} if platform == "gpu" and case == "100 %" and not what else {}
            yield [Way("attention", what + case, name, call, given, work) for name, call in calls.items()]


def _decode(context: int, platform: str) -> Iterator[list[Way]]:
    """One request with the whole context and 32 with a quarter each."""

    def attend(q: Any, k: Any, v: Any, table: Any, length: Any, rotation: Any, name: str) -> jax.Array:
        inputs, how = (KVPages(k, v), PageTables(table, length, rotation)), {"k_frequencies": FREQUENCIES}
        return decode_attention(q, *inputs, **how, scale=SCALE, implementation=name).out

    for count, num_tokens in ((1, context), (32, context // 4)):
        shape = (count, num_tokens // PAGE_TOKENS)
        k, v = (_random(seed, NUM_KV_HEADS, shape[0] * shape[1], PAGE_TOKENS, HEAD_DIM) for seed in (4, 5))
        table = jax.random.permutation(jax.random.key(6), shape[0] * shape[1]).astype(jnp.int32).reshape(shape)
        length = jnp.full(shape, PAGE_TOKENS, jnp.int32)
        start = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32) * PAGE_TOKENS, shape)
        arrays = (_random(7, count, NUM_HEADS, HEAD_DIM), k, v, table, length, rotation_rows(start, FREQUENCIES))
        calls = {name: functools.partial(attend, name=name) for name in (BEST[platform], "xla")}
        case, num_bytes = f"{count} x {num_tokens:,}", k.nbytes + v.nbytes
        yield [Way("decode", case, name, call, arrays, num_bytes) for name, call in calls.items()]


def _rope(context: int, platform: str) -> list[Way]:
    """The keys of a layer, eight contexts long, more than any cache holds, moved by one context."""
    x, at = _random(8, 8 * context, NUM_KV_HEADS, HEAD_DIM), jnp.arange(8 * context, dtype=jnp.int32)

    def move(x: Any, at: Any, name: str) -> jax.Array:
        return move_keys(x, at, at + context, FREQUENCIES, implementation=name)

    case, names = f"{8 * context:,} keys", dict.fromkeys((BEST[platform], "xla"))
    return [Way("rope", case, name, functools.partial(move, name=name), (x, at), 2 * x.nbytes) for name in names]


def _measure(ways: Sequence[Way], limits: dict[str, float], repetitions: int) -> list[dict[str, Any]]:
    """A row per way."""
    key, unit = ("tflops", 1e12) if ways[0].kernel == "attention" else ("gbps", 1e9)
    rows: list[dict[str, Any]] = [
        {"kernel": way.kernel, "case": way.case, "implementation": way.implementation} for way in ways
    ]
    samples: dict[int, Callable[[], float]] = {}
    wanted: np.ndarray | None = None
    for number, (way, row) in enumerate(zip(ways, rows, strict=True)):
        try:
            got, samples[number] = _looped(way.function, way.arrays, 2 * way.work / (limits[key] * unit))
        except Exception as error:  # the others are still timed
            why = " ".join(f"{type(error).__name__}: {error!s:.300}".split())
            row["note"] = why if way.implementation == "cudnn" else f"FAILED {why}"
            continue
        wanted = got if wanted is None else wanted
        assert got is not None and wanted is not None
        row["difference"] = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        if not row["difference"] < SAME:
            row["note"] = f"FAILED wanted a difference of at most {SAME}"
    runs_s = {number: [] for number in samples}
    for turn in range(repetitions):
        for number in list(samples)[:: -1 if turn % 2 else 1]:
            runs_s[number].append(samples[number]())
    for number, seconds in runs_s.items():
        rate = ways[number].work / median(seconds) / unit
        rows[number] |= {"ms": 1e3 * median(seconds), "runs_ms": [1e3 * second for second in seconds]}
        rows[number] |= {key: rate, "share": rate / limits[key]}
    return rows


def _looped(function: Callable[..., Any], arrays: Sequence[Any], expected_s: float) -> tuple[Any, Callable[[], float]]:
    """The result of a function, and what runs it often enough and returns the seconds of one call."""
    calls = max(1, min(500, round(_SAMPLE_S / expected_s)))

    def run(*arrays: Any) -> Any:
        def turn(_: Any, last: Any) -> Any:
            held, _ = lax.optimization_barrier((arrays, last))
            return function(*held)

        shape = jax.eval_shape(function, *arrays)
        return lax.fori_loop(0, calls, turn, jnp.zeros(shape.shape, shape.dtype))

    compiled = jax.jit(run).lower(*arrays).compile()

    def sample() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        return (time.perf_counter() - start) / calls

    return np.asarray(compiled(*arrays).astype(jnp.float32)), sample


def _limits(platform: str, repetitions: int) -> dict[str, float]:
    """Of a product of two square matrices, and of one pass over an array: each byte changes, so that XLA keeps it."""
    size, count, flops, rate = (512, 1 << 20, 1e10, 1e9) if platform == "cpu" else (8192, 1 << 28, 4e14, 2e12)
    _, product = _looped(jnp.matmul, (_random(9, size, size), _random(10, size, size)), 2 * size**3 / flops)
    _, copy = _looped(lambda x: x ^ np.uint32(1), (jnp.arange(count, dtype=jnp.uint32),), 8 * count / rate)
    product_s, copy_s = (median([sample() for _ in range(repetitions)]) for sample in (product, copy))
    return {"tflops": 2e-12 * size**3 / product_s, "gbps": 8e-9 * count / copy_s}
