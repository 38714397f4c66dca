"""What evaluate.py and calibrate.py share: options of a run, and the run with its progress."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

if TYPE_CHECKING:
    from ccjax.engine.loading import LoadedModel
    from ccjax.evaluation.measure import Outcome
    from ccjax.evaluation.questions import QAQuestion
    from ccjax.evaluation.states import State
    from ccjax.evaluation.ways import Way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of how questions are answered."""
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (default 16)")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus answer (default: the model's, or 8192)")
    parser.add_argument("--prompt", metavar="TEXT", help="system prompt (default: the built-in one)")
    parser.add_argument("--quantization", choices=("int8", "fp8"), help="as it will be served")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with other tokenizer files than the model's own")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="as it will be served")


def check_writable(name: str, path: Path | None) -> None:
    """Nothing, unless a file could not be written there: then a long run would end without it.

    Raises:
      ValueError: names the option.
    """
    if path is not None and not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise ValueError(f"--{name}: wanted a file in a directory that can be written to, got {path}")


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
) -> list[Outcome]:
    """`ccjax.evaluation.measure.measure`, with stores in a directory that goes away."""
    from ccjax.evaluation.measure import measure

    task = progress.add_task(description, total=None)

    def show(stage: str, done: int, total: int) -> None:
        progress.update(task, description=description or stage, completed=done, total=total)

    with tempfile.TemporaryDirectory() as directory:
        outcomes = measure(
            model,
            questions,
            ways,
            Path(directory),
            states=states,
            max_new_tokens=args.max_tokens,
            with_forced=with_forced,
            settings={"max_model_len": args.max_model_len, "system_prompt": args.prompt},
            progress=show,
        )
    progress.remove_task(task)
    return outcomes
