"""Loads hidden by computing (Cache-Craft fig. 29, eq. 16): prefill time with stored KV in each tier, on a slow disk.

Each case prefills the same prompt through the public engine, its passages reused from the store with a share of their
tokens recomputed. The disk is real, behind a link slowed so that loading takes 0.5, 1, 2 or 4 times as long as
computing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.cli.values import positive_int
from ccjax.engine import Engine, EngineConfig, Request, SamplingParams
from ccjax.evaluation.pages import show, text
from ccjax.loading.model import LoadedModel
from ccjax.models.llama3 import LlamaConfig, Params, init_params
from ccjax.policy.preload import preload_depth
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import Pack, Piece
from ccjax.runner.pages import RequestPages
from ccjax.runner.pool import PAGE_TOKENS, DevicePool, num_pages
from ccjax.store.throttle import ThrottledLink
from ccjax.types import PrefillPlan, ReuseReport, Segment, VariantId
from scripts.benchmarks.common import environment, median, random_config, random_prompt, shapes_of, stages

NUM_PASSAGES = 5
QUICK = {"context_tokens": 512, "repetitions": 2}
RATIOS = (0.5, 1.0, 2.0, 4.0)
QUEUE_SHARE = 0.54
"""Time in the queue as a share of the time to load: 0.32 s of 0.59 s in Cache-Craft fig. 29."""

MODES: dict[str, tuple[Any, bool]] = {
    "sync": ("sync", False),
    "async": ("sync", True),
    "layer": ("layerwise", False),
    "alg2": ("alg2", False),
    "async + layer": ("layerwise", True),
}
"""Name -> how the engine loads, and whether reading begins while the request is queued."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--context-tokens", type=positive_int, default=1024, help="prompt length (%(default)s)")
    parser.add_argument("--recompute-ratio", type=float, default=0.15, help="share of each passage that is recomputed")
    parser.add_argument("--repetitions", type=positive_int, default=5, help="runs per case; the median counts")


@dataclasses.dataclass
class LoadingCase:
    """One row: the tier of the KV, the way it is loaded, and the results; times in seconds."""

    tier: str
    mode: str
    engine: Engine
    load_s: float = 0.0
    queue_s: float = 0.0
    reports: list[ReuseReport] = dataclasses.field(default_factory=list)

    def measure(self, request: Request) -> None:
        """Runs the prompt once, after `queue_s` in the queue."""
        with contextlib.ExitStack() as stack:
            if self.queue_s:
                stack.callback(self.engine.preload(request).close)
                time.sleep(self.queue_s)
            self.reports.append(self.engine.run(request).reuse)


class Ideal:
    """The same prefill with every layer's context on the device before it begins."""

    def __init__(self, params: Params, config: LlamaConfig, lengths: Sequence[int], recompute_ratio: float) -> None:
        self._model = DeviceModel(params, config)
        self._plan = _plan(lengths, recompute_ratio)
        self._token_ids = np.zeros(self._plan.num_tokens, np.int32)
        spec = kv_spec_of(config, str(self._model.dtype))
        pages = sum(num_pages(segment.num_tokens) for segment in self._plan.segments)
        self._pool = DevicePool(spec, spec.num_bytes(pages * PAGE_TOKENS))
        self.runs_s: list[float] = []
        self.num_computed = 0

    def measure(self) -> None:
        """Runs it once."""
        contexts = _Held(self._model.context_shape(self._plan), self._model.config.num_layers)
        pages = RequestPages(self._pool, self._plan, {})
        started = time.perf_counter()
        job = PrefillJob(self._token_ids, self._plan, pages, contexts=contexts)
        pack = Pack(self._model, self._pool, [Piece(job, 0, len(job.offsets))])
        while not pack.is_done:
            pack.run_layer()
        jax.block_until_ready(pack.logits()[1])
        self.runs_s.append(time.perf_counter() - started)
        self.num_computed = len(job.offsets)
        pages.release()


