"""The simulator compared with the real engine on this CPU: TTFT of the same requests at the same times.

A small model with random weights, a real retrieval trace, Poisson arrivals. The cost of prefills is profiled just
before. The speed of the machine, which changes within minutes, is fitted to the traces of the measured requests, so the
comparison covers what is reused, which requests wait for which, and the resulting TTFT.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.cli.progress import bars
from ccjax.engine import Engine
from ccjax.evaluation.pages import show
from ccjax.loading.model import LoadedModel, load_model
from ccjax.loading.prefill_profile import PrefillProfile, write_profile
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.prompts import Prompt, assemble
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.server.loading import use_compile_cache
from ccjax.text import PromptBuilder
from scripts.benchmarks.common import data_folder, environment, spread
from scripts.benchmarks.ragcache_replay import (
    BATCHED_TOKENS,
    RECOMPUTE_RATIO,
    ReplayBench,
    ask_all,
    documents_of,
    measure_profile,
    open_loop,
    request_of,
)
from scripts.benchmarks.ragcache_replay import distinct_bytes as bytes_of_all
from scripts.benchmarks.serve_model import bench_model, cache_folder
from scripts.benchmarks.serve_workload import WorkloadQuestion, load_trace
from scripts.simulation.cache import SimulatedCacheSettings
from scripts.simulation.costs import GridCosts
from scripts.simulation.observed import Prefill, fit
from scripts.simulation.replica import HostWork
from scripts.simulation.run import Deployment, Simulation
from scripts.simulation.workload import Passages, Workload, poisson

STRATEGIES = ("prefix", "cachecraft")
LOADS = (0.3, 0.6)
"""Arrival rates, in multiples of the rate of one request at a time."""
SHAPE = (4, 256, 4)
"""Layers, width and heads of the model."""
TARGET = 0.15
"""Simulated mean and p99 should be this close to measured ones."""
_MOST_REQUESTS = 1000
_NUM_PASSAGES = 3
_BUDGET_SHARE = 0.4
_POLICY = "saved_seconds"
_MAX_NUM_SEQS = 4
_MAX_MODEL_LEN = 1088  # profiles go up to less than half of it: a whole pack behind a whole pack
_NUM_PROFILES = 4
_NUM_DRAWS = 10
_APART_S = 1e4
_PLENTY_OF_PAGES = 1 << 16


def validate(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and simulates every strategy at every load, and prints both.

    Raises:
      BenchmarkError: the trace is missing.
    """
    data = data_folder(args.data)
    count = min(args.requests, _MOST_REQUESTS)
    if count < 8:
        raise ValueError(f"--requests: wanted at least 8, got {count}")
    questions = load_trace(data, _NUM_PASSAGES)[:count]
    with bars(is_quiet=args.quiet) as progress:
        found = _measure(args, data, questions, progress)
    _print(found["cases"])
    return found


def _measure(
    args: argparse.Namespace, data: Path, questions: Sequence[WorkloadQuestion], progress: Progress
) -> dict[str, Any]:
    use_compile_cache(cache_folder() / "compile")
    asked = bench_model(None, data, *SHAPE)
    model = load_model(asked.name, dtype="float32", tokenizer=asked.tokenizer)
    half = len(questions) // 2
    options = argparse.Namespace(max_model_len=_MAX_MODEL_LEN, seats=_MAX_NUM_SEQS, quick=False)
    total = bytes_of_all(model, questions)
    bench = ReplayBench(options, model, questions[:half], questions[half:], None, total, progress)
    task = progress.add_task("compile")
    with bench.engine("prefix", policy=_POLICY, share=1.0) as engine:
        engine.warmup(lambda stage, done, of: progress.update(task, completed=done, total=of))
    progress.remove_task(task)
    profile = _profile(bench)
    path = cache_folder() / "prefill_profile.json"
    write_profile(path, profile)
    bench = dataclasses.replace(bench, profile=path)
    prompts = [_prompt(model, question) for question in questions]
    cases = []
    for strategy in STRATEGIES:
        for load in LOADS:
            task = progress.add_task(f"{strategy}, load {load:g}", total=len(questions))
            advance = functools.partial(progress.advance, task)
            cases.append(_case(bench, prompts, profile.grid, strategy, load, args.seed, advance))
            progress.remove_task(task)
    shape = dict(zip(("layers", "width", "heads"), SHAPE, strict=True))
    about = {
        "shape": shape,
        "requests": len(questions),
        "measured": len(bench.measured),
        "load_average": os.getloadavg(),
    }
    return {**environment(), **about, "profile": profile.grid.to_json(), "cases": cases}


def _profile(bench: ReplayBench) -> PrefillProfile:
    """The least times of several profiles, to exclude slow moments of this machine."""
    profiles = [measure_profile(bench) for _ in range(_NUM_PROFILES)]
    least = np.min([profile.grid.seconds for profile in profiles], axis=0)
    grid = dataclasses.replace(profiles[0].grid, seconds=tuple(map(tuple, least.tolist())))
    return dataclasses.replace(profiles[0], grid=grid)


