"""Answers the same questions in many ways through the public engine, as a user would: passages are stored on disk by
one engine and read by others that add nothing. Knows no score.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ccjax.engine import Engine, EngineConfig, Request
from ccjax.engine.divergence import kl_divergence
from ccjax.engine.loading import LoadedModel
from ccjax.engine.requests import Response, SamplingParams
from ccjax.evaluation.passages import Combined, map_reduce, map_rerank
from ccjax.evaluation.questions import QAQuestion
from ccjax.evaluation.ways import FULL, PASSAGE_BY_PASSAGE, Way
from ccjax.types import Document, ReuseReport

Cached = Literal["alone", "behind others", "both"]
"""How the passages were computed that are reused: each behind the system prompt alone, like documents that were warmed;
behind other passages, as by earlier requests; or first so and then so."""
_Population = tuple[str, tuple[int, ...] | None]
CACHED: tuple[Cached, ...] = ("alone", "behind others", "both")


@dataclasses.dataclass(frozen=True)
class Answered:
    """One question, answered one way.

    Attributes:
      computed_ratio: share of the passages' tokens that ran through the model, counted over all layers.
      cfo: CacheCraft eq. 12, mean over passages; 1 for one that was computed whole.
      first_kl: KL divergence in nats of the first token's distribution from that of full prefill.
      is_same: the tokens are those of full prefill.
      focus_cut_layer: first layer that ran without what was outside the focus, None where all layers ran with all.
    """

    question: QAQuestion
    text: str
    token_ids: tuple[int, ...]
    computed_ratio: float
    cfo: float
    ttft_s: float
    first_kl: float
    is_same: bool
    focus_cut_layer: int | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All questions, answered one way, in their order."""

    way: Way
    answers: tuple[Answered, ...]


def measure(
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    ways: Sequence[Way],
    others: Sequence[Document],
    directory: Path,
    *,
    cached: Cached = "both",
    max_new_tokens: int = 32,
    settings: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Outcome]:
    """Full prefill first, whether it is among `ways` or not, then each of these.

    Args:
      others: passages that stand before each one when it is computed "behind others"; should answer no question.
      directory: where the stores of reused passages go; empty or absent.
      settings: further fields of `EngineConfig`.
      progress: called with a stage, and requests done and in all.
    """
    settings = settings or {}
    passages = list(dict.fromkeys(document for question in questions for document in question.documents))
    reusing = [way for way in ways if way != FULL]
    populations = dict.fromkeys(map(_population, reusing))
    total = len(populations) * len(passages) * (2 if cached == "both" else 1) + (1 + len(reusing)) * len(questions)
    done = 0

    def tick(stage: str) -> None:
        nonlocal done
        done += 1
        progress(stage, done, total)

    stores: dict[_Population, str] = {}
    for population in populations:
        strategy, layers = population
        stores[population] = (directory / "-".join([strategy, *map(str, layers or ())])).as_uri()
        config = EngineConfig(store=stores[population], strategy=strategy, ranking_layers=layers, **settings)
        with Engine(model, config) as engine:
            for before in ((), others) if cached == "both" else ((),) if cached == "alone" else (others,):
                for passage in passages:
                    _store(engine, [one for one in before if one != passage], passage)
                    tick("passages")
    reference: list[Response] = []
    outcomes = []
    for way in (FULL, *reusing):
        config = EngineConfig(
            store=None if way == FULL else stores[_population(way)],
            read_only=True,
            strategy="prefix" if way.strategy in PASSAGE_BY_PASSAGE else way.strategy,
            alpha=way.alpha,
            recompute_ratio=way.recompute_ratio,
            max_deviation=way.max_deviation,
            fixes_positions=way.fixes_positions,
            **{"focus_window": way.focus_window, "focus_rule": way.focus_rule, **settings},
        )
        outcomes.append(
            _outcome(model, config, questions, way, reference, max_new_tokens, functools.partial(tick, str(way)))
        )
    return outcomes


