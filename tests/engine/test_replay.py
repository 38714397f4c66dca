"""Recorded requests give the tokens and the reuse that they gave before: a net under changes that keep answers.

Each scenario of `SCENARIOS` runs on the embedded model in float32, greedy, and is compared with `replay.json`: tokens,
the sum of their log-probabilities, and how many prompt tokens were computed, reused and recomputed. Answers are
recorded up to the first token that is nearly tied with another one, because rounding may decide there. If loads were
late, which depends on the machine's speed, the scenario runs again.

    pytest -m slow tests/engine/test_replay.py                          compares
    CCJAX_RECORD_REPLAY=1 pytest -m slow tests/engine/test_replay.py    records the selected scenarios anew (-k NAME)

Record only what is meant to change: another model or template, a strategy with other decisions, a new scenario.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ccjax import Document, Engine, Request, Response, SamplingParams
from ccjax.policy.scheduling import work
from ccjax.runner.pack import Pack
from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore

pytestmark = pytest.mark.slow

FILE = Path(__file__).with_name("replay.json")
RECORDED = json.loads(FILE.read_text())
PASSAGES = [Document(text, id=f"p{number}") for number, text in enumerate(RECORDED["passages"])]
QUESTIONS: list[str] = RECORDED["questions"]
SAMPLING = SamplingParams(max_new_tokens=24, logprobs=2, ignore_eos=True)
TIE = 2e-3
TOLERANCE = 5e-3
"""Of an answer's log-probability, for the rounding of other builds and padded sizes."""

STRATEGIES = (
    "full",
    "prefix",
    "set",
    "reuse",
    "auto",
    "cachecraft",
    "cacheblend",
    "deviation",
    "legolink",
    "h2o",
    "random",
)
Run = Callable[[str], Iterator[Response]]


def start(**settings: Any) -> Engine:
    settings = {"host_cache_bytes": 1 << 28, "max_model_len": 640, **settings}
    return Engine.from_pretrained("demo", dtype="float32", **settings)


def chat(question: int, passages: Sequence[int], mode: Any = "bounded", system: str | None = None) -> Request:
    """A question about one of these passages."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": QUESTIONS[question]})
    return Request(messages=messages, documents=[PASSAGES[p] for p in passages], sampling=SAMPLING, reuse=mode)


def text(start: int, passages: Sequence[int], mode: Any = "bounded") -> Request:
    """The beginning of a passage, to be continued behind these passages."""
    documents = [PASSAGES[p] for p in passages]
    return Request(prompt=PASSAGES[start].text[:40], documents=documents, sampling=SAMPLING, reuse=mode)


def tokens(
    seed: int, passages: Sequence[int], mode: Any = "bounded", *, system: bool = True, size: int = 25
) -> Request:
    """A prompt of random tokens: the same passage has the same tokens under every seed."""

    def drawn(key: int, length: int) -> list[int]:
        return random.Random(key).choices(range(8, 1700), k=length)

    head = drawn(99, 9) if system else []
    segments = [head, *(drawn(1000 + p, size + 7 * (p % 4)) for p in passages), drawn(seed, 11)]
    return Request(segments=segments, sampling=SAMPLING, reuse=mode)


def shuffled(seed: int, count: int, **how: Any) -> list[Request]:
    """Prompts of random passages in random orders and modes, some repeated."""
    draw = random.Random(seed)
    requests: list[Request] = []
    while len(requests) < count:
        chosen = draw.sample(range(8), draw.randint(2, 4))
        make = tokens if how else draw.choice((chat, text, tokens))
        one = make(draw.choice(chosen), chosen, draw.choice(("bounded", "bounded", "fast", "exact")), **how)
        requests += [one] * draw.choice((1, 1, 2))
    return requests[:count]


def each(engine: Engine, requests: Sequence[Request]) -> Iterator[Response]:
    """The answers, one after another; what they store is complete before the next one begins."""
    for request in requests:
        yield engine.run(request)
        engine.cache.flush()


def together(engine: Engine, requests: Sequence[Request]) -> Iterator[Response]:
    """The answers of requests that run at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        yield from pool.map(engine.run, requests)


