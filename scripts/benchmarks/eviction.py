"""Eviction policies: which passages each keeps over one real retrieval trace, at eight tier sizes.

The trace names the passages that a retriever returned for each question, in prompt order. Nothing is computed: sizes
are real (Llama-3 tokens, KV of Llama-3-8B), seconds come from a cost model of its shapes, no system prompt is counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ccjax.cli.progress import bars
from ccjax.evaluation.pages import show, text
from ccjax.models.llama3 import LLAMA3_8B, LlamaConfig
from ccjax.policy.eviction import (
    DEFAULT_POLICY,
    NUM_REMEMBERED,
    POLICIES,
    Entry,
    EntryInfo,
    Lfu,
    RankedPolicy,
    SavedSeconds,
)
from ccjax.policy.reuse import adjusted_overlap, cache_fix_overhead, chunk_context_impact, num_recompute_tokens
from ccjax.text import load_tokenizer
from ccjax.types import ChunkId
from scripts.benchmarks.common import BenchmarkError, data_folder, environment, rows_of

SIZE_PERCENTS = (1, 2, 5, 10, 20, 30, 50, 80)
"""Tier sizes, in percent of the bytes of all distinct passages."""

FLOPS_PER_S = 156e12
"""Half of an A100's bfloat16 peak. It only weighs computing against loading: shares of compute are shares of FLOPs."""
LOAD_BYTES_PER_S = 64e9
"""Host memory to device over PCIe 4.0 x16, from CacheCraft sec. 5.1.1."""
BYTES_PER_VALUE = 2

CCI = chunk_context_impact(1.0, 2.18)
"""0.61, assumed for every passage: CacheCraft sec. 6 (1) has intra-attention 2.18 times inter-attention on average."""
ALPHA = 1.0

ABLATIONS: dict[str, Callable[[], RankedPolicy]] = {
    "lfu, evicted ones remembered": functools.partial(Lfu, num_remembered=NUM_REMEMBERED),
    "saved_seconds, not remembered": functools.partial(SavedSeconds, num_remembered=0),
    **{
        f"saved_seconds, half-life {h:g}": functools.partial(SavedSeconds, half_life=h)
        for h in (100.0, 300.0, 3e3, 1e9)
    },
}


@dataclasses.dataclass(frozen=True)
class Trace:
    """Passage ids of each request in prompt order, and the tokens of each passage."""

    requests: tuple[tuple[ChunkId, ...], ...]
    num_tokens: Mapping[ChunkId, int]

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all passages in requests, each counted once."""
        return sum(self.num_tokens[key] for key in set().union(*self.requests))


@dataclasses.dataclass(frozen=True)
class RooflineModel:
    """Bytes and seconds of a model on one device."""

    config: LlamaConfig = LLAMA3_8B

    @property
    def bytes_per_token(self) -> int:
        """KV of one token: keys and values of all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * BYTES_PER_VALUE

    def prefill_s(self, num_cached: int, num_new: int) -> float:
        """T(cached, new): matrix products of the new tokens, and their causal attention over all; the output head is
        left out. Parts of a prompt add up to the whole: T(0, a) + T(a, b) = T(0, a + b)."""
        return (num_new * self._matmul_flops + self._pair_flops * _num_pairs(num_cached, num_new)) / FLOPS_PER_S

    @functools.cached_property
    def _matmul_flops(self) -> int:
        c = self.config
        attention = 2 * c.d_model * c.head_dim * (c.num_heads + c.num_kv_heads)
        return 2 * c.num_layers * (attention + 3 * c.d_model * c.d_ff)

    @functools.cached_property
    def _pair_flops(self) -> int:
        return 4 * self.config.num_layers * self.config.num_heads * self.config.head_dim


def _num_pairs(num_cached: int, num_new: int) -> int:
    return num_new * num_cached + num_new * (num_new + 1) // 2


@dataclasses.dataclass(slots=True)
class ReplayCounts:
    """Sums over a replay: uses are passages in prompts; seconds are compute seconds of the passages alone."""

    num_uses: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    hit_tokens: int = 0
    compute_s: float = 0.0
    saved_s: float = 0.0
    num_evicted: int = 0
    num_refused: int = 0


