"""Hits and computed tokens of a retrieval trace under the engine's own policies, and the replicas that these need.

Replays the trace without a model (`trace_replay`): the first half of the requests fills the memory, the second is
measured. A passage that was reused in part counts as a hit. Figures are exact for strategies that look at no attention
masses (`prefix`, `reuse`), and close for `auto` and for others with --recompute-ratio.

Sizing is a closed form (`replicas_for`): a request takes the longer of computing and loading and answers one token;
decode steps and storing new KV are not in it. Each replica has the budget for itself.

JSON keys: `shapes`: options, `distinct_tokens` of all passages, `kv_bytes_per_token`; `full`: as a case, without reuse;
`cases[]`: `strategy`, `policy`, `budget_share` (of the KV of all passages, each counted once), `budget_bytes`, `hits`,
`documents`, `hit_ratio`, `prompt_tokens`, `computed_tokens`, `computed_share`, `service_s` (mean), `replicas` (null if
no number is enough), `variants` held at the end, `decide_ms` (planning and storing on this machine: `mean`, `p99` ...).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show, text
from ccjax.loading.prefill_profile import PrefillProfile
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.presets import preset
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.policy.strategies import STRATEGIES
from ccjax.text import load_tokenizer
from scripts.benchmarks.common import BenchmarkError, data_folder, environment, existing, rows_of, spread, stages, timed
from scripts.benchmarks.trace_replay import QUESTION_TOKENS, SYSTEM_TOKENS, Passages, Replay, Served

POLICIES = ("pgdsf", "gdsf", "lru", "lfu", "saved_seconds")
QUICK = {"requests": 100, "budgets": [0.1], "policies": ["lru", "pgdsf"]}
_GRID_POINTS = (0, 1024, 8192, 65536), (1, 512, 2048, 8192, 65536)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add, count, shares = parser.add_argument, positive_int, {"type": float, "nargs": "+"}
    add("--data", type=Path, help="folder with rag_trace/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    text = "JSON lines with `docs`, texts in NAME_docs.jsonl beside NAME_trace.jsonl (default: MuSiQue's)"
    add("--trace", type=Path, metavar="FILE", help=text)
    add("--drawn", type=count, metavar="N", help="draw lists of N passages by Zipf's law instead of a trace")
    add("--zipf", type=float, default=0.9, help="exponent of --drawn, of passages and of lists (%(default)s)")
    add("--passage-tokens", type=count, default=128, help="of passages without text (%(default)s)")
    add("--passages", type=count, default=5, help="of a request, the best (%(default)s)")
    add("--requests", type=count, default=1000, help="half to fill, half to measure (%(default)s)")
    add("--strategies", nargs="+", choices=STRATEGIES, default=["auto", "prefix"], help="ways to reuse")
    add("--recompute-ratio", type=float, help="of passages behind another prefix (default: as the strategy decides)")
    add("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="of eviction (default: all)")
    text = "host memory, as shares of all passages' KV (%(default)s)"
    add("--budgets", **shares, default=[0.025, 0.05, 0.1, 0.2, 0.4], help=text)
    add("--model", default="llama3-8b", help="shape for sizing: a preset or LAYERSxWIDTH (%(default)s)")
    add("--flops-per-s", type=float, default=4.9e14, help="that prefills reach (default half an H100's peak)")
    add("--profile", type=Path, metavar="FILE", help="T(cached, new) of scripts/profile_prefill.py instead")
    add("--link-bytes-per-s", type=float, default=25e9, help="from host memory to the device (%(default)g)")
    add("--rate", type=float, default=100.0, help="requests a second to size for (%(default)g)")
    add("--ttft-s", type=float, default=0.2, help="mean time to first token to size for (%(default)g)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Replays the trace with every strategy, budget and policy, prints a table.

    Raises:
      BenchmarkError: the data or an option is invalid.
    """
    try:
        config, requests = preset(options.model, 128_256), _requests(options)
        grid = prefill_grid(config, options.flops_per_s)
        if options.profile is not None:
            grid = PrefillProfile.from_json(json.loads(existing(options.profile).read_text("utf-8"))).grid
    except ValueError as error:
        raise BenchmarkError(str(error)) from error
    distinct = sum(dict(passage for passages in requests for passage in passages).values())
    kv_bytes = 4 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token, in bfloat16

    def figures(served: Sequence[Served]) -> dict[str, Any]:
        load_s = kv_bytes / options.link_bytes_per_s
        service_s = [max(grid.prefill_s(s.reused, s.computed), s.reused * load_s) for s in served]
        replicas = replicas_for(service_s, options.rate, options.ttft_s)
        return sums(served) | {"service_s": float(np.mean(service_s)), "replicas": replicas}

    cases, num_past = [], len(requests) // 2
    with stages() as say:
        for strategy, share, policy in itertools.product(options.strategies, options.budgets, options.policies):
            say(f"{strategy}, {share:.1%}, {policy}")
            budget = round(share * distinct)
            replay = Replay(strategy, policy, budget, grid=grid, recompute_ratio=options.recompute_ratio)
            answers = [timed(functools.partial(replay.answer, passages)) for passages in requests][num_past:]
            decide_s, served = [seconds for seconds, _ in answers], [one for _, one in answers]
            nodes = len(replay.index)
            replay.store.close()
            about = {"strategy": strategy, "policy": policy, "budget_share": share, "budget_bytes": budget * kv_bytes}
            about |= {"variants": nodes, "decide_ms": spread(decide_s)}
            cases.append(about | figures(served))
    fixed = SYSTEM_TOKENS + QUESTION_TOKENS
    full = [Served(fixed + sum(n for _, n in passages), 0, len(passages), 0) for passages in requests[num_past:]]
    names = ("model", "requests", "passages", "recompute_ratio", "flops_per_s", "link_bytes_per_s", "rate", "ttft_s")
    shapes = {name: getattr(options, name) for name in names}
    shapes |= {"distinct_tokens": distinct, "kv_bytes_per_token": kv_bytes}
    found = {"benchmark": "trace", **environment(), "shapes": shapes, "full": figures(full), "cases": cases}
    _print(found)
    return found


