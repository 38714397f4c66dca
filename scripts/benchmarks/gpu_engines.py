"""The engines that `bench.py gpu` measures, opened one at a time and filled with passages, and the runs
through them."""

from __future__ import annotations

import dataclasses
import gc
import queue
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.engine import Engine, EngineConfig, Request, Response, SamplingParams
from ccjax.loading.model import LoadedModel
from ccjax.models.llama3 import Params
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.types import ReuseMode
from scripts.benchmarks.common import drop_from_cache
from scripts.benchmarks.gpu_plan import GpuCase, GpuScale

_NEVER_MS = 1e9
_FILLER_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of one run of some prompts; times in seconds from when all of them were queued.

    Attributes:
      first_s: of each request, until its first token.
      step_s: between tokens while all of them decoded, median over requests, one for each step.
      responses: of each request.
    """

    first_s: list[float]
    step_s: list[float]
    responses: list[Response]


class Prompts:
    """Prompts over one list of passages in changing order; passages, system prompt and question are random tokens."""

    def __init__(self, scale: GpuScale) -> None:
        self._random = random.Random(scale.name)
        self._scale = scale
        vocab = scale.config.vocab_size

        def draw(count: int) -> list[int]:
            return [self._random.randrange(vocab) for _ in range(count)]

        self._system, self._question = draw(scale.system_tokens), draw(scale.question_tokens)
        self._filler = draw(_FILLER_TOKENS)
        self._passages = [draw(scale.passage_tokens) for _ in range(scale.num_passages(max(scale.contexts)))]

    def of(self, case: GpuCase) -> list[list[list[int]]]:
        """The segments of each request of a case, with its passages shuffled for each."""
        passages = self._passages[: self._scale.num_passages(case.context)]
        orders = [self._random.sample(passages, len(passages)) for _ in range(case.batch)]
        return [[self._system, *order, self._question] for order in orders]

    def filling(self, num_passages: int) -> list[list[list[int]]]:
        """Prompts that store the first passages one by one, each behind a text that no case has, so that none is ever
        reused exactly."""
        behind = [self._system, self._filler]
        return [
            [*behind, self._question],
            *([*behind, passage, self._question] for passage in self._passages[:num_passages]),
        ]


class Engines:
    """Opens the engine that a case needs, after closing the previous one; all have page pools of the same size, so that
    they share compiled steps. A context manager that closes the last engine."""

    def __init__(
        self,
        params: Params,
        scale: GpuScale,
        prompts: Prompts,
        *,
        pool_bytes: int,
        num_passages: int,
        folder: Path | None,
    ) -> None:
        """
        Args:
          pool_bytes: of device memory for pages.
          num_passages: stored passages; those of the longest prompt.
          folder: of the disk tier; None for the directory of temporary files.
        """
        self._model = LoadedModel(scale.name, scale.config, params, None, None, frozenset(), f"bench-gpu-{scale.name}")
        self._scale, self._prompts, self._num_passages = scale, prompts, num_passages
        self._folder = Path(tempfile.mkdtemp(prefix="ccjax-bench-gpu-", dir=folder))
        self._is_stored = False
        self._key: tuple[Any, ...] = ()
        self._engine: Engine | None = None
        kv = kv_spec_of(scale.config, "bfloat16").num_bytes(scale.passage_tokens)
        self._common: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": scale.max_model_len,
            "max_num_batched_tokens": scale.max_num_batched_tokens,
            "device_cache_bytes": pool_bytes,
            "host_cache_bytes": (num_passages + 4) * kv + (1 << 20),
            "max_decode_gap_ms": _NEVER_MS,  # else answers of a batch decode while others are prefilled
        }

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Closes the open engine and frees its memory."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._key = None, ()
        gc.collect()

    def of(self, case: GpuCase) -> Engine:
        """The engine for a case, with every passage stored in the case's tier."""
        key = (case.ratio, case.tier == DISK) if case.kind == "reuse" else ("plain",)
        if self._engine is not None and self._key == key:
            return self._engine
        self.close()
        if case.kind != "reuse":
            engine = Engine(self._model, EngineConfig(**self._common, strategy="full"))
        elif case.tier == DISK:
            self._store_on_disk()
            changes = {"read_only": True, "store": self._url, "host_cache_bytes": 1}  # nothing moves up into memory
            engine = Engine(self._model, self._reusing(case.ratio, **changes))
        else:
            engine = Engine(self._model, self._reusing(case.ratio))
            self._fill(engine)
            engine._planner.read_only = True  # every run reuses and recomputes the same number of tokens
        self._engine, self._key = engine, key
        return engine

    def place(self, engine: Engine, tier: str) -> None:
        """Removes the passages from every tier above this one, and the disk's files from the system's cache."""
        above = {DEVICE: (), HOST: (DEVICE,), DISK: (DEVICE, HOST)}[tier]
        with engine._exclusive():
            for variant_id in list(engine._variants.ids()):
                for name in above:
                    engine._store.evict(name, [variant_id])
                engine._variants._placement.apply_changes(variant_id)
        if tier == DISK:
            drop_from_cache(self._folder)

    @property
    def _url(self) -> str:
        return (self._folder / "store").as_uri()

    def _reusing(self, ratio: float | None, **changes: Any) -> EngineConfig:
        settings = {"strategy": "cachecraft", "recompute_ratio": ratio, "focus_window": None}
        return EngineConfig(**{**self._common, **settings, **changes})

    def _fill(self, engine: Engine) -> None:
        for segments in self._prompts.filling(self._num_passages):
            engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")

    def _store_on_disk(self) -> None:
        if not self._is_stored:
            with Engine(self._model, self._reusing(0.0, store=self._url)) as engine:
                self._fill(engine)
                engine.cache.flush()
            gc.collect()
            self._is_stored = True


def run_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[Sequence[int]]],
    *,
    reuse: ReuseMode,
    num_tokens: int = 1,
    first_logits: bool = False,
) -> Run:
    """Submits all prompts at once, for answers of this many tokens."""
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, first_logits=first_logits)
    events: queue.SimpleQueue[tuple[int, float, Any]] = queue.SimpleQueue()

    def emit_of(number: int) -> Callable[[Any], None]:
        return lambda event: events.put((number, time.perf_counter(), event))

    with engine._loop.paused():  # none starts before all are queued
        for number, segments in enumerate(prompts):
            engine.submit(Request(segments=segments, sampling=sampling, reuse=reuse), emit_of(number))
        started_s = time.perf_counter()
    times: list[list[float]] = [[] for _ in prompts]
    responses: dict[int, Response] = {}
    while len(responses) < len(prompts):
        number, at_s, event = events.get()
        if isinstance(event, Exception):
            raise event
        if event.token_ids:
            times[number].append(at_s - started_s)
        if event.response is not None:
            responses[number] = event.response
    return Run([moments[0] for moments in times], _steps(times), [responses[number] for number in range(len(prompts))])


def _steps(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between tokens while all answers decoded, without the first such step."""
    from_s, to_s = max(moments[0] for moments in times), min(moments[-1] for moments in times)
    inside = [np.diff([at for at in moments if from_s <= at <= to_s])[1:] for moments in times]
    count = min(map(len, inside))
    return [float(np.median([gaps[number] for gaps in inside])) for number in range(count)]