class Belady(RankedPolicy):
    """Belady's offline rule, which knows the trace: evicts the farthest next use first, and does not store a new key
    whose next use is farther than the others'.

    With equal sizes no policy has more hits. With unequal sizes it is no bound: it ignores sizes when it chooses, and
    the best choice is NP-hard. It maximises hits, not seconds.
    """

    weighs_new_keys = True

    def __init__(self, requests: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self._next: dict[tuple[str, float], float] = {}
        coming: dict[str, int] = {}
        for now in reversed(range(len(requests))):
            for key in requests[now]:
                self._next[key, now] = coming.get(key, math.inf)
                coming[key] = now

    def worth(self, entry: Entry) -> float:
        """Minus the number of the request that uses it next."""
        return -self._next[entry.key, entry.uses.last_use]


class _Tier:
    """A tier: holds entries within a budget, and evicts those that the policy chooses."""

    def __init__(self, policy: RankedPolicy, budget_bytes: int) -> None:
        self.policy = policy
        self.prefix_of: dict[ChunkId, tuple[ChunkId, ...]] = {}
        self._bytes_of: dict[str, int] = {}
        self._free_bytes = budget_bytes

    def store(
        self, key: ChunkId, prefix: tuple[ChunkId, ...], info: EntryInfo, now: int, pinned: set[str]
    ) -> int | None:
        """Stores `key`; returns the number evicted for it, or None if it was not stored."""
        self.policy.on_insert(key, info, now)
        victims = self.policy.victims(max(0, info.num_bytes - self._free_bytes), pinned=pinned, new_key=key)
        if victims is None or key in victims:
            self.policy.on_remove(key, evicted=False)
            return None
        for victim in victims:
            self.policy.on_remove(victim)
            self._free_bytes += self._bytes_of.pop(victim)
            del self.prefix_of[ChunkId(victim)]
        self.prefix_of[key] = prefix
        self._bytes_of[key] = info.num_bytes
        self._free_bytes -= info.num_bytes
        assert self._free_bytes >= 0
        return len(victims)


def load_trace(data: Path, retriever: str = "docs") -> Trace:
    """The MuSiQue retrieval trace below `data`, with passages tokenized as in a prompt.

    Args:
      retriever: "docs", or "docs_alt" for the second retrieval run over the same questions.

    Raises:
      BenchmarkError: `data` lacks a file.
    """
    tokenizer = load_tokenizer(data / "tokenizer_llama3")
    if tokenizer is None:
        raise BenchmarkError(f"--data: wanted a folder with tokenizer_llama3/ and rag_trace/, got {data}")
    folder = data / "rag_trace"
    requests = tuple(tuple(map(_key, row[retriever])) for row in rows_of(folder / "musique_trace.jsonl"))
    texts = {_key(row["id"]): f"{row['title']}\n{row['text']}\n\n" for row in rows_of(folder / "musique_docs.jsonl")}
    wanted = sorted(set().union(*requests))
    return Trace(requests, {key: len(tokenizer.encode(texts[key], allow_special=False)) for key in wanted})


def replay(policy: RankedPolicy, trace: Trace, budget_bytes: int, cost: RooflineModel) -> ReplayCounts:
    """Savings of one tier of `budget_bytes` under `policy` over the trace, without lower tiers.

    A passage is one entry, with the KV of its last prefill behind the passages before it. A hit recomputes CFO of its
    tokens (CacheCraft eq. 12; `CCI` and `ALPHA` for all; mass on each prefix passage by its tokens), but does not renew
    the entry. As in the engine, all look-ups come first, and a request's passages never evict each other.
    """
    tier = _Tier(policy, budget_bytes)
    outcome = ReplayCounts()
    for now, keys in enumerate(trace.requests):
        lengths = [trace.num_tokens[key] for key in keys]
        hits = [key in tier.prefix_of for key in keys]
        num_new = sum(length for length, hit in zip(lengths, hits, strict=True) if not hit)
        new_s = cost.prefill_s(sum(lengths) - num_new, num_new) / num_new if num_new else 0.0
        pinned: set[str] = {key for key, hit in zip(keys, hits, strict=True) if hit}
        for index, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            compute_s = cost.prefill_s(sum(lengths[:index]), length)
            outcome.num_uses += 1
            outcome.num_tokens += length
            outcome.compute_s += compute_s
            if hits[index]:
                cfo = _cfo(tier.prefix_of[key], keys[:index], trace)
                policy.on_hit(key, _info(cost, length, compute_s, cfo), now)
                outcome.num_hits += 1
                outcome.hit_tokens += length
                outcome.saved_s += compute_s * (1.0 - num_recompute_tokens(cfo, length) / length)
        for index, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            if not hits[index]:
                info = _info(cost, length, length * new_s, cache_fix_overhead(CCI, 0.0, ALPHA))
                num_gone = tier.store(key, keys[:index], info, now, pinned)
                outcome.num_evicted += num_gone or 0
                outcome.num_refused += num_gone is None
                pinned.add(key)
    return outcome


def _info(cost: RooflineModel, num_tokens: int, compute_s: float, cfo: float) -> EntryInfo:
    num_bytes = num_tokens * cost.bytes_per_token
    return EntryInfo(num_bytes, num_tokens, compute_s, recomputed_share=cfo, load_s=num_bytes / LOAD_BYTES_PER_S)


def _cfo(old_prefix: tuple[ChunkId, ...], new_prefix: tuple[ChunkId, ...], trace: Trace) -> float:
    mass = [float(trace.num_tokens[key]) for key in old_prefix]
    return cache_fix_overhead(CCI, adjusted_overlap(old_prefix, mass, new_prefix), ALPHA)


def _key(passage: int) -> ChunkId:
    return ChunkId(f"{passage:06d}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    default = data_folder(None)
    parser.add_argument("--data", type=Path, default=default, help="folder with rag_trace/ and tokenizer_llama3/")
    parser.add_argument("--retriever", choices=("docs", "docs_alt"), default="docs", help="which retrieval run")
    parser.add_argument("--ablate", action="store_true", help="more rows: other half-lives, memory on and off")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Replays the trace under every policy at every size and prints the tables."""
    trace = load_trace(arguments.data, arguments.retriever)
    if arguments.quick:
        trace = dataclasses.replace(trace, requests=trace.requests[:100])
    cost = RooflineModel()
    makers: dict[str, Callable[[], RankedPolicy]] = {
        **POLICIES,
        **(ABLATIONS if arguments.ablate else {}),
        "belady (offline)": functools.partial(Belady, trace.requests),
    }
    distinct_bytes = trace.distinct_tokens * cost.bytes_per_token
    cases = []
    with bars() as progress:
        task = progress.add_task("replay", total=len(makers) * len(SIZE_PERCENTS))
        for name, make in makers.items():
            for percent in SIZE_PERCENTS:
                budget_bytes = distinct_bytes * percent // 100
                outcome = replay(make(), trace, budget_bytes, cost)
                cases.append({"policy": name, **_figures(outcome, percent / 100, budget_bytes)})
                progress.advance(task)
    _print(cases, distinct_bytes, trace)
    shapes = {"requests": len(trace.requests), "uses": sum(map(len, trace.requests)), "distinct_bytes": distinct_bytes}
    shapes |= {"passages": len(set().union(*trace.requests)), "bytes_per_token": cost.bytes_per_token}
    shapes |= {"retriever": arguments.retriever, "model": "Llama-3-8B", "dtype": "bfloat16", "cci": CCI}
    shapes |= {"flops_per_s": FLOPS_PER_S, "load_bytes_per_s": LOAD_BYTES_PER_S}
    return {"benchmark": "eviction", **environment(), "shapes": shapes, "default": DEFAULT_POLICY, "cases": cases}


def _figures(outcome: ReplayCounts, size_ratio: float, budget_bytes: int) -> dict[str, Any]:
    return {
        "size_ratio": size_ratio,
        "budget_bytes": budget_bytes,
        "hits": outcome.num_hits,
        "hit_ratio": outcome.num_hits / outcome.num_uses,
        "byte_hit_ratio": outcome.hit_tokens / outcome.num_tokens,
        "saved_compute_share": outcome.saved_s / outcome.compute_s,
        "evictions": outcome.num_evicted,
        "refused": outcome.num_refused,
    }


def _print(cases: Sequence[Mapping[str, Any]], distinct_bytes: int, trace: Trace) -> None:
    where = f"{len(trace.requests)} requests, all passages {distinct_bytes / 1e9:.1f} GB of KV; tier of"
    titles = {"hits": "hits", "hit_ratio": "hit ratio", "byte_hit_ratio": "byte hit ratio"}
    for key, title in (titles | {"saved_compute_share": "compute saved"}).items():
        rows = [
            (name, *(text(case[key], "d" if key == "hits" else ".1%") for case in cases if case["policy"] == name))
            for name in dict.fromkeys(case["policy"] for case in cases)
        ]
        show(("policy", *(f"{percent} %" for percent in SIZE_PERCENTS)), rows, f"{title}: {where}")
