"""`bench.py loading --queued`: TTFT of requests whose KV is copied to the device while they wait, or not."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ccjax.engine import Engine, EngineConfig, Request, SamplingParams
from ccjax.evaluation.pages import show
from ccjax.evaluation.states import fill
from ccjax.loading.devices import with_dtype
from ccjax.loading.model import LoadedModel
from ccjax.requests import Delta
from ccjax.store.throttle import ThrottledLink
from ccjax.store.usage import DEVICE
from ccjax.types import ReuseReport
from scripts.benchmarks.common import corpus_passages, median, stages
from scripts.benchmarks.ttft import NUM_PASSAGES, QUESTION

_LINK_BYTES_PER_S = 3e9
_POOL_BYTES = 512 << 20


@dataclasses.dataclass
class _Arm:
    """An engine, and the requests' times and reports of each run."""

    engine: Engine
    bytes_per_s: float
    is_preloaded: bool
    runs_s: list[float] = dataclasses.field(default_factory=list)
    reports: list[list[ReuseReport]] = dataclasses.field(default_factory=list)
    preloaded_bytes: int = 0

    def measure(self, first: Request, queued: list[Request]) -> None:
        """Runs `first` with the others waiting behind it; nothing but `first` is on the device before."""
        with self.engine._loop.exclusive():
            self.engine._chunks.variants.lose(DEVICE)
        before = self.engine.batch_counts.preloaded_bytes
        with contextlib.ExitStack() as stack:
            for request in queued:
                stack.callback(self.engine.preload(request).close)
            running = _Wait(self.engine, first)
            running.has_begun.wait()  # else those with stored KV would go first
            found = [wait.result() for wait in [_Wait(self.engine, request) for request in queued]]
            running.result()
        self.preloaded_bytes = self.engine.batch_counts.preloaded_bytes - before
        self.runs_s.append(sum(ttft_s for ttft_s, _ in found) / len(found))
        self.reports.append([report for _, report in found])


class _Wait:
    """A submitted request, whose answer is one token. `has_begun` once it left the queue."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.has_begun, self._done = threading.Event(), threading.Event()
        self._started_s = time.perf_counter()
        self._event: Delta | Exception | None = None
        self._ttft_s = 0.0
        engine.submit(request, self._emit, on_start=self.has_begun.set)

    def _emit(self, event: Delta | Exception) -> None:
        self._event, self._ttft_s = event, time.perf_counter() - self._started_s
        if isinstance(event, Exception) or event.response is not None:
            self._done.set()

    def result(self) -> tuple[float, ReuseReport]:
        """Seconds to the token, and the report."""
        self._done.wait()
        if isinstance(self._event, Exception):
            raise self._event
        assert self._event is not None and self._event.response is not None
        return self._ttft_s, self._event.response.reuse


def run_queued(model: LoadedModel, num_queued: int, context_tokens: int, repetitions: int) -> dict[str, Any]:
    """Measures both ways over two links in alternation, and prints the table."""
    assert model.tokenizer is not None
    size = max(1, context_tokens // NUM_PASSAGES - 8)
    passages = corpus_passages(model.tokenizer, (num_queued + 1) * NUM_PASSAGES, size)
    groups = [passages[at : at + NUM_PASSAGES] for at in range(0, len(passages), NUM_PASSAGES)]
    messages = [{"role": "user", "content": QUESTION}]
    base = Request(messages=messages, sampling=SamplingParams(max_new_tokens=1))
    requests = [dataclasses.replace(base, documents=group) for group in groups]
    first, queued = dataclasses.replace(requests[0], reuse="off"), requests[1:]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack, stages() as say:
        config = EngineConfig(**with_dtype({"store": (Path(directory) / "store").as_uri(), "max_num_seqs": 1}))
        say("prepare the passages")
        fill(model, config, "prepared", groups[1:])

        def arm(bytes_per_s: float, *, is_preloaded: bool = True) -> _Arm:
            budgets = {"device_cache_bytes": _POOL_BYTES, **({} if is_preloaded else {"preload_bytes": 0})}
            settings = config.replace(read_only=True, **budgets)
            engine = stack.enter_context(Engine(model, settings, device_link=ThrottledLink(bytes_per_s)))
            for _ in range(2):  # compiles, promotes the KV to host memory, and measures what computing takes
                engine.run(first)
                for request in queued:
                    engine.run(request)
            return _Arm(engine, bytes_per_s, is_preloaded)

        say("compile")
        arms = [arm(_LINK_BYTES_PER_S), arm(_LINK_BYTES_PER_S, is_preloaded=False)]
        arms[1].measure(first, queued)
        slow = median([report.loaded_bytes / report.prefill_s for report in arms[1].reports[0]])
        arms += [arm(slow), arm(slow, is_preloaded=False)]
        for number in range(repetitions + 1):
            say(f"run {number + 1} of {repetitions + 1}")
            for one in arms:
                one.measure(first, queued)
    rows = [_row(one, repetitions) for one in arms]
    _print(rows)
    return {"context_tokens": arms[0].reports[-1][0].prompt_tokens, "dtype": config.dtype, "queued": rows}


def _row(arm: _Arm, repetitions: int) -> dict[str, Any]:
    runs_s, reports = arm.runs_s[-repetitions:], [one for run in arm.reports[-repetitions:] for one in run]
    return {
        "link_bytes_per_s": arm.bytes_per_s,
        "is_preloaded": arm.is_preloaded,
        "ttft_s": median(runs_s),
        "runs_s": runs_s,
        "prefill_s": median([report.prefill_s for report in reports]),
        "wait_s": median([report.load_wait_s for report in reports]),
        "preloaded_bytes": arm.preloaded_bytes,
        "lost_loads": sum(report.failed_loads + report.given_up_loads for report in reports),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            f"{row['link_bytes_per_s'] / 1e9:.2f}",
            "yes" if row["is_preloaded"] else "no",
            f"{row['ttft_s']:.3f}",
            f"{row['prefill_s']:.3f}",
            f"{row['wait_s']:.3f}",
            f"{row['preloaded_bytes'] / 1e6:.0f}",
            str(row["lost_loads"]),
        )
        for row in rows
    ]
    show(("link GB/s", "while queued", "TTFT s", "prefill s", "wait s", "copied MB", "lost"), cells)
