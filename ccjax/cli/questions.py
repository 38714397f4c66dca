"""Shared by `ccjax evaluate` and `ccjax calibrate`: options for questions and answers, and a run with progress."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from ccjax.config.engine import DTYPES, QUANTIZATIONS
from ccjax.evaluation import squad5

if TYPE_CHECKING:
    from ccjax.evaluation.measure import WayResults
    from ccjax.evaluation.parts import ResultsFile
    from ccjax.evaluation.questions import QAQuestion
    from ccjax.evaluation.states import State
    from ccjax.evaluation.ways import Way
    from ccjax.loading.model import LoadedModel


def add_question_arguments(parser: argparse.ArgumentParser, *, seed: str = "test") -> None:
    """Options that select questions; `seed` is the default seed of the demo's towns."""
    data = os.environ.get("CCJAX_TEST_DATA")
    parser.add_argument(
        "--questions",
        default="demo",
        help="JSONL file with question, docs and answers a line; demo (default) draws them from towns of the demo, "
        "squad5 takes SQuAD's in the data folder, over five passages each",
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
        help="passages of a question: of a file at most this many (default all); of the demo these numbers, each for "
        "as many questions (default 4 5 6 7 8)",
    )
    text = f"of the demo's towns; training uses neither test nor validation (default {seed})"
    parser.add_argument("--seed", default=seed, help=text)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(data) if data else None,
        help="folder with qa/ for squad5, and tokenizer_llama3/ for random models (default $CCJAX_TEST_DATA)",
    )


def questions_of(args: argparse.Namespace) -> tuple[QAQuestion, ...]:
    """The questions selected by the options.

    Raises:
      ValueError: an option is out of range, or the file is malformed; names it.
    """
    for name, values in (("limit", [args.limit]), ("passages", args.passages or [])):
        for value in values:
            if value is not None and value < 1:
                raise ValueError(f"--{name}: wanted a positive integer, got {value}")
    return _of_demo(args) if args.questions == "demo" else _of_file(args)


def _of_demo(args: argparse.Namespace) -> tuple[QAQuestion, ...]:
    from ccjax.demo.world import KINDS
    from ccjax.evaluation.questions import demo_questions

    unknown = [kind for kind in args.kinds or () if kind not in KINDS]
    if unknown:
        raise ValueError(f"--kinds: wanted some of {', '.join(KINDS)}, got {unknown[0]!r}")
    return demo_questions(args.limit or 60, args.passages or (4, 5, 6, 7, 8), kinds=args.kinds or KINDS, seed=args.seed)


def _of_file(args: argparse.Namespace) -> tuple[QAQuestion, ...]:
    from ccjax.evaluation.questions import read_questions

    if args.passages and len(args.passages) > 1:
        raise ValueError(f"--passages: wanted one number for the questions of a file, got {args.passages}")
    count = args.passages[0] if args.passages else None
    if args.questions != "squad5":
        return read_questions(Path(args.questions), limit=args.limit, num_documents=count)
    if args.data is None:
        raise ValueError(f"--data: wanted a folder with {squad5.SOURCE} for squad5, got none")
    found = squad5.squad5(read_questions(args.data / squad5.SOURCE))[: args.limit]
    return tuple(dataclasses.replace(question, documents=question.documents[:count]) for question in found)


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for answering questions."""
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (default 16)")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus answer (default: the model's, or 8192)")
    parser.add_argument("--prompt", metavar="TEXT", help="system prompt (default: the built-in one)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="as it will be served")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with other tokenizer files than the model's own")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="as it will be served")


def measurement(args: argparse.Namespace, ways: Sequence[Way], states: Sequence[State]) -> dict[str, Any]:
    """All that results depend on besides the questions, as JSON types (`ccjax.evaluation.parts.ResultsFile`)."""
    names = ("model", "questions", "prompt", "max_tokens", "dtype", "quantization", "max_model_len")
    return {name: getattr(args, name) for name in names} | {"cached": [*states], "ways": [str(way) for way in ways]}


def run(
    args: argparse.Namespace,
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    ways: Sequence[Way],
    states: Sequence[State],
    progress: Progress,
    description: str = "",
    *,
    with_forced: bool = False,
    resume: ResultsFile | None = None,
) -> list[WayResults]:
    """Runs `ccjax.evaluation.parts.measure_in_parts` with stores in a temporary directory."""
    from ccjax.evaluation.parts import measure_in_parts

    task = progress.add_task(description, total=None)

    def show(stage: str, done: int, total: int) -> None:
        progress.update(task, description=description or stage, completed=done, total=total)

    with tempfile.TemporaryDirectory() as directory:
        outcomes = measure_in_parts(
            model,
            questions,
            ways,
            Path(directory),
            states=states,
            max_new_tokens=args.max_tokens,
            with_forced=with_forced,
            settings={"max_model_len": args.max_model_len, "system_prompt": args.prompt},
            progress=show,
            resume=resume,
        )
    progress.remove_task(task)
    return outcomes
