"""Baselines that ask passage by passage and so need no reuse across passages (CacheBlend sec. 7).

No passage is behind another one, so each is reused exactly; but no prompt combines facts of two passages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ccjax.requests import Response
from ccjax.types import Document

Ask = Callable[[str, Sequence[Document]], Response]
"""From a question and passages to the answer, with log-probabilities."""

_MAP_PROMPT = (
    "Use the passage above to see if any of its text is relevant to answer the question. "
    "Return any relevant text verbatim. Question: {question}"
)


@dataclasses.dataclass(frozen=True)
class Combined:
    """An answer from several calls.

    Attributes:
      last: the call whose answer it is.
      calls: all of them, including `last`.
      ttft_s: seconds to its first token; calls run one after the other.
    """

    last: Response
    calls: tuple[Response, ...]
    ttft_s: float


def map_rerank(ask: Ask, question: str, documents: Sequence[Document]) -> Combined:
    """Asks the question of each passage alone; the answer with the highest confidence wins, among equal ones the first.

    In LangChain the model writes a score. Reading: the mean log-probability of the answer's tokens, which every model
    has; an answer without tokens has the lowest confidence.
    """
    calls = tuple(ask(question, [document]) for document in documents)
    best = max(calls, key=_confidence)
    return Combined(best, calls, sum(call.total_s for call in calls))


def map_reduce(ask: Ask, question: str, documents: Sequence[Document]) -> Combined:
    """Asks for the relevant text of each passage, which replaces the passage in the last prompt."""
    prompt = _MAP_PROMPT.format(question=question)
    told = tuple(ask(prompt, [document]) for document in documents)
    said = [
        Document(answer.text.strip(), title=document.title)
        for answer, document in zip(told, documents, strict=True)
        if answer.text.strip()
    ]
    last = ask(question, said)
    return Combined(last, (*told, last), sum(call.total_s for call in told) + last.ttft_s)


def _confidence(response: Response) -> float:
    logprobs = response.logprobs or ()
    return sum(token.logprob for token in logprobs) / len(logprobs) if logprobs else float("-inf")
