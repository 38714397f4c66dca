"""Shared by `ccjax evaluate` and `ccjax calibrate`: options for questions and answers, and a run with progress."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt
from rich.progress import Progress

from ccjax.cli.options import CommandSettings, subset
from ccjax.config.base import Described
from ccjax.config.engine import ModelSettings
from ccjax.config.values import FolderPath
from ccjax.evaluation import squad5
from ccjax.evaluation.towns import KINDS, Kind
from ccjax.loading.named import PACKAGED, TOY

if TYPE_CHECKING:
    from ccjax.config.engine import ModelSettings as _Model
    from ccjax.evaluation.measure import WayResults
    from ccjax.evaluation.parts import ResultsFile
    from ccjax.evaluation.questions import QAQuestion
    from ccjax.evaluation.states import State
    from ccjax.evaluation.ways import Way
    from ccjax.loading.model import LoadedModel
else:
    _Model = subset(ModelSettings, {"dtype", "quantization", "tokenizer", "max_model_len"})


class QuestionSettings(CommandSettings):
    """What to ask."""

    model_config = ConfigDict(title="questions")

    questions: str = "demo"
    """JSONL file with question, docs and answers a line; demo draws them from towns of the demo, squad5 takes those of
    SQuAD in the data folder, over five passages each."""
    limit: int | None = Field(default=None, ge=1)
    """Questions of the file, without it all, or of each kind of the demo, without it 60."""
    kinds: tuple[Kind, ...] = KINDS
    """Of the demo's questions."""
    passages: tuple[PositiveInt, ...] = ()
    """Passages of a question: of a file at most this many; of the demo these numbers, each for as many questions,
    without it 4 to 8."""
    seed: str = "test"
    """Of the demo's towns; training uses neither test nor validation."""
    data: FolderPath | None = Field(default_factory=lambda: os.environ.get("CCJAX_TEST_DATA") or None)
    """Folder with qa/ for squad5, and tokenizer_llama3/ for random models; without it $CCJAX_TEST_DATA."""


class AnswerSettings(_Model):
    """How to answer."""

    model_config = ConfigDict(title="answers")

    model: Annotated[str, Described(metavar="MODEL")] = ""
    """As with ccjax serve; it has to be named."""
    max_tokens: int = Field(default=16, ge=1)
    """Longest answer, in tokens."""
    prompt: Annotated[str, Described(metavar="TEXT")] | None = None
    """System prompt; without it the built-in one."""


class AskOptions(AnswerSettings, QuestionSettings):
    """Options of commands that ask questions."""


def questions_of(args: AskOptions) -> tuple[QAQuestion, ...]:
    """The questions selected by the options.

    Raises:
      ValueError: no model is named, an option is out of range, or the file is malformed; names it.
    """
    if not args.model:
        wanted = f"a model directory, a GGUF file, {', '.join(PACKAGED)}, or {TOY} for the toy model"
        raise ValueError(f"--model: wanted the model to ask ({wanted}), got none; it takes from minutes to hours")
    return _of_demo(args) if args.questions == "demo" else _of_file(args)


def _of_demo(args: AskOptions) -> tuple[QAQuestion, ...]:
    from ccjax.evaluation.questions import demo_questions

    return demo_questions(args.limit or 60, args.passages or (4, 5, 6, 7, 8), kinds=args.kinds or KINDS, seed=args.seed)


def _of_file(args: AskOptions) -> tuple[QAQuestion, ...]:
    from ccjax.evaluation.questions import read_questions

    if len(args.passages) > 1:
        raise ValueError(f"--passages: wanted one number for the questions of a file, got {[*args.passages]}")
    count = args.passages[0] if args.passages else None
    if args.questions != "squad5":
        return read_questions(Path(args.questions), limit=args.limit, num_documents=count)
    if args.data is None:
        raise ValueError(f"--data: wanted a folder with {squad5.SOURCE} for squad5, got none")
    found = squad5.squad5(read_questions(Path(args.data) / squad5.SOURCE))[: args.limit]
    return tuple(dataclasses.replace(question, documents=question.documents[:count]) for question in found)


def measurement(
    args: AskOptions, ways: Sequence[Way], states: Sequence[State], *, pasted: bool = False
) -> dict[str, Any]:
    """All that results depend on besides the questions, as JSON types (`ccjax.evaluation.parts.ResultsFile`)."""
    names = ("model", "questions", "prompt", "max_tokens", "dtype", "quantization", "max_model_len")
    asked = {"cached": [*states], "ways": [str(way) for way in ways], "pasted": pasted}
    return {name: getattr(args, name) for name in names} | asked


def run(
    args: AskOptions,
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    ways: Sequence[Way],
    states: Sequence[State],
    progress: Progress,
    description: str = "",
    *,
    with_forced: bool = False,
    pasted: bool = False,
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
            pasted=pasted,
            settings={"max_model_len": args.max_model_len, "system_prompt": args.prompt},
            progress=show,
            resume=resume,
        )
    progress.remove_task(task)
    return outcomes
