"""Measures what reuse costs in answers: ccjax evaluate --model MODEL [--questions FILE] [--ways ...]

Asks every question with full prefill and then in each way, through the public engine, over passages in several cache
states (--cached). Scores are against the right answers and against full prefill's, with 95 % intervals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from rich.console import Console

from ccjax.cli.options import run_command
from ccjax.cli.progress import bars
from ccjax.cli.questions import AskOptions, measurement, questions_of, run
from ccjax.cli.values import check_installed, check_writable
from ccjax.config.base import Described
from ccjax.config.values import FilePath
from ccjax.evaluation.states import STATES, State

DEFAULT_WAYS = ("default", "cacheblend:0.15", "cachecraft:0.15", "cachecraft=1", "legolink:0.15")


class EvaluateOptions(AskOptions):
    """Ways to compare, and where the figures go."""

    model_config = ConfigDict(title="comparison")

    ways: Annotated[tuple[str, ...], Described(metavar="WAY")] = Field(default=DEFAULT_WAYS, min_length=1)
    """default for the default options; or strategy[@layer,layer][/old][/rule window][:ratio or =alpha], where @
    names the layers whose attention ranks tokens, /old leaves keys at their old positions, /entropy3 is the focus cut
    (CacheCraft alg. 1), and =1 recomputes what CacheCraft eq. 12 says with that alpha."""
    cached: tuple[State, ...] = Field(default=STATES, min_length=1)
    """What was computed before: empty (nothing), alone (each passage), prepared (each as servers do it: alone and
    behind the frame), seen (an earlier prompt with the passages in the reverse order), idle (the same, and then the
    server had time to prepare its passages)."""
    pasted: bool = False
    """Write passages into the system message, as clients do, instead of sending them as documents."""
    ratios: tuple[float, ...] = (0.05, 0.1, 0.15, 0.3)
    """Shares to recompute, for ways without one."""
    resume: FilePath | None = None
    """Keep results there as they come; if the file is from an interrupted run, continue it."""
    json_: bool = False
    """Print all figures as one JSON object on the last line."""
    markdown: FilePath | None = None
    """Write the tables as a page."""
    append: bool = False
    """Add to that page instead."""
    title: str = "Answer quality"
    """Of that page or part."""
    plot: FilePath | None = None
    """Draw quality over computed tokens (.svg or .png)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_command(EvaluateOptions, argv, _run, prog="ccjax evaluate", description=__doc__)


def _run(args: EvaluateOptions) -> int:
    from ccjax.evaluation.environment import environment
    from ccjax.evaluation.parts import ResultsFile
    from ccjax.evaluation.summary import figures
    from ccjax.evaluation.tables import markdown, plot, rich_tables
    from ccjax.evaluation.ways import expand
    from ccjax.loading.model import load_model
    from ccjax.loading.weights import RANDOM

    questions = questions_of(args)
    check_installed("evaluate", "rouge_score", *(["matplotlib"] if args.plot else []))
    ways = expand(args.ways, args.ratios)
    check_writable("markdown", args.markdown)
    check_writable("plot", args.plot)
    if len(questions) < 2:
        raise ValueError(f"--limit: wanted at least two questions, for intervals, got {len(questions)}")
    tokenizer = args.tokenizer
    if tokenizer is None and args.model.startswith(RANDOM) and args.data is not None:
        tokenizer = str(Path(args.data) / "tokenizer_llama3")
    states = tuple(dict.fromkeys(args.cached))
    evaluation: dict[str, Any] = {
        "model": args.model,
        "questions": args.questions,
        "num_questions": len(questions),
        "cached": states,
        "prompt": args.prompt,
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
        "pasted": args.pasted,
    }
    measured = measurement(args, ways, states, pasted=args.pasted)
    resume = ResultsFile(Path(args.resume), measured) if args.resume else None
    model = load_model(args.model, dtype=args.dtype, quantization=args.quantization, tokenizer=tokenizer)
    with bars() as progress:
        outcomes = run(
            args, model, questions, ways, states, progress, with_forced=True, pasted=args.pasted, resume=resume
        )
    result: dict[str, Any] = {
        "evaluation": evaluation,
        **environment(),
        "ways": figures(outcomes),
    }
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in rich_tables(result):
        console.print(table)
    if args.plot:
        plot(result, Path(args.plot))
    if args.markdown:
        page = markdown(result, args.title, None if args.plot is None else Path(args.plot))
        with open(args.markdown, "a" if args.append else "w", encoding="utf-8") as file:
            file.write(page)
    if args.json_:
        print(json.dumps(result))
    return 0
