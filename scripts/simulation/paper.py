"""The papers' experiments in virtual time: models, hardware, loads and budgets from the papers, and random workloads
that fit the papers' figures."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ccjax.models.llama3.config import LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, MISTRAL_7B, LlamaConfig
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.store.spec import KVSpec
from scripts.simulation.cache import SimulatedCacheSettings
from scripts.simulation.costs import RooflineCosts, SimulatedPiece
from scripts.simulation.hardware import HARDWARE, Hardware
from scripts.simulation.replica import Deployment
from scripts.simulation.run import Simulation
from scripts.simulation.workload import Passages, Workload, draw_which, poisson, zipf_lists

A100 = HARDWARE["a100"]
A10G = dataclasses.replace(HARDWARE["a10g"], compute_ratio=0.77)
"""RAGCache fig. 3: an A10G prefills 4,000 tokens of Llama2-7B in a second, 54 of its 70 TFLOPS."""
GIB = 2**30
_PLENTY = 10**6
_APART_S = 60.0
"""Gap between the requests that fill the caches, so that no system begins with a backlog from these."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunSize:
    """Numbers of requests per case: those that count, and those before them that fill the caches."""

    measured: int
    warmup: int

    @property
    def requests(self) -> int:
        """All of them."""
        return self.measured + self.warmup


@dataclasses.dataclass(frozen=True)
class System:
    """A system that a paper compares, as our settings."""

    name: str
    strategy: str
    recompute_ratio: float | None = None
    eviction_policy: str = "saved_seconds"
    uses_host: bool = True
    reorder_window: int = 1


DEFAULT = System("default options", "auto")
FULL = System("full prefill", "full")
PREFIX = System("prefix cache", "prefix", eviction_policy="lru")
NAIVE = System("Cache-Craft, none recomputed", "reuse")
CRAFT_30 = System("Cache-Craft, 30 %", "cachecraft", 0.3)
CRAFT_39 = System("Cache-Craft, 39 %", "cachecraft", 0.39)
VLLM = System("vLLM", "full")
SGLANG = System("SGLang", "prefix", eviction_policy="lru", uses_host=False)
RAGCACHE = System("RAGCache", "prefix", eviction_policy="pgdsf", reorder_window=32)


def sys_x(size: RunSize, rate: float, seed: int = 0) -> Workload:
    """A stand-in for Sys-X (CacheCraft sec. 5.1.2, fig. 25): 186 chunks of user manuals, five to a request, inputs of
    1,000 to 20,000 tokens with a median of 3,300, a few chunks in most requests; answers of 100 tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(np.log(520), 0.85, 186), 80, 6000).astype(int).tolist()
    lists = _lists(186, 4000, 5, tuple(tokens), 0.85, seed)
    which = draw_which(size.requests, len(lists), exponent=0.35, seed=seed + 1)
    return Workload(poisson(size.requests, rate, seed + 2), which, lists, 40, np.full(size.requests, 100), 120)


def wikipedia(size: RunSize, rate: float, *, exponent: float, answer_tokens: int, seed: int = 0) -> Workload:
    """A stand-in for MMLU or Natural Questions over Wikipedia (RAGCache sec. 3.2, fig. 5): documents drawn by Zipf's
    law, so that 3 % of those requested are in 60 % (MMLU) or less (Natural Questions) of the requests."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(np.log(1200), 0.6, 4000), 64, 6000).astype(int).tolist()
    lists = _lists(4000, 3000, 2, tuple(tokens), exponent, seed)
    which = draw_which(size.requests, len(lists), exponent=exponent, seed=seed + 1)
    answers = np.full(size.requests, answer_tokens)
    return Workload(poisson(size.requests, rate, seed + 2), which, lists, 32, answers, 32)


@functools.cache  # the same for every rate
def _lists(
    num_passages: int, num_lists: int, top_k: int, tokens: tuple[int, ...], exponent: float, seed: int
) -> list[Passages]:
    return zipf_lists(num_passages, num_lists, top_k, tokens, exponent=exponent, seed=seed)