def _case(
    bench: ReplayBench,
    prompts: Sequence[Prompt],
    grid: PrefillGrid,
    strategy: str,
    load: float,
    seed: int,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """One strategy at one load, measured and simulated."""
    prefills: list[Prefill] = []
    with bench.engine(strategy, policy=_POLICY, share=_BUDGET_SHARE) as engine:
        rate = load * _fill(engine, bench, advance)
        times_s = poisson(len(bench.measured), rate, seed)
        served = open_loop(
            engine,
            bench.measured,
            times_s.tolist(),
            advance,
            on_traced=lambda response, answer: prefills.append(Prefill.of(response, answer.ttft_s)),
        )
    costs = GridCosts(grid, SHAPE[0], decode_fixed_s=0.0)
    speed = fit(prefills, costs, BATCHED_TOKENS)
    costs = dataclasses.replace(costs, head_s=speed.head_s, scale=speed.scale)
    simulated, share = _simulate(bench, prompts, times_s, strategy, costs, speed.host_work)
    measured = np.asarray([answer.ttft_s for answer in served])
    return {
        "strategy": strategy,
        "load": load,
        "rate": rate,
        "speed": dataclasses.asdict(speed),
        "measured": _spread(measured)
        | {"computed_share": statistics.fmean(answer.computed_share for answer in served)},
        "simulated": _spread(simulated) | {"computed_share": share},
    }


def _fill(engine: Engine, bench: ReplayBench, advance: Callable[[], None]) -> float:
    """Sends the past requests one by one; returns the answers per second over their second half."""
    ask_all(engine, bench.past[: len(bench.past) // 2], advance)
    started_s = time.perf_counter()
    second = ask_all(engine, bench.past[len(bench.past) // 2 :], advance)
    return len(second) / (time.perf_counter() - started_s)


def _prompt(model: LoadedModel, question: WorkloadQuestion) -> Prompt:
    """The prompt as the engine assembles it."""
    assert model.tokenizer is not None and model.template is not None
    builder = PromptBuilder(model.tokenizer, model.template)
    request = request_of(question.text, documents_of(question.passages))
    return assemble(request, builder, max_model_len=_MAX_MODEL_LEN, vocab_size=model.config.vocab_size)


def _simulate(
    bench: ReplayBench,
    prompts: Sequence[Prompt],
    times_s: np.ndarray,
    strategy: str,
    costs: GridCosts,
    host_work: HostWork,
) -> tuple[np.ndarray, float]:
    """Simulates the past one by one and then the measured requests, with several draws of the durations of packs.

    Returns:
      (TTFT of the measured requests in all draws, their mean share of computed tokens).
    """
    numbers: dict[str, int] = {}
    lists, systems = [], []
    for prompt in prompts:
        passages = prompt.chunks[1:] if prompt.has_system else prompt.chunks
        systems.append(len(prompt.chunks[0].token_ids) if prompt.has_system else 0)
        own = tuple(numbers.setdefault(chunk.chunk_id, len(numbers)) for chunk in passages)
        lists.append(Passages(own, tuple(len(chunk.token_ids) for chunk in passages)))
    distinct = list(dict.fromkeys(lists))
    place = {combination: index for index, combination in enumerate(distinct)}
    num_past = len(bench.past)
    arrivals = np.concatenate([np.arange(num_past) * _APART_S, num_past * _APART_S + times_s])
    workload = Workload(
        arrivals,
        np.asarray([place[combination] for combination in lists]),
        distinct,
        question_tokens=round(statistics.fmean(len(prompt.question) for prompt in prompts)),
        answer_tokens=np.ones(len(prompts), int),
        system_tokens=max(systems),
    )
    deployment = Deployment(
        costs,
        kv_spec_of(bench.model.config, "float32"),
        SimulatedCacheSettings(
            strategy=strategy,
            recompute_ratio=RECOMPUTE_RATIO,
            eviction_policy=_POLICY,
            host_cache_bytes=bench.budget_bytes(_BUDGET_SHARE),
        ),
        SchedulerSettings(
            num_pages=_PLENTY_OF_PAGES,
            page_tokens=PAGE_TOKENS,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=_MAX_NUM_SEQS,
            reorder_window=32,
        ),
        host_work=host_work,
    )
    outcomes = [Simulation(deployment, workload, seed=seed).run() for seed in range(_NUM_DRAWS)]
    shares = [outcome.computed[num_past:] / outcome.prompt[num_past:] for outcome in outcomes]
    return np.concatenate([outcome.ttft_s[num_past:] for outcome in outcomes]), float(np.mean(shares))


def _spread(seconds: np.ndarray) -> dict[str, Any]:
    return {f"{name}_s": value for name, value in spread(seconds.tolist(), 1.0).items()}


def _print(cases: Sequence[dict[str, Any]]) -> None:
    rows = []
    for case in cases:
        own = [case["strategy"], f"{case['load']:g}", f"{case['rate']:.1f}"]
        for way, about in (("measured", own), ("simulated", ["", "", ""])):
            figures, other = case[way], case["measured"]
            off = [
                "" if way == "measured" else f" ({figures[key] / other[key] - 1:+.0%})" for key in ("mean_s", "p99_s")
            ]
            times = [f"{1e3 * figures[key]:.1f} ms{by}" for key, by in zip(("mean_s", "p99_s"), off, strict=True)]
            rows.append([*about, way, *times, f"{figures['computed_share']:.1%}"])
    ratios = [case["simulated"][key] / case["measured"][key] for case in cases for key in ("mean_s", "p99_s")]
    close = sum(abs(ratio - 1) <= TARGET for ratio in ratios)
    says = [f"{close} of {len(ratios)} figures are within {TARGET:.0%}"]
    show(("strategy", "load", "req/s", "", "mean TTFT", "p99 TTFT", "computed"), rows, "measured and simulated", says)
