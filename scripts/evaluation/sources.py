"""The questions of an evaluation and the passages that stand before theirs when these are computed. Knows no model."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ccjax.evaluation.questions import QAQuestion
    from ccjax.types import Document

NUM_OTHERS = 2


def add_arguments(parser: argparse.ArgumentParser, *, seed: str = "test") -> None:
    """Options that choose questions, of the demo's towns those of a seed."""
    data = os.environ.get("CCJAX_TEST_DATA")
    parser.add_argument(
        "--questions",
        default="demo",
        help="JSONL file with question, docs and answers a line; demo (default) draws them from towns of the demo",
    )
    parser.add_argument(
        "--limit", type=int, help="questions of the file, or of each kind of the demo (default all; 60)"
    )
    parser.add_argument(
        "--kinds", nargs="+", help="of the demo's questions: single pronoun alias two_hop (default all)"
    )
    parser.add_argument(
        "--passages",
        type=int,
        nargs="+",
        help="of a question: of the file's at most so many (default all); of the demo's as many questions with each of "
        "these numbers (default 4 5 6 7 8)",
    )
    text = f"of the demo's towns; training uses neither test nor validation (default {seed})"
    parser.add_argument("--seed", default=seed, help=text)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(data) if data else None,
        help="folder with tokenizer_llama3/, for random models",
    )


def questions_and_others(args: argparse.Namespace) -> tuple[tuple[QAQuestion, ...], tuple[Document, ...]]:
    """The questions, and `NUM_OTHERS` passages that answer none of them.

    Raises:
      ValueError: an option is out of range, or the file is not as it should be; names it.
    """
    for name, values in (("limit", [args.limit]), ("passages", args.passages or [])):
        for value in values:
            if value is not None and value < 1:
                raise ValueError(f"--{name}: wanted a positive integer, got {value}")
    return _of_demo(args) if args.questions == "demo" else _of_file(args)


def _of_demo(args: argparse.Namespace) -> tuple[tuple[QAQuestion, ...], tuple[Document, ...]]:
    from ccjax.demo.evaluate import TEST_WEIGHTS
    from ccjax.demo.world import KINDS, Difficulty, sample_context
    from ccjax.evaluation.questions import demo_questions
    from ccjax.types import Document

    unknown = [kind for kind in args.kinds or () if kind not in KINDS]
    if unknown:
        raise ValueError(f"--kinds: wanted some of {', '.join(KINDS)}, got {unknown[0]!r}")
    questions = demo_questions(
        args.limit or 60, args.passages or (4, 5, 6, 7, 8), kinds=args.kinds or KINDS, seed=args.seed
    )
    rng = random.Random(f"{args.seed}/others")
    town = sample_context(rng, Difficulty(NUM_OTHERS, TEST_WEIGHTS, min_words=24), 1)
    return questions, tuple(Document(passage.text, title=passage.title) for passage in town.passages)


def _of_file(args: argparse.Namespace) -> tuple[tuple[QAQuestion, ...], tuple[Document, ...]]:
    from ccjax.evaluation.questions import read_questions

    if args.passages and len(args.passages) > 1:
        raise ValueError(f"--passages: wanted one number for the questions of a file, got {args.passages}")
    found = read_questions(Path(args.questions), num_documents=args.passages[0] if args.passages else None)
    questions = found[: args.limit]
    asked = {document.text for question in questions for document in question.documents}
    others = [document for question in reversed(found) for document in question.documents if document.text not in asked]
    if len(others) < NUM_OTHERS:  # all of the file is asked: any two, and none stands before itself
        others = list(found[-1].documents)
    return questions, tuple(others[:NUM_OTHERS])