MMLU = {"exponent": 0.95, "answer_tokens": 1}
NQ = {"exponent": 0.7, "answer_tokens": 6}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A deployment: a model on devices, with memory for its caches."""

    config: LlamaConfig
    device: Hardware
    device_bytes: int
    host_bytes: int
    tensor_parallel_size: int = 1
    max_num_seqs: int = 32
    batched_tokens: int = 8192


def simulate(
    setup: Setup, workload: Workload, system: System, size: RunSize, *, is_hurried: bool = False
) -> tuple[Simulation, Row]:
    """One run and its figures.

    Args:
      is_hurried: the requests that fill the caches arrive as fast as those that count.
    """
    config = setup.config
    if not is_hurried:
        workload = workload.unhurried(size.warmup, _APART_S)
    kv_spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")
    uses = system.strategy != "full"
    cache = SimulatedCacheSettings(
        strategy=system.strategy,
        reuse="bounded" if uses else "off",
        recompute_ratio=system.recompute_ratio,
        eviction_policy=system.eviction_policy,
        device_cache_bytes=setup.device_bytes if uses else 0,
        host_cache_bytes=setup.host_bytes if system.uses_host and uses else 0,
    )
    limits = SchedulerSettings(
        num_pages=_PLENTY,
        page_tokens=PAGE_TOKENS,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.batched_tokens,
        max_queue=_PLENTY,
        reorder_window=system.reorder_window,
    )
    costs = RooflineCosts(config, setup.device, setup.tensor_parallel_size)
    simulation = Simulation(Deployment(costs, kv_spec, cache, limits), workload)
    return simulation, simulation.run().figures(workload, warmup=size.warmup)


def _row(system: System, figures: Row, **more: Any) -> Row:
    names = ("ttft_s", "latency_s", "throughput", "computed_share", "hit_ratio")
    return {**more, "system": system.name, **{name: figures[name] for name in names}}


def _rows(setup: Setup, workload: Workload, systems: Sequence[System], size: RunSize, **about: Any) -> list[Row]:
    """A row for each system."""
    return [_row(system, simulate(setup, workload, system, size)[1], **about) for system in systems]


_CRAFT_MODELS = (
    ("Llama-3-8B on an A100", LLAMA3_8B, 1, (60, 120, 180, 240), 20 * GIB),
    ("Llama-3-70B on four A100", LLAMA3_70B, 4, (30, 60, 90, 120), 100 * GIB),
)


_ONE_A100 = Setup(LLAMA3_8B, A100, 20 * GIB, 128 * GIB)


def fig_22(size: RunSize) -> list[Row]:
    """CacheCraft fig. 22: throughput and response latency by load, in queries a minute; our default options first."""
    rows = []
    for name, config, devices, loads, device_bytes in _CRAFT_MODELS:
        setup = Setup(config, A100, device_bytes, 128 * GIB, devices, batched_tokens=150_000)
        for load in loads:
            systems = (DEFAULT, FULL, PREFIX, NAIVE, CRAFT_30)
            rows += _rows(setup, sys_x(size, load / 60), systems, size, model=name, load=load)
    return rows


def fig_23a(size: RunSize) -> list[Row]:
    """CacheCraft fig. 23a: TTFT by length of the input, requests far apart, against prefix caching."""
    workload = sys_x(size, 0.05)
    found = {}
    for system in (PREFIX, CRAFT_39):
        run, _ = simulate(_ONE_A100, workload, system, size)
        found[system.name] = run.outcome.ttft_s[size.warmup :]
        lengths = run.outcome.prompt[size.warmup :]
    edges = (0, 2000, 4000, 8000, 20_000)
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (lengths >= low) & (lengths < high)
        if inside.any():
            means = {name: float(ttft[inside].mean()) for name, ttft in found.items()}
            rows.append({"tokens": f"{low:,} to {high:,}", "requests": int(inside.sum()), "ttft_s": means})
    means = {name: float(ttft.mean()) for name, ttft in found.items()}
    rows.append({"tokens": "all", "requests": len(lengths), "ttft_s": means})
    return rows


def fig_23bcd(size: RunSize) -> list[Row]:
    """CacheCraft fig. 23b-d: TTFT of a batch by model, length and batch size at 25 % recomputed, from costs alone."""
    cases = [("b", config, 4, 8192, 4) for config in (LLAMA3_8B, LLAMA3_70B)]
    cases += [("c", LLAMA3_8B, 1, length, 4) for length in (2048, 4096, 8192, 16_384)]
    cases += [("d", LLAMA3_8B, 1, 8192, batch) for batch in (1, 2, 4, 8)]
    rows = []
    for panel, config, devices, length, batch in cases:
        costs = RooflineCosts(config, A100, devices)
        full_s = costs.pack_s([SimulatedPiece(length, length)] * batch)
        # As in the paper, prefix caching finds 60 % of the prompt in the cache.
        prefix_s = costs.pack_s([SimulatedPiece(round(0.4 * length), length)] * batch)
        craft_s = costs.pack_s([SimulatedPiece(round(0.25 * length), length)] * batch)
        name = "Llama-3-70B" if config is LLAMA3_70B else "Llama-3-8B"
        about = {"panel": panel, "model": name, "devices": devices, "tokens": length, "batch": batch}
        rows.append({**about, "full_s": full_s, "prefix_s": prefix_s, "craft_s": craft_s})
    return rows


def fig_24_25(size: RunSize) -> Row:
    """CacheCraft fig. 24 and 25: a trace from an empty cache, TTFT, tokens and hits; and the variants of each
    chunk stored at its end."""
    workload = sys_x(size, 1.0)
    found: Row = {"systems": []}
    for system in (PREFIX, CRAFT_30):
        run, figures = simulate(_ONE_A100, workload, system, size, is_hurried=True)
        hits = run.outcome.hits
        found["systems"].append(_row(system, figures, all_hit_share=float((hits[size.warmup :] == 5).mean())))
        if system is CRAFT_30:
            counts = Counter(meta.chunk_id for meta in run.replicas[0].cache.index)
            found["variants"] = sorted(counts.values(), reverse=True)
    return found


_CACHE_MODELS = (("Mistral-7B", MISTRAL_7B, 4 * GIB), ("Llama2-7B", LLAMA2_7B, 4 * GIB))
_PEERS = (VLLM, SGLANG, RAGCACHE)
_DATASETS = (("MMLU", MMLU, (0.5, 1.0, 1.5, 2.0, 2.5)), ("Natural Questions", NQ, (0.4, 0.8, 1.2, 1.6)))


def fig_15(size: RunSize) -> list[Row]:
    """RAGCache fig. 15: mean TTFT by rate, 7B models on an A10G with 192 GiB of host memory, four at once."""
    rows = []
    for model, config, device_bytes in _CACHE_MODELS:
        setup = Setup(config, A10G, device_bytes, 192 * GIB, max_num_seqs=4)
        for dataset, about, rates in _DATASETS:
            for rate in rates:
                workload = wikipedia(size, rate, **about)
                rows += _rows(setup, workload, _PEERS, size, model=model, dataset=dataset, rate=rate)
    return rows


FIGURES: dict[str, Callable[[RunSize], Any]] = {
    "craft_22": fig_22,
    "craft_23a": fig_23a,
    "craft_23bcd": fig_23bcd,
    "craft_24_25": fig_24_25,
    "ragcache_15": fig_15,
}
"""Name -> function that simulates it."""
