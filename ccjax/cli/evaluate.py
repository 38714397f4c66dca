"""Measures what reuse costs in answers: ccjax evaluate [--model MODEL] [--questions FILE] [--ways ...]

Asks every question with full prefill and then in each way, through the public engine, over passages in several cache
states (--cached). Scores are against the right answers and against full prefill's, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ccjax.cli.progress import bars

DEFAULT_WAYS = ("default", "cacheblend:0.15", "cachecraft:0.15", "legolink:0.15")
DEFAULT_RATIOS = (0.05, 0.1, 0.15, 0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"ccjax evaluate: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from ccjax.cli.questions import measurement, questions_of, run
    from ccjax.cli.values import check_writable
    from ccjax.evaluation.environment import environment
    from ccjax.evaluation.parts import ResultsFile
    from ccjax.evaluation.summary import figures
    from ccjax.evaluation.tables import markdown, plot, rich_tables
    from ccjax.evaluation.ways import expand
    from ccjax.loading.model import load_model
    from ccjax.loading.weights import RANDOM

    ways = expand(args.ways, args.ratios)
    check_writable("markdown", args.markdown)
    check_writable("plot", args.plot)
    questions = questions_of(args)
    if len(questions) < 2:
        raise ValueError(f"--limit: wanted at least two questions, for intervals, got {len(questions)}")
    tokenizer = args.tokenizer
    if tokenizer is None and args.model.startswith(RANDOM) and args.data is not None:
        tokenizer = args.data / "tokenizer_llama3"
    states = tuple(dict.fromkeys(args.cached))
    evaluation: dict[str, Any] = {
        "model": args.model,
        "questions": args.questions,
        "num_questions": len(questions),
        "cached": states,
        "prompt": args.prompt,
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
    }
    resume = ResultsFile(args.resume, measurement(args, ways, states)) if args.resume else None
    model = load_model(args.model, dtype=args.dtype, quantization=args.quantization, tokenizer=tokenizer)
    with bars() as progress:
        outcomes = run(args, model, questions, ways, states, progress, with_forced=True, resume=resume)
    result: dict[str, Any] = {
        "evaluation": evaluation,
        **environment(),
        "ways": figures(outcomes),
    }
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in rich_tables(result):
        console.print(table)
    if args.plot:
        plot(result, args.plot)
    if args.markdown:
        page = markdown(result, args.title, args.plot)
        with args.markdown.open("a" if args.append else "w", encoding="utf-8") as file:
            file.write(page)
    if args.json:
        print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    from ccjax.cli.questions import add_answer_arguments, add_question_arguments
    from ccjax.evaluation.states import STATES

    parser = argparse.ArgumentParser(
        prog="ccjax evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="as with ccjax serve: a directory or GGUF file, smollm2, demo (default), or random:LAYERSxWIDTH",
    )
    add_question_arguments(parser)
    add_answer_arguments(parser)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=DEFAULT_WAYS,
        metavar="WAY",
        help="default for the default options; or strategy[@layer,layer][/old][:ratio], where @ names the layers whose "
        f"attention ranks tokens and /old leaves keys at their old positions (default: {' '.join(DEFAULT_WAYS)})",
    )
    text = (
        "what was computed before: empty (nothing), alone (each passage), prepared (each as servers do it: alone and "
    )
    text += "behind the frame), seen (an earlier prompt with the passages in the reverse order), idle (the same, and "
    text += "then the server had time to prepare its passages); default: all"
    parser.add_argument("--cached", nargs="+", choices=STATES, default=STATES, metavar="STATE", help=text)
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=DEFAULT_RATIOS, help="shares to recompute, for ways without one"
    )
    text = "keep results there as they come; if the file is from an interrupted run, continue it"
    parser.add_argument("--resume", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object on the last line")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as a page")
    parser.add_argument("--append", action="store_true", help="add to that page instead")
    parser.add_argument("--title", default="Answer quality", help="of that page or part")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw quality over computed tokens (.svg or .png)")
    return parser
