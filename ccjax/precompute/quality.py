"""Quality of answers over a compiled store: asks questions with full prefill and over the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ccjax.engine import EngineConfig
from ccjax.evaluation.measure import measure_store
from ccjax.evaluation.questions import read_questions
from ccjax.evaluation.scores import Interval, best, exact_match, mean_interval
from ccjax.loading.model import LoadedModel
from ccjax.retrieval import Retriever


@dataclasses.dataclass(frozen=True)
class Quality:
    """Greedy answers over the store compared with those of full prefill.

    Attributes:
      num_questions: at least two. num_documents: mean number of passages per question.
      same_answers: share with the text of full prefill, ignoring case, punctuation and articles.
      same_tokens: share with identical tokens.
      first_kl: mean KL divergence of the first token's distribution, in nats.
      computed_share: share of the passages' tokens that ran through the model, over all layers.
      right, right_full: share of right answers, over the store and with full prefill, of the `num_known` questions with
        known answers; None if there are none.
    """

    num_questions: int
    num_documents: float
    strategy: str
    same_answers: Interval
    same_tokens: Interval
    first_kl: float
    computed_share: float
    num_known: int
    right: float | None
    right_full: float | None


def measure_quality(
    model: LoadedModel,
    config: EngineConfig,
    path: Path,
    retriever: Retriever,
    top_k: int,
    limit: int | None,
    max_new_tokens: int,
    progress: Callable[[str, int, int], None],
) -> Quality:
    """Asks the questions of a file (`ccjax.evaluation.questions.read_questions`); a line without passages gets the
    `top_k` that the retriever finds, in that order, as in a server.

    Args:
      config: of the server that will use the store.

    Raises:
      ValueError: the file cannot be used, or has fewer than two questions.
    """

    def find(text: str) -> list:
        return [passage.as_document() for passage in retriever.search(text, top_k)]

    questions = read_questions(path, limit=limit, find=find)
    if len(questions) < 2:
        raise ValueError(f"questions: wanted at least two, for an interval, got {len(questions)} in {path}")
    full, own = measure_store(
        model,
        questions,
        config,
        max_new_tokens=max_new_tokens,
        progress=lambda done, total: progress("questions", done, total),
    )
    pairs = list(zip(own.answers, full.answers, strict=True))
    known = [pair for pair in pairs if pair[0].question.answers]

    def share_right(place: int) -> float | None:
        right = [best(exact_match, pair[place].text, pair[place].question.answers) for pair in known]
        return float(np.mean(right)) if right else None

    return Quality(
        num_questions=len(questions),
        num_documents=float(np.mean([len(question.documents) for question in questions])),
        strategy=config.strategy,
        same_answers=mean_interval([exact_match(answer.text, whole.text) for answer, whole in pairs]),
        same_tokens=mean_interval([float(answer.is_same) for answer, _ in pairs]),
        first_kl=float(np.mean([answer.first_kl for answer, _ in pairs])),
        computed_share=float(np.mean([answer.computed_ratio for answer, _ in pairs])),
        num_known=len(known),
        right=share_right(0),
        right_full=share_right(1),
    )
