"""Answers the same questions in many ways through the public engine, as a user would: one engine stores the passages on
disk, others read them without adding any."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.engine import Engine, EngineConfig
from ccjax.engine.divergence import kl_divergence
from ccjax.evaluation import forced
from ccjax.evaluation.passages import Combined, map_reduce, map_rerank
from ccjax.evaluation.questions import QAQuestion
from ccjax.evaluation.states import State, asking, fill, steps
from ccjax.evaluation.ways import FULL, PASSAGE_BY_PASSAGE, Way
from ccjax.loading.model import LoadedModel
from ccjax.requests import Response, SamplingParams
from ccjax.types import Document, ReuseReport

_Population = tuple[str, tuple[int, ...] | None]


@dataclasses.dataclass(frozen=True)
class Forced:
    """Scores of given answers behind the prompt (`ccjax.evaluation.forced`).

    Attributes:
      kl, agreement: mean KL divergence in nats from full prefill, and share of tokens with the same likeliest one, over
        full prefill's answer and its end.
      nll: of the first right answer, nats a token; None if there is none.
    """

    kl: float
    agreement: float
    nll: float | None


@dataclasses.dataclass(frozen=True)
class Answered:
    """One question, answered one way.

    Attributes:
      computed_ratio: share of the passages' tokens that ran through the model, counted over all layers.
      cfo: CacheCraft eq. 12, mean over passages; 1 for a completely computed one.
      first_kl: KL divergence in nats of the first token's distribution from that of full prefill.
      is_same: the tokens are those of full prefill.
      focus_cut_layer: first layer that ran without the unfocused part, None if all layers ran with everything.
      forced: `Forced`, if requested and if the way has one prompt.
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
    forced: Forced | None = None


@dataclasses.dataclass(frozen=True)
class WayResults:
    """All questions, answered one way, in their order; `state` of the store, None for full prefill."""

    way: Way
    answers: tuple[Answered, ...]
    state: State | None = None


