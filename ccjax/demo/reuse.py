"""What reuse costs the demo model in answers: exact match per kind of question for each way to reuse.

Goes through the public engine, as a user would: passages are stored on disk by one engine and read by others that add
nothing. Knows no training.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ccjax.demo.evaluate import TEST_SEED, TEST_WEIGHTS, VALIDATION_SEED, Score, held_out_contexts, score
from ccjax.demo.world import KINDS, Context, Difficulty, Kind, Passage, sample_context
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.loading import LoadedModel
from ccjax.types import ReuseMode, ReuseReport

Cached = Literal["alone", "behind others"]
"""How the passages were computed that are reused: each behind the system prompt alone, or behind two passages of
another town."""
_Stored = tuple[Cached, tuple[int, ...] | None]
NUM_OTHERS = 2
MAX_ANSWER_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to answer; `cached` None is full prefill.

    Attributes:
      recompute_ratio: share of each reused passage that is recomputed; None leaves it to Cache-Craft's CFO.
      ranking_layers: of `EngineConfig`, when the passages were computed.
      focus_window: None recomputes the tokens of every passage on every layer.
    """

    strategy: str
    cached: Cached | None = None
    recompute_ratio: float | None = None
    alpha: float = 1.0
    focus_window: int | None = None
    ranking_layers: tuple[int, ...] | None = None

    @property
    def reuse(self) -> ReuseMode:
        """The request's reuse mode."""
        return "off" if self.cached is None else "bounded"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one way to answer achieved.

    Attributes:
      scores: exact match per kind, with the best guess beside it.
      computed_ratio: share of the passages' tokens that ran through the model, counted over all layers, mean over
        questions; 1 for full prefill.
      mean_cfo: CacheCraft eq. 12, mean over passages; 1 for one that was computed whole.
    """

    way: Way
    scores: Mapping[Kind, Score]
    computed_ratio: float
    mean_cfo: float


FULL = Way("full")
SHARES = (0.05, 0.10, 0.15, 0.30, 0.50)
FIRST_LAYERS = (0, 1)
NAIVE = (Way("reuse", "alone"), Way("reuse", "behind others"))
SELECTIVE = tuple(
    Way(strategy, "behind others", recompute_ratio=share)
    for strategy in ("cachecraft", "cacheblend", "legolink", "random")
    for share in SHARES
)
SELECTIVE += tuple(
    Way("cachecraft", "behind others", recompute_ratio=share, ranking_layers=FIRST_LAYERS) for share in SHARES
)
WAYS = (FULL, *NAIVE, *SELECTIVE)
_QUICK = [
    way
    for way in SELECTIVE
    if way.strategy in ("cachecraft", "random") and not way.ranking_layers and way.recompute_ratio in (0.15, 0.30)
]
QUICK_WAYS = (FULL, *NAIVE, *_QUICK)
ALPHAS = tuple(Way("cachecraft", "behind others", alpha=alpha) for alpha in (0.1, 0.2, 0.35, 0.5, 0.75, 1.0))


def measure_ways(
    model: LoadedModel,
    ways: Sequence[Way],
    directory: Path,
    *,
    num_questions: int,
    num_passages: int = 4,
    kinds: Sequence[Kind] = KINDS,
    is_validation: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Every way over the same held-out questions, `num_questions` of each kind.

    Args:
      directory: where the stores of reused passages go; empty or absent.
      is_validation: ask the validation questions instead of the test questions.
      progress: called with requests done and in all.
    """
    seed = VALIDATION_SEED if is_validation else TEST_SEED
    contexts: dict[Kind, list[Context]] = {
        kind: held_out_contexts(kind, num_questions, num_passages, seed=seed) for kind in kinds
    }
    passages = list(dict.fromkeys(p for of_kind in contexts.values() for c in of_kind for p in c.passages))
    stores: dict[_Stored, str] = {}
    for way in ways:
        if way.cached:
            name = "-".join([*way.cached.split(), *map(str, way.ranking_layers or ())])
            stores[way.cached, way.ranking_layers] = (directory / name).as_uri()
    total = len(stores) * len(passages) + len(ways) * len(kinds) * num_questions
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    for (cached, ranking_layers), url in stores.items():
        others = _other_passages() if cached == "behind others" else ()
        _store_passages(model, _config(url, ranking_layers=ranking_layers), passages, others=others, tick=tick)
    urls = [stores[way.cached, way.ranking_layers] if way.cached else None for way in ways]
    return [_measure(model, way, url, contexts, tick) for way, url in zip(ways, urls, strict=True)]


def _other_passages() -> tuple[Passage, ...]:
    rng = random.Random(f"{TEST_SEED}/others")
    return sample_context(rng, Difficulty(NUM_OTHERS, TEST_WEIGHTS, min_words=24), 1).passages


def _config(store: str | None, **settings: Any) -> EngineConfig:
    return EngineConfig(store=store, **settings)


def _documents(passages: Iterable[Passage]) -> list[dict[str, str]]:
    return [{"title": passage.title, "text": passage.text} for passage in passages]


def _store_passages(
    model: LoadedModel,
    config: EngineConfig,
    passages: Sequence[Passage],
    *,
    others: Sequence[Passage],
    tick: Callable[[], None],
) -> None:
    with Engine(model, config) as engine:
        for passage in passages:
            engine.generate("Who?", _documents([*others, passage]), max_new_tokens=1, reuse="exact")
            tick()


def _measure(
    model: LoadedModel,
    way: Way,
    store: str | None,
    contexts: Mapping[Kind, Sequence[Context]],
    tick: Callable[[], None],
) -> Outcome:
    scores: dict[Kind, Score] = {}
    computed, cfos = [], []
    config = _config(
        store,
        read_only=True,
        strategy=way.strategy,
        alpha=way.alpha,
        recompute_ratio=way.recompute_ratio,
        focus_window=way.focus_window,
    )
    with Engine(model, config) as engine:
        for kind, of_kind in contexts.items():
            results = []
            for context in of_kind:
                question = context.questions[0]
                response = engine.generate(
                    question.text,
                    _documents(context.passages),
                    max_new_tokens=MAX_ANSWER_TOKENS,
                    reuse=way.reuse,
                )
                results.append(response.text.strip() == question.answer)
                documents = [report for report in response.reuse.per_document if report.role == "document"]
                computed.append(_computed_ratio(response.reuse))
                cfos += [1.0 if report.cfo is None else report.cfo for report in documents]
                tick()
            scores[kind] = score(of_kind, results)
    return Outcome(way, scores, sum(computed) / len(computed), sum(cfos) / len(cfos))


def _computed_ratio(reuse: ReuseReport) -> float:
    """Share of the documents' tokens times layers that was computed; the question and the system prompt left out."""
    parts = reuse.per_document
    question = reuse.prompt_tokens - sum(part.num_tokens for part in parts)
    system = sum(part.num_tokens - part.reused_tokens for part in parts if part.role != "document")
    documents = sum(part.num_tokens for part in parts if part.role == "document")
    return (reuse.computed_share * reuse.prompt_tokens - question - system) / documents