def measure_store(
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    config: EngineConfig,
    *,
    max_new_tokens: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Full prefill, then mode `bounded` over the store of `config` as it is; adds nothing to it.

    Args:
      progress: called with requests done and in all.
    """
    reference: list[Response] = []
    outcomes = []
    for number, way in enumerate((FULL, Way(config.strategy))):
        own = dataclasses.replace(config, store=None) if way == FULL else dataclasses.replace(config, read_only=True)
        before = number * len(questions)
        done = iter(range(before + 1, before + len(questions) + 1))
        tick = functools.partial(lambda done: progress(next(done), 2 * len(questions)), done)
        outcomes.append(_outcome(model, own, questions, way, reference, max_new_tokens, tick))
    return outcomes


def _outcome(
    model: LoadedModel,
    config: EngineConfig,
    questions: Sequence[QAQuestion],
    way: Way,
    reference: list[Response],
    max_new_tokens: int,
    tick: Callable[[], None],
) -> Outcome:
    """All questions answered by one engine; `reference` are full prefill's answers, or takes them."""
    answers = []
    with Engine(model, config) as engine:
        for index, question in enumerate(questions):
            answer = _answer(engine, question, way, max_new_tokens)
            if way == FULL:
                reference.append(answer.last)
            answers.append(_answered(question, answer, reference[index]))
            tick()
    return Outcome(way, tuple(answers))


def _population(way: Way) -> _Population:
    """What the stored passages of a way depend on: strategy and ranking layers of the engine that computes them."""
    return "h2o" if way.strategy == "h2o" else "auto", way.ranking_layers


def _store(engine: Engine, before: Sequence[Document], passage: Document) -> None:
    """Has the passage computed behind others and kept."""
    engine.generate("?", [*before, passage], max_new_tokens=1, reuse="exact", truncate=False)


def _answer(engine: Engine, question: QAQuestion, way: Way, max_new_tokens: int) -> Combined:
    def ask(text: str, documents: Sequence[Document]) -> Response:
        return engine.run(
            Request(
                messages=[{"role": "user", "content": text}],
                documents=documents,
                sampling=SamplingParams(max_new_tokens, logprobs=0, first_logits=True),
                reuse=way.reuse,
            )
        )

    if way.strategy == "map_rerank":
        return map_rerank(ask, question.text, question.documents)
    if way.strategy == "map_reduce":
        return map_reduce(ask, question.text, question.documents)
    response = ask(question.text, question.documents)
    return Combined(response, (response,), response.ttft_s)


def _answered(question: QAQuestion, answer: Combined, full: Response) -> Answered:
    response = answer.last
    parts = [report for call in answer.calls for report in call.reuse.per_document if report.role == "document"]
    num_tokens = sum(part.num_tokens for part in full.reuse.per_document if part.role == "document")
    return Answered(
        question=question,
        text=response.text.strip(),
        token_ids=response.token_ids,
        computed_ratio=sum(computed_tokens(call.reuse) for call in answer.calls) / num_tokens,
        cfo=float(np.mean([1.0 if part.cfo is None else part.cfo for part in parts])),
        ttft_s=answer.ttft_s,
        first_kl=kl_divergence(_logits(full), _logits(response)),
        is_same=response.token_ids == full.token_ids,
        focus_cut_layer=response.reuse.focus_cut_layer,
    )


def _logits(response: Response) -> np.ndarray:
    assert response.first_logits is not None
    return response.first_logits


def computed_tokens(reuse: ReuseReport) -> float:
    """Tokens of the documents that were computed, as many as if each had run through all layers; the question and the
    system prompt left out."""
    parts = reuse.per_document
    question = reuse.prompt_tokens - sum(part.num_tokens for part in parts)
    system = sum(part.num_tokens - part.reused_tokens for part in parts if part.role != "document")
    return max(0.0, reuse.computed_share * reuse.prompt_tokens - question - system)  # rounding