def measure(
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    ways: Sequence[Way],
    directory: Path,
    *,
    states: Sequence[State] = ("prepared",),
    max_new_tokens: int = 32,
    with_forced: bool = False,
    pasted: bool = False,
    settings: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[WayResults]:
    """Answers with full prefill first, whether or not it is among `ways`, then in each state in each way.

    In state "empty" only the first way is run, since all are the same without reuse.

    Args:
      directory: for the stores of reused passages, those of one state at a time; empty or absent.
      with_forced: also score given answers: two more prefills per question. Full prefill's logits stay in memory, 4
        bytes for each token of the vocabulary and of an answer.
      pasted: passages are text of the system message (`ccjax.evaluation.states.asking`).
      settings: further fields of `EngineConfig`.
      progress: called with a stage, and requests done and in all.
    """
    settings = settings or {}
    prompts = [question.documents for question in questions]
    ways_in = _ways_in(ways, states)
    stores = {
        (state, population): directory / state / "-".join([population[0], *map(str, population[1] or ())])
        for state in states
        for population in map(_population, ways_in[state])
    }
    total = num_steps(questions, ways, states)
    done = 0

    def tick(stage: str) -> None:
        nonlocal done
        done += 1
        progress(stage, done, total)

    asked = _Asked(model, questions, max_new_tokens, with_forced, pasted)
    config = EngineConfig(read_only=True, **settings)
    outcomes = [asked.outcome(FULL, config, None, functools.partial(tick, str(FULL)))]
    for state in states:
        for population in dict.fromkeys(map(_population, ways_in[state])):
            strategy, layers = population
            store = stores[state, population].as_uri()
            config = EngineConfig(store=store, strategy=strategy, ranking_layers=layers, **settings)
            fill(model, config, state, prompts, functools.partial(tick, f"passages, {state}"), pasted=pasted)
        for way in ways_in[state]:
            store = stores[state, _population(way)].as_uri()
            config = EngineConfig(**{**way.settings, **settings, "store": store, "read_only": True})
            outcomes.append(asked.outcome(way, config, state, functools.partial(tick, f"{way}, {state}")))
        shutil.rmtree(directory / state, ignore_errors=True)
    return outcomes


def num_steps(questions: Sequence[QAQuestion], ways: Sequence[Way], states: Sequence[State]) -> int:
    """Number of requests that `measure` runs, including full prefill's and those that fill stores."""
    prompts = [question.documents for question in questions]
    ways_in = _ways_in(ways, states)
    filling = [len(steps(state, prompts)) for state in states for _ in {_population(way) for way in ways_in[state]}]
    return sum(filling) + (1 + sum(map(len, ways_in.values()))) * len(questions)


def _ways_in(ways: Sequence[Way], states: Sequence[State]) -> dict[State, list[Way]]:
    reusing = [way for way in ways if way != FULL]
    return {state: reusing[:1] if state == "empty" else reusing for state in states}


def measure_store(
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    config: EngineConfig,
    *,
    max_new_tokens: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[WayResults]:
    """Full prefill, then mode `bounded` over the existing store of `config`, without changing it.

    Args:
      progress: called with requests done and in all.
    """
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, 2 * len(questions))

    asked = _Asked(model, questions, max_new_tokens)
    full = asked.outcome(FULL, config.replace(store=None), None, tick)
    return [full, asked.outcome(Way(config.strategy), config.replace(read_only=True), None, tick)]


class _Asked:
    """Questions, and full prefill's answers to them once they are known."""

    def __init__(
        self,
        model: LoadedModel,
        questions: Sequence[QAQuestion],
        max_new_tokens: int,
        with_forced: bool = False,
        pasted: bool = False,
    ) -> None:
        self._model = model
        self._questions = questions
        self._max_new_tokens = max_new_tokens
        self._with_forced = with_forced
        self._pasted = pasted
        self._full: list[Response] = []
        self._full_logits: list[np.ndarray] = []

    def outcome(self, way: Way, config: EngineConfig, state: State | None, tick: Callable[[], None]) -> WayResults:
        """All questions answered by one engine; the first engine must be full prefill."""
        answers = []
        with Engine(self._model, config) as engine:
            for index, question in enumerate(self._questions):
                answer = _answer(engine, question, way, self._max_new_tokens, self._pasted)
                if way == FULL:
                    self._full.append(answer.last)
                scores = None
                if self._with_forced and way.strategy not in PASSAGE_BY_PASSAGE:
                    scores = self._forced(engine, index, way)
                answers.append(_answered(question, answer, self._full[index], scores))
                tick()
        return WayResults(way, tuple(answers), state)

    def _forced(self, engine: Engine, index: int, way: Way) -> Forced:
        question = self._questions[index]
        request = asking(question.text, question.documents, pasted=self._pasted)
        request = dataclasses.replace(request, reuse=way.reuse)
        drawn = forced.drawn_tokens(self._full[index], min(self._model.eos_ids, default=0))
        logits = forced.forced_logits(engine, request, drawn)
        if way == FULL:
            self._full_logits.append(logits)
        nll = None
        if question.answers and (right := self._right_tokens(index)):
            nll = forced.nll(forced.forced_logits(engine, request, right), right)
        full = self._full_logits[index]
        return Forced(forced.mean_kl(full, logits), forced.agreement(full, logits), nll)

    def _right_tokens(self, index: int) -> list[int]:
        """NLL of the first right answer, after the white space that begins full prefill's answer, since that differs
        between models."""
        assert self._model.tokenizer is not None
        text = self._full[index].text
        space = text[: len(text) - len(text.lstrip())]
        return self._model.tokenizer.encode(space + self._questions[index].answers[0].strip(), allow_special=False)


def _population(way: Way) -> _Population:
    """The settings that determine the stored passages of a way: strategy and ranking layers of the engine that computes
    them."""
    return way.stored_by, way.ranking_layers


def _answer(engine: Engine, question: QAQuestion, way: Way, max_new_tokens: int, pasted: bool) -> Combined:
    sampling = SamplingParams(max_new_tokens, logprobs=0, first_logits=True)

    def ask(text: str, documents: Sequence[Document]) -> Response:
        request = asking(text, documents, pasted=pasted)
        return engine.run(dataclasses.replace(request, sampling=sampling, reuse=way.reuse))

    if way.strategy == "map_rerank":
        return map_rerank(ask, question.text, question.documents)
    if way.strategy == "map_reduce":
        return map_reduce(ask, question.text, question.documents)
    response = ask(question.text, question.documents)
    return Combined(response, (response,), response.ttft_s)


def _answered(question: QAQuestion, answer: Combined, full: Response, scores: Forced | None) -> Answered:
    response = answer.last
    parts = [report for call in answer.calls for report in call.reuse.per_document if report.role == "passage"]
    num_tokens = sum(part.num_tokens for part in full.reuse.per_document if part.role == "passage")
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
        forced=scores,
    )


def _logits(response: Response) -> np.ndarray:
    assert response.first_logits is not None
    return response.first_logits


def computed_tokens(reuse: ReuseReport) -> float:
    """Computed tokens of the documents, without question and system prompt, as the equivalent number of tokens through
    all layers."""
    parts = reuse.per_document
    question = reuse.prompt_tokens - sum(part.num_tokens for part in parts)
    system = sum(part.num_tokens - part.reused_tokens for part in parts if part.role != "passage")
    return max(0.0, reuse.computed_share * reuse.prompt_tokens - question - system)  # rounding