def one_after_another(**settings: Any) -> Run:
    """Cold, repeated, in other orders, in every mode, with the same passage twice, with and without instructions."""
    requests = [
        chat(0, (0, 1, 2)),
        chat(1, (0, 1, 2)),
        chat(0, (2, 0, 1)),
        chat(2, (2, 0, 1), "exact"),
        chat(3, (3, 0, 3, 1)),
        chat(3, (0, 3), system="Answer briefly."),
        text(2, (0, 1, 2)),
        text(0, (1, 2, 0), "fast"),
        text(0, (1, 2, 0), "off"),
        tokens(1, (0, 1, 2, 3)),
        tokens(2, (3, 1, 0)),
        tokens(3, (2, 3, 1, 0), "fast"),
        tokens(4, (0, 1, 2), system=False),
        tokens(5, (2, 1), system=False),
    ]

    def run(store: str) -> Iterator[Response]:
        with start(**settings) as engine:
            yield from each(engine, requests)

    return run


def batches(**settings: Any) -> Run:
    """Eight at once, over chunks that an engine before has stored; nothing new is stored, so that order is without
    effect."""
    first = [make(p, (p, p + 1, p + 2)) for p in (0, 3, 5) for make in (chat, tokens)]

    def run(store: str) -> Iterator[Response]:
        with start(store=store, **settings) as engine:
            yield from each(engine, first)
        with start(store=store, read_only=True, max_num_seqs=8, max_num_batched_tokens=160, **settings) as engine:
            yield from each(engine, first)
            for seed in (1, 2):
                yield from together(engine, [*shuffled(seed, 7), text(seed, (4, 2), "off")])

    return run


def tiers(seed: int, seen: str, **settings: Any) -> Run:
    """KV that moves between tiers, of which it is read from those in `seen`, and a store that is opened again."""

    def run(store: str) -> Iterator[Response]:
        found = set()
        requests = shuffled(seed, 20, size=80)
        for part in (requests[:10], requests[10:]):
            with start(store=store, **settings) as engine:
                for response in each(engine, part):
                    found |= {document.tier for document in response.reuse.per_document}
                    yield response
        assert found == {None, *seen.split()}

    return run


def two_engines(**settings: Any) -> Run:
    """Two engines on one store, in turn."""

    def run(store: str) -> Iterator[Response]:
        index = f"sqlite://{store.removeprefix('file://')}.db"
        shared = {"store": store, "store_index": index, "share_computation": True, **settings}
        with start(**shared) as one, start(**shared) as other:
            for number, request in enumerate(shuffled(11, 12)):
                engine, reader = (one, other) if number % 2 == 0 else (other, one)
                yield from each(engine, [request])
                reader.cache.refresh()

    return run


def prepared(**settings: Any) -> Run:
    """Passages prepared behind a frame, and what idle time prepares and repairs."""

    def run(store: str) -> Iterator[Response]:
        with start(**settings) as engine:
            engine.documents.warm(PASSAGES[:3])
            yield from each(engine, [chat(0, (2, 0, 1)), chat(1, (1, 5, 0)), chat(4, (4, 5), "fast")])
            while engine.cache.repair_one():
                pass
            yield from each(engine, [chat(5, (5, 4, 1)), chat(2, (2, 0, 1), "exact"), chat(4, (0, 5, 4, 2))])

    return run


LRU, F_R = {"eviction_policy": "lru"}, {"eviction_policy": "cachecraft_fr"}
"""Policies whose choice does not depend on measured seconds, as that of the default does."""

SCENARIOS: dict[str, Run] = {
    **{name: one_after_another(strategy=name, recompute_ratio=0.3 if name == "cacheblend" else None)
       for name in STRATEGIES},
    **{f"batches-{name}": batches(strategy=name) for name in ("auto", "cachecraft")},
    "batches-cacheblend": batches(strategy="cacheblend", recompute_ratio=0.3, device_cache_bytes=1 << 26),
    "tiers-lru": tiers(3, "device host disk", device_cache_bytes=11 << 20, host_cache_bytes=20 << 20, **LRU),
    "tiers-cachecraft": tiers(4, "host disk", host_cache_bytes=3 << 20, strategy="cachecraft", **F_R),
    "tiers-int8": tiers(5, "host disk", host_cache_bytes=3 << 20, disk_kv_dtype="int8", **LRU),
    "two-engines": two_engines(),
    "two-devices-auto": one_after_another(tensor_parallel_size=2),
    "two-devices-cacheblend": one_after_another(tensor_parallel_size=2, strategy="cacheblend", recompute_ratio=0.3),
    "two-devices-batches": batches(tensor_parallel_size=2, device_cache_bytes=1 << 26),
    "prepared-auto": prepared(),
    "prepared-deviation": prepared(strategy="deviation", max_deviation=0.2),
    "focus": one_after_another(strategy="cachecraft", focus_window=2, device_cache_bytes=1 << 26),
}  # fmt: skip


