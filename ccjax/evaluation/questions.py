"""Questions with their passages and right answers, from a JSONL file or from towns of the demo."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ccjax.evaluation.towns import KINDS, TEST_SEED, Context, Kind, held_out_contexts
from ccjax.types import Document, document_from_mapping


@dataclasses.dataclass(frozen=True)
class QAQuestion:
    """One question.

    Attributes:
      answers: all right answers; empty if unknown, then only agreement with full prefill can be measured.
      documents: the passages, in prompt order.
      kind: of the question, if there are several; "" otherwise.
      guess_ratio: how often the best guess is right; None if unknown.
    """

    question_id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    kind: str = ""
    guess_ratio: float | None = None


def read_questions(
    path: Path,
    *,
    limit: int | None = None,
    num_documents: int | None = None,
    find: Callable[[str], Sequence[Document]] | None = None,
) -> tuple[QAQuestion, ...]:
    """The first `limit` questions of a JSONL file: `{"question", "docs": [{"title"?, "text"}], "answers"?, "id"?,
    "kind"?}` per line, each with its first `num_documents` passages.

    Args:
      find: finds passages for a question whose line names none; None if every line must name them.

    Raises:
      ValueError: the file cannot be read or contains no question, or a line is malformed; names path and line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"questions: wanted a JSONL file, got {path}: {error}") from error
    found: list[QAQuestion] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(found) == limit:
            break
        if line.strip():
            try:
                found.append(_question(json.loads(line), str(number), num_documents, find))
            except (ValueError, TypeError) as error:
                raise ValueError(f"questions: {path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"questions: wanted at least one, got none in {path}")
    return tuple(found)


def _question(
    value: Any, number: str, num_documents: int | None, find: Callable[[str], Sequence[Document]] | None
) -> QAQuestion:
    if not isinstance(value, Mapping):
        raise ValueError(f"wanted an object, got {type(value).__name__}")
    text, documents, answers = value.get("question"), value.get("docs"), value.get("answers", ())
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"wanted a non-empty string under 'question', got {text!r}")
    if documents is None and find is not None:
        documents = [{"text": document.text, "title": document.title} for document in find(text)]
    if not isinstance(documents, Sequence) or isinstance(documents, str) or not documents:
        raise ValueError(f"wanted a list of passages under 'docs', got {documents!r:.80}")
    if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"wanted a list of strings under 'answers', got {answers!r:.80}")
    passages = [
        document_from_mapping(
            {name: document[name] for name in ("text", "title") if name in document}, argument=f"docs[{index}]"
        )
        for index, document in enumerate(documents[:num_documents])
    ]
    return QAQuestion(
        question_id=str(value.get("id", number)),
        text=text,
        answers=tuple(answers),
        documents=tuple(passages),
        kind=str(value.get("kind", "")),
    )


def demo_questions(
    num_per_kind: int, num_passages: Sequence[int] = (4,), *, kinds: Sequence[Kind] = KINDS, seed: str = TEST_SEED
) -> tuple[QAQuestion, ...]:
    """Questions over towns that the demo model was not trained on, kind after kind, each kind divided equally among
    these numbers of passages."""
    return tuple(
        QAQuestion(
            question_id=f"{seed}/{kind}/{number}",
            text=context.questions[0].text,
            answers=(context.questions[0].answer,),
            documents=context.passages,
            kind=kind,
            guess_ratio=context.questions[0].guess_ratio,
        )
        for kind in kinds
        for number, context in enumerate(_contexts(kind, num_per_kind, num_passages, seed))
    )


def _contexts(kind: Kind, count: int, num_passages: Sequence[int], seed: str) -> list[Context]:
    found = []
    for place, passages in enumerate(num_passages):
        found += held_out_contexts(kind, len(range(place, count, len(num_passages))), passages, seed=seed)
    return found