def sums(served: Sequence[Served]) -> dict[str, Any]:
    """Sums and ratios over requests."""
    hits, documents = sum(s.hits for s in served), sum(s.documents for s in served)
    computed = sum(s.computed for s in served)
    prompt = computed + sum(s.reused for s in served)
    counts = {"hits": hits, "documents": documents, "hit_ratio": hits / documents}
    return counts | {"prompt_tokens": prompt, "computed_tokens": computed, "computed_share": computed / prompt}


def prefill_grid(config: LlamaConfig, flops_per_s: float) -> PrefillGrid:
    """T(cached, new) by FLOPs: 2 for each weight and token, 4 for each pair of query and key value."""
    projections = 2 * config.d_model * config.head_dim * (config.num_heads + config.num_kv_heads)
    weights = projections + 3 * config.d_model * config.d_ff * max(1, config.num_experts_per_token)
    pair = 4 * config.num_heads * config.head_dim

    def seconds(cached: int, new: int) -> float:
        return config.num_layers * new * (2 * weights + pair * (cached + new / 2)) / flops_per_s

    cached, new = _GRID_POINTS
    return PrefillGrid(cached, new, tuple(tuple(seconds(c, n) for n in new) for c in cached))


def replicas_for(service_s: Sequence[float], rate: float, ttft_s: float) -> int | None:
    """The fewest replicas `R` with a mean TTFT of at most `ttft_s`; None if no number is enough.

    Requests arrive at random (Poisson) and are shared equally; each replica is an M/G/1 queue, whose mean wait is
    `l E[S^2] / (2 (1 - l E[S]))` with `l = rate / R` (Pollaczek and Khinchine). So wait + E[S] <= ttft_s if
    `R >= rate (E[S] + E[S^2] / (2 (ttft_s - E[S])))`.
    """
    mean_s, square = float(np.mean(service_s)), float(np.mean(np.square(service_s)))
    if mean_s >= ttft_s:
        return None
    return max(1, math.ceil(rate * (mean_s + square / (2 * (ttft_s - mean_s)))))


def drawn(options: argparse.Namespace) -> list[Passages]:
    """Lists of distinct passages drawn with odds `rank ** -zipf`, four for each passage, drawn by the same law."""
    if options.passages > options.drawn:
        raise ValueError(f"--passages: wanted at most {options.drawn}, those of --drawn, got {options.passages}")
    rng = np.random.default_rng(0)

    def draw(count: int) -> Callable[[int], list[int]]:
        edges = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -options.zipf)
        return lambda size: np.searchsorted(edges, edges[-1] * rng.random(size)).tolist()

    one, lists = draw(options.drawn), []
    for _ in range(4 * options.drawn):
        numbers: dict[int, None] = {}
        while len(numbers) < options.passages:
            numbers |= dict.fromkeys(one(options.passages))
        lists.append([(number, options.passage_tokens) for number in [*numbers][: options.passages]])
    return [lists[which] for which in draw(len(lists))(options.requests)]


def _requests(options: argparse.Namespace) -> list[Passages]:
    if options.drawn is not None:
        return drawn(options)
    data = data_folder(options.data)
    path = options.trace or data / "rag_trace" / "musique_trace.jsonl"
    rows, docs = rows_of(path)[: options.requests], path.with_name(path.name.replace("_trace", "_docs"))
    lengths: dict[int, int] = {}
    if docs != path and docs.exists():
        tokenizer = load_tokenizer(existing(data / "tokenizer_llama3"))
        assert tokenizer is not None
        for row in rows_of(docs):
            lengths[row["id"]] = len(tokenizer.encode(f"{row['title']}\n{row['text']}\n\n", allow_special=False))
    if len(rows) < 2 or not all(isinstance(row.get("docs"), list) and row["docs"] for row in rows):
        raise ValueError(f"{path}: wanted at least two objects with `docs`, the numbers of passages")
    numbers = [tuple(dict.fromkeys(row["docs"]))[: options.passages] for row in rows]
    usual: int = options.passage_tokens
    return [[(number, lengths.get(number, usual)) for number in each] for each in numbers]


def _print(found: dict[str, Any]) -> None:
    head = (
        "strategy",
        "budget",
        "policy",
        "passages reused",
        "tokens computed",
        "ms a request",
        "replicas",
        "ms deciding",
    )
    rows = [
        (
            case["strategy"],
            f"{case['budget_share']:.1%}, {case['budget_bytes'] / 1e9:.2f} GB",
            case["policy"],
            *(f"{case[name]:.1%}" for name in ("hit_ratio", "computed_share")),
            f"{1e3 * case['service_s']:.1f}",
            text(case["replicas"]) or "none is enough",
            f"{case['decide_ms']['mean']:.2f}",
        )
        for case in found["cases"]
    ]
    shapes, full = found["shapes"], found["full"]
    goal = f"mean TTFT <= {shapes['ttft_s']:g} s at {shapes['rate']:g} requests/s"
    replicas = text(full["replicas"]) or "no number of"
    says = [f"Without reuse: {1e3 * full['service_s']:.1f} ms a request, {replicas} replicas."]
    show(head, rows, f"{shapes['model']}, {goal}", says)