def row_of(response: Response, num_tokens: int | None = None) -> list[float]:
    """[computed, reused, recomputed tokens, log-probability, token, token, ...], without the tokens from `num_tokens`
    on or, with None, from the first near tie on."""
    reuse, chosen = response.reuse, response.logprobs
    assert chosen is not None and len(chosen) == SAMPLING.max_new_tokens
    if num_tokens is None:
        ties = [number for number, one in enumerate(chosen) if abs(one.top[0][2] - one.top[1][2]) < TIE]
        num_tokens = min(ties, default=len(chosen))
    logprob = math.fsum(one.logprob for one in chosen[:num_tokens])
    counts = [reuse.computed_tokens, reuse.reused_tokens, reuse.recomputed_tokens]
    return [*counts, round(logprob, 4), *response.token_ids[:num_tokens]]


def answers(name: str, folder: Path) -> list[Response]:
    """The answers of a scenario as a fast machine gives them: no late loads, no late writes (what waits to be written
    is read from memory, where it has not been rounded), no packs divided because they take long. Deviations that are
    nothing but rounding, of tokens whose context is the same, are equal: CacheBlend chooses among them, too."""
    prepare_load, deviations = TieredStore.prepare_load, Pack.deviations

    def prepare_load_once_written(store: TieredStore, *args: Any, **kwargs: Any) -> LoadTicket:
        store.flush()
        return prepare_load(store, *args, **kwargs)

    def without_rounding(pack: Pack) -> np.ndarray:
        return np.round(deviations(pack), 1)

    with (
        mock.patch.object(TieredStore, "prepare_load", prepare_load_once_written),
        mock.patch.object(Pack, "deviations", without_rounding),
        mock.patch.object(work, "PACK_S", math.inf),
    ):
        for attempt in range(4):
            found = list(SCENARIOS[name](f"file://{folder}/store{attempt}"))
            if not any(one.reuse.failed_loads or one.reuse.given_up_loads for one in found):
                break
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_answers_and_reuse_are_those_recorded(name: str, tmp_path: Path) -> None:
    found = answers(name, tmp_path)
    if os.environ.get("CCJAX_RECORD_REPLAY") == "1":
        known = {**RECORDED["answers"], name: [row_of(response) for response in found]}
        RECORDED["answers"] = {key: known[key] for key in SCENARIOS if key in known}
        FILE.write_text(as_text(RECORDED))
        return
    assert not differing(name, found)


def test_answers_differ_if_the_least_deviating_tokens_are_recomputed(monkeypatch, tmp_path: Path) -> None:
    """Mutant for the tolerance."""
    deviations = Pack.deviations
    monkeypatch.setattr(Pack, "deviations", lambda pack: -deviations(pack))
    told = differing("batches-cacheblend", answers("batches-cacheblend", tmp_path))
    assert sum("log-probability" in difference for difference in told) >= 4


def differing(name: str, found: Sequence[Response]) -> list[str]:
    """What differs from the recorded answers of a scenario."""
    wanted = RECORDED["answers"][name]
    told = []
    for number, (response, row) in enumerate(zip(found, wanted, strict=True)):
        mine = row_of(response, len(row) - 4)
        if mine[4:] != row[4:]:
            told.append(f"request {number}: wanted the tokens {row[4:]}, got {mine[4:]}")
        if mine[:3] != row[:3]:
            told.append(f"request {number}: wanted {row[:3]} computed, reused, recomputed, got {mine[:3]}")
        if abs(mine[3] - row[3]) >= TOLERANCE:
            told.append(f"request {number}: wanted a log-probability of {row[3]}, got {mine[3]}")
    return told


def test_the_recording_is_large_enough() -> None:
    rows = [row for of_scenario in RECORDED["answers"].values() for row in of_scenario]
    assert len(rows) >= 200 and RECORDED["answers"].keys() == SCENARIOS.keys()
    assert sum(len(row) - 4 >= 16 for row in rows) >= 0.9 * len(rows), "long enough that wrong KV would show"


def as_text(recorded: dict[str, Any]) -> str:
    """JSON with a request per line."""
    parts = [f'"{key}": [\n{_lines(recorded[key])}\n]' for key in ("passages", "questions")]
    scenarios = [f'"{name}": [\n{_lines(rows)}\n]' for name, rows in sorted(recorded["answers"].items())]
    return "{" + ",\n".join([*parts, '"answers": {' + ",\n".join(scenarios) + "}"]) + "}\n"


def _lines(values: Sequence[Any]) -> str:
    return ",\n".join(json.dumps(value, separators=(",", ":")) for value in values)