class _Held:
    """Contexts that need no loading."""

    loaded_bytes, waited_s = 0, 0.0

    def __init__(self, shape: tuple[int, int, int], num_layers: int) -> None:
        self._contexts = [(jnp.ones(shape), jnp.ones(shape)) for _ in range(num_layers)]
        jax.block_until_ready(self._contexts)

    def is_ready(self, layer: int) -> bool:
        return True

    def take(self, layer: int) -> tuple[jax.Array, jax.Array]:
        return self._contexts[layer]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases in alternation and prints the table."""
    length, repetitions = arguments.context_tokens, arguments.repetitions
    config = random_config(is_quick=arguments.quick)
    params = init_params(config, jax.random.key(0))
    model = LoadedModel("random", config, params, None, None, frozenset(), "loading")
    fill, request, lengths = _requests(config.vocab_size, length)
    settings: dict[str, Any] = {"max_model_len": length + 1, "recompute_ratio": arguments.recompute_ratio}
    # Every run reuses and recomputes the same tokens.
    settings |= {"strategy": "cachecraft", "focus_window": None, "read_only": True}

    with tempfile.TemporaryDirectory() as directory, stages() as say:
        url = f"file://{directory}/store"
        with Engine(model, EngineConfig(store=url, max_model_len=length + 1)) as engine:
            engine.run(fill)
        ideal = Ideal(params, config, lengths, arguments.recompute_ratio)

        def case(tier: str, mode: str, load_s: float = 0.0, link: ThrottledLink | None = None) -> LoadingCase:
            loading, is_queued = MODES[mode]
            budgets = {} if link is None else {"host_cache_bytes": 1}  # nothing is promoted from the slow disk
            if tier == "device":
                # The chunks, a request that uses none of them, and 64 to spare; the last page of each may be part full.
                pages = 2 * (length // PAGE_TOKENS + NUM_PASSAGES + 2) + 64
                budgets = {"device_cache_bytes": kv_spec_of(config, "float32").num_bytes(pages * PAGE_TOKENS)}
            engine = Engine(model, EngineConfig(store=url, loading=loading, **budgets, **settings), disk_link=link)
            if ideal.runs_s:  # else the time to compute is unknown, and a slow load is soon abandoned
                engine.rates.compute.add(ideal.num_computed, ideal.runs_s[-1])
            return LoadingCase(tier, mode, engine, load_s, QUEUE_SHARE * load_s if is_queued else 0.0)

        ratios = (2.0,) if arguments.quick else RATIOS
        say("compile")
        cases = [case("device", "layer"), case("host", "sync"), case("host", "layer")]
        for _ in range(3):
            ideal.measure()
            for loading_case in cases:  # the first run promotes the KV to memory
                loading_case.measure(request)
        prefill_s, kv_bytes = min(ideal.runs_s), cases[0].reports[0].loaded_bytes
        for ratio in ratios:
            load_s = ratio * prefill_s
            cases += [case("disk", mode, load_s, ThrottledLink(kv_bytes / load_s)) for mode in MODES]
        for number in range(repetitions + 1):
            say(f"run {number + 1} of {repetitions + 1}")
            ideal.measure()
            for loading_case in cases:
                loading_case.measure(request)
        ideal_s = median(ideal.runs_s[-repetitions:])
        rows = [_row(loading_case, ideal_s, config.num_layers, repetitions) for loading_case in cases]
        for loading_case in cases:
            loading_case.engine.close()
    _print(rows, ideal_s)
    shapes = {
        **shapes_of(config),
        "context_tokens": length,
        "passages": NUM_PASSAGES,
        "recompute_ratio": arguments.recompute_ratio,
    }
    shapes |= {"kv_bytes": kv_bytes, "queue_share": QUEUE_SHARE}
    ideal_figures = {"ideal_s": ideal_s, "ideal_runs_s": ideal.runs_s[-repetitions:]}
    return {"benchmark": "loading", **environment(), "shapes": shapes, **ideal_figures, "cases": rows}


def least_exposed_s(mode: str, num_layers: int, prefill_s: float, load_s: float, queue_s: float) -> float:
    """Seconds of loading that a mode cannot hide; layers load one after another, from `queue_s` before the prefill on.

    With `queue_s` = 0, layer by layer, this is CacheCraft eq. 16 without its rounding: `Lp load_s / num_layers`.
    """
    if MODES[mode][0] == "sync":
        return max(0.0, load_s - queue_s)
    exposed_s = (((n + 1) * load_s - n * prefill_s) / num_layers - queue_s for n in range(num_layers))
    return max(0.0, *exposed_s)


def _requests(vocab_size: int, length: int) -> tuple[Request, Request, list[int]]:
    """The request that fills the store, the measured one (passages in another order), and its segments' lengths."""
    system, *passages, question = random_prompt(length, NUM_PASSAGES, vocab_size)
    one_token = SamplingParams(max_new_tokens=1)
    fill = Request(segments=[system, *passages, question], sampling=one_token)
    request = Request(segments=[system, *passages[::-1], question], sampling=one_token)
    return fill, request, [len(segment) for segment in (system, *passages, question)]


