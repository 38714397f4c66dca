"""Loads hidden by computing (Cache-Craft fig. 29, eq. 16): prefill over passages in memory or behind a slow link.

The prompt and the options are those of `ttft`, state `prepared`. The link (`store/throttle.py`) is the one to the disk
or, with `--link device`, the one from host memory to the device, slowed so that loading takes 0.5, 1, 2 or 4 times as
long as the prefill over KV in host memory. A request waits in the queue for 0.54 of that time (fig. 29) where reading
from disk begins while it does. The first row is the default: KV in host memory, layer by layer.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  model, dtype, context_tokens, link, passages, repetitions; kv_bytes (loaded by a request)
  cases[]: `tier` (host, disk); `loading`: sync (load all, then compute), layerwise (a layer runs once its own KV is
    loaded), alg2 (the first layer waits for the KV of Lp layers); `queue_s` (0: reading begins with the prefill);
    `load_s` (to load all at the link's rate, null without one); `prefill_s`, `runs_s` (loading included; median and
    all runs); `wait_s` (part of it in which the device waited for KV); `hidden_share`: 1 - (prefill_s - that of the
    first case) / load_s; `allowed_share`: the most that this way can hide, layerwise eq. 16 without its rounding;
    `lost_loads`: loads that failed or were abandoned; if not 0, the row is not comparable

With `--queued N`, N requests wait behind one that computes its prompt, one answer at a time, on a device that keeps
pages; their KV is in host memory, behind a link of 3 GB/s, and behind one over which a request loads as long as it then
computes. Copied to the device while they wait, or not. Instead of `cases`:
  queued[]: `link_bytes_per_s`; `is_preloaded`; of the N requests `ttft_s` (from their arrival; the mean of N, median
    and all runs: `runs_s`), `prefill_s`, `wait_s`, `lost_loads` as above; `preloaded_bytes`: copied ahead for all N
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from ccjax.cli.values import positive_int
from ccjax.engine import Engine, EngineConfig, Request, SamplingParams
from ccjax.evaluation.pages import show, text
from ccjax.evaluation.states import fill
from ccjax.loading.devices import with_dtype
from ccjax.loading.model import load_model
from ccjax.loading.named import default_model
from ccjax.store.throttle import ThrottledLink
from ccjax.types import ReuseReport
from scripts.benchmarks.common import corpus_passages, environment, median, stages
from scripts.benchmarks.queued_loading import run_queued
from scripts.benchmarks.ttft import NUM_PASSAGES, QUESTION

QUICK = {"context_tokens": 256, "repetitions": 1, "ratios": [2.0]}
QUEUE_SHARE = 0.54
"""Time in the queue as a share of the time to load: 0.32 s of 0.59 s in Cache-Craft fig. 29."""
WAYS = (("sync", False), ("sync", True), ("layerwise", False), ("alg2", False), ("layerwise", True))
"""How the engine loads from disk, and whether reading begins while the request is queued."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--model", default=default_model(), help="as with ccjax serve (default: its default, %(default)s)")
    add("--context-tokens", type=positive_int, default=1024, help="approximately (%(default)s)")
    add("--link", choices=("disk", "device"), default="disk", help="which link is slow (%(default)s)")
    add("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], help="of loading to prefill (%(default)s)")
    add("--queued", type=positive_int, metavar="N", help="only requests that wait in the queue: TTFT of N")
    add("--repetitions", type=positive_int, default=5, help="runs per case; the median counts (%(default)s)")


@dataclasses.dataclass
class LoadingCase:
    """One row and its engine; times in seconds."""

    tier: str
    loading: str
    engine: Engine
    load_s: float | None = None
    queue_s: float = 0.0
    reports: list[ReuseReport] = dataclasses.field(default_factory=list)

    def measure(self, request: Request) -> None:
        """Runs the prompt once, after `queue_s` in the queue."""
        with contextlib.ExitStack() as stack:
            if self.queue_s:
                stack.callback(self.engine.preload(request).close)
                time.sleep(self.queue_s)
            self.reports.append(self.engine.run(request).reuse)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases in alternation and prints the table."""
    repetitions = arguments.repetitions
    model = load_model(arguments.model, dtype=with_dtype({})["dtype"])
    assert model.tokenizer is not None
    if arguments.queued is not None:
        about = {"model": arguments.model, "passages": NUM_PASSAGES, "repetitions": repetitions}
        found = run_queued(model, arguments.queued, arguments.context_tokens, repetitions)
        return {"benchmark": "loading", **environment(), **about, **found}
    documents = corpus_passages(model.tokenizer, NUM_PASSAGES, max(1, arguments.context_tokens // NUM_PASSAGES - 8))
    messages = [{"role": "user", "content": QUESTION}]
    request = Request(messages=messages, documents=documents, sampling=SamplingParams(max_new_tokens=1))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack, stages() as say:
        # The pages of up to 21 engines have to fit into memory.
        limits = {"max_num_seqs": 1, "max_model_len": max(2048, 2 * arguments.context_tokens)}
        config = EngineConfig(**with_dtype({"store": (Path(directory) / "store").as_uri(), **limits}))
        say("prepare the passages")
        fill(model, config, "prepared", [documents])

        def case(tier: str, loading: Any, **more: Any) -> LoadingCase:
            link = None if "load_s" not in more else ThrottledLink(kv_bytes / more["load_s"])
            budgets = {"host_cache_bytes": 1} if tier == "disk" else {}  # nothing is promoted from the slow disk
            settings = config.replace(read_only=True, loading=loading, device_cache_bytes=0, **budgets)
            links = {"disk_link" if tier == "disk" else "device_link": link}
            return LoadingCase(tier, loading, stack.enter_context(Engine(model, settings, **links)), **more)

        cases = [case("host", "layerwise")]
        for _ in range(3):  # compiles, and promotes the KV to memory
            cases[0].measure(request)
        prefill_s, kv_bytes = cases[0].reports[-1].prefill_s, cases[0].reports[-1].loaded_bytes
        tier = "disk" if arguments.link == "disk" else "host"
        compute = cases[0].engine.generate(QUESTION, documents, max_new_tokens=1, reuse="off").reuse
        for ratio in arguments.ratios:
            load_s = ratio * prefill_s
            for loading, is_queued in WAYS:
                if tier == "host" and (loading, is_queued) != ("layerwise", False):  # the others are ways to read
                    continue
                cases.append(case(tier, loading, load_s=load_s, queue_s=QUEUE_SHARE * load_s if is_queued else 0.0))
                # Else the time to compute is unknown, and a slow load is soon abandoned.
                cases[-1].engine.rates.compute.add(compute.computed_tokens, compute.prefill_s)
        for number in range(repetitions + 1):
            say(f"run {number + 1} of {repetitions + 1}")
            for loading_case in cases:
                loading_case.measure(request)
    base_s = median([report.prefill_s for report in cases[0].reports[-repetitions:]])
    rows = [_row(loading_case, base_s, model.config.num_layers, repetitions) for loading_case in cases]
    _print(rows, base_s)
    about = {"model": arguments.model, "dtype": config.dtype, "context_tokens": cases[0].reports[0].prompt_tokens}
    about |= {"link": arguments.link, "passages": NUM_PASSAGES, "repetitions": repetitions, "kv_bytes": kv_bytes}
    return {"benchmark": "loading", **environment(), **about, "cases": rows}


def least_exposed_s(loading: str, num_layers: int, prefill_s: float, load_s: float, queue_s: float) -> float:
    """Seconds of loading that cannot be hidden; layers load one after another, from `queue_s` before the prefill on.

    With `queue_s` = 0, layer by layer, this is CacheCraft eq. 16 without its rounding: `Lp load_s / num_layers`.
    """
    if loading == "sync":
        return max(0.0, load_s - queue_s)
    exposed_s = (((n + 1) * load_s - n * prefill_s) / num_layers - queue_s for n in range(num_layers))
    return max(0.0, *exposed_s)


def _row(case: LoadingCase, base_s: float, num_layers: int, repetitions: int) -> dict[str, Any]:
    reports = case.reports[-repetitions:]
    prefill_s = median([report.prefill_s for report in reports])
    hidden = allowed = None
    if case.load_s is not None:
        hidden = 1.0 - (prefill_s - base_s) / case.load_s
        allowed = 1.0 - least_exposed_s(case.loading, num_layers, base_s, case.load_s, case.queue_s) / case.load_s
    return {
        "tier": case.tier,
        "loading": case.loading,
        "queue_s": case.queue_s,
        "load_s": case.load_s,
        "prefill_s": prefill_s,
        "runs_s": [report.prefill_s for report in reports],
        "wait_s": median([report.load_wait_s for report in reports]),
        "hidden_share": hidden,
        "allowed_share": allowed,
        "lost_loads": sum(report.failed_loads + report.given_up_loads for report in reports),
    }


def _print(rows: list[dict[str, Any]], base_s: float) -> None:
    cells = [
        (
            row["tier"],
            text(row["load_s"] and row["load_s"] / base_s, ".2f"),
            row["loading"],
            f"{row['queue_s']:.3f}",
            f"{row['prefill_s']:.3f}",
            f"{row['wait_s']:.3f}",
            text(row["hidden_share"], ".0%"),
            text(row["allowed_share"], ".0%"),
            str(row["lost_loads"]),
        )
        for row in rows
    ]
    show(("tier", "load / prefill", "loading", "queued s", "prefill s", "wait s", "hidden", "possible", "lost"), cells)
