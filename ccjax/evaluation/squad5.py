"""Questions of SQuAD over five passages each: python -m ccjax.evaluation.squad5 SOURCE OUTPUT

SOURCE has a question with its right paragraph per line, as `qa/squad_xquad_en.jsonl` in the data folder. Each is asked
over that paragraph, up to two others of the same article and some of other articles, in random order; those with long
passages are left out. SOURCE is sorted by article, so questions are shuffled: the first ones cover all articles. ccjax
evaluate --questions squad5 asks the same questions without a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ccjax.evaluation.questions import QAQuestion
    from ccjax.types import Document

SOURCE = "qa/squad_xquad_en.jsonl"
NUM_PASSAGES, NUM_OF_ARTICLE = 5, 2
MAX_CHARACTERS = 4500
"""Length limit of the passages together: some 1,100 tokens."""


def squad5(questions: Sequence[QAQuestion]) -> tuple[QAQuestion, ...]:
    """The questions over five passages each, the same for the same questions.

    Raises:
      ValueError: a question has more than one passage, or there are too few articles.
    """
    by_article: dict[str | None, dict[Document, None]] = {}
    for question in questions:
        if len(question.documents) != 1:
            got = f"{len(question.documents)} passages of question {question.question_id}"
            raise ValueError(f"questions: wanted the right paragraph of each alone, got {got}")
        by_article.setdefault(question.documents[0].title, {})[question.documents[0]] = None
    shuffled = sorted(questions, key=lambda question: random.Random(f"squad5/{question.question_id}").random())
    found = (dataclasses.replace(question, documents=_passages(question, by_article)) for question in shuffled)
    return tuple(
        question for question in found if sum(len(passage.text) for passage in question.documents) <= MAX_CHARACTERS
    )


def _passages(question: QAQuestion, by_article: Mapping[str | None, Mapping[Document, None]]) -> tuple[Document, ...]:
    rng = random.Random(f"squad5/{question.question_id}/passages")
    (right,) = question.documents
    same = [passage for passage in by_article[right.title] if passage != right]
    others = [passage for title, passages in by_article.items() if title != right.title for passage in passages]
    chosen = [right, *rng.sample(same, min(NUM_OF_ARTICLE, len(same)))]
    missing = NUM_PASSAGES - len(chosen)
    if len(others) < missing:
        raise ValueError(f"questions: wanted at least {missing} paragraphs of other articles, got {len(others)}")
    chosen += rng.sample(others, missing)
    rng.shuffle(chosen)
    return tuple(chosen)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    from ccjax.evaluation.questions import read_questions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    args = parser.parse_args(argv)
    try:
        lines = [
            {
                "id": question.question_id,
                "question": question.text,
                "answers": question.answers,
                "docs": [{"title": passage.title or "", "text": passage.text} for passage in question.documents],
            }
            for question in squad5(read_questions(args.source))
        ]
        args.output.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"squad5: error: {error}")


if __name__ == "__main__":
    main()