def _plan(lengths: Sequence[int], recompute_ratio: float) -> PrefillPlan:
    """The plan of the measured request with other tokens recomputed, but the same number."""
    segments, start = [], 0
    for number, length in enumerate(lengths):
        count = 0 if number == 0 else math.ceil(recompute_ratio * length)
        action: Any = {
            "action": "reuse",
            "variant_id": VariantId(str(number)),
            "recompute_offsets": tuple(range(count)),
        }
        if number == len(lengths) - 1:
            action = {"action": "compute"}
        role = "question" if number == len(lengths) - 1 else "document"
        segments.append(Segment(role=role, start=start, num_tokens=length, **action))
        start += length
    return PrefillPlan(tuple(segments))


def _row(case: LoadingCase, ideal_s: float, num_layers: int, repetitions: int) -> dict[str, Any]:
    reports = case.reports[-repetitions:]
    prefill_s = median([report.prefill_s for report in reports])
    figures: dict[str, Any] = {"tier": case.tier, "mode": case.mode, "prefill_s": prefill_s}
    figures["runs_s"] = [report.prefill_s for report in reports]
    figures["wait_s"] = median([report.load_wait_s for report in reports])
    figures["preloaded_bytes"] = median([report.preloaded_bytes for report in reports])
    figures["lost_loads"] = sum(report.failed_loads + report.given_up_loads for report in reports)
    if case.load_s:
        figures |= {"load_s": case.load_s, "queue_s": case.queue_s}
        figures["hidden_share"] = 1.0 - (prefill_s - ideal_s) / case.load_s
        least_s = least_exposed_s(case.mode, num_layers, ideal_s, case.load_s, case.queue_s)
        figures["allowed_share"] = 1.0 - least_s / case.load_s
        figures["preload_depth"] = preload_depth(num_layers, ideal_s, case.load_s)
    return figures


def _print(rows: list[dict[str, Any]], ideal_s: float) -> None:
    cells: list[tuple[str, ...]] = [("device", "", "ideal", "", f"{ideal_s:.3f}")]
    for row in rows:
        has_load = "load_s" in row
        cells.append(
            (
                row["tier"],
                f"{row['load_s'] / ideal_s:.2f}" if has_load else "",
                row["mode"],
                text(row.get("queue_s"), ".3f") if has_load else "",
                f"{row['prefill_s']:.3f}",
                f"{row['prefill_s'] - ideal_s:.3f}",
                text(row.get("hidden_share"), ".0%"),
                text(row.get("allowed_share"), ".0%"),
                f"{(row['prefill_s'] - row['wait_s']) / ideal_s - 1.0:.0%}",
            )
        )
    head = ("tier", "load / prefill", "loading", "queued s", "prefill s", "over ideal s", "hidden", "possible")
    show((*head, "compute slower"), cells)
