"""Trains the demo model, writes the demo corpus, measures the shipped weights; needs `pip install -e ".[train]"`.

python scripts/train_demo.py --out runs/demo               train; the model is written to runs/demo/model
python scripts/train_demo.py --out runs/demo --resume      continue after an interruption
python scripts/train_demo.py --out runs/demo --install     put the newest checkpoint into ccjax/assets/demo_model
python scripts/train_demo.py --corpus-only                 rewrite corpus, questions and tokenizer
python scripts/train_demo.py --evaluate                    accuracy per kind of question of the shipped weights;
                                                           what reuse costs: scripts/evaluate.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from ccjax.demo.world import Kind
from ccjax.evaluation.pages import show
from scripts.demo_model.corpus import CORPUS_DIRECTORY, QUESTIONS_FILE, build_corpus, write_corpus
from scripts.demo_model.curriculum import QUICK_STAGES, STAGES
from scripts.demo_model.evaluate import Score, evaluate_corpus, evaluate_worlds
from scripts.demo_model.export import MODEL_DIRECTORY, export_model, load_model
from scripts.demo_model.tokenizer import save_tokenizer, train_tokenizer
from scripts.demo_model.training import Checkpoints, TrainingConfig, demo_config, restore_or_start, train

DEFAULT_STEPS = 4000
QUICK_STEPS = 30


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for checkpoints and the trained model")
    parser.add_argument("--steps", type=int, help=f"training steps in all (default {DEFAULT_STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint under --out")
    parser.add_argument("--quick", action="store_true", help="a few seconds of training, or a tenth of the questions")
    parser.add_argument("--install", action="store_true", help="put --out's newest checkpoint into the assets")
    parser.add_argument("--corpus-only", action="store_true", help="rewrite corpus, questions and tokenizer")
    parser.add_argument("--evaluate", action="store_true", help="accuracy per kind of question")
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="model that --evaluate measures")
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps: wanted a positive number, got {args.steps}")
    if args.out is None and not (args.corpus_only or args.evaluate):
        parser.error("--out: wanted a directory to train in, or one of --corpus-only and --evaluate")
    return args


def _evaluate(model: Path, *, quick: bool) -> None:
    started = time.monotonic()
    params, config, tokenizer = load_model(model)
    corpus, count = build_corpus(), 20 if quick else 100
    sets: list[tuple[str, dict[Kind, Score]]] = [
        ("shipped documents, 5 passages", evaluate_corpus(params, config, tokenizer, corpus, orders=1 if quick else 3)),
        ("fresh towns, 4 passages", evaluate_worlds(params, config, tokenizer, count, 4)),
        ("fresh towns, 8 passages", evaluate_worlds(params, config, tokenizer, count, 8)),
    ]
    rows = [
        (name, kind, f"{score.accuracy_ratio:.3f}", f"{score.guess_ratio:.3f}", str(score.num_questions))
        for name, scores in sets
        for kind, score in scores.items()
    ]
    head = ("questions", "kind", "exact match", "guessing", "count")
    show(head, rows, f"{model}, float32, full prefill", [f"{time.monotonic() - started:.0f} s"])


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; `argv` defaults to the process's arguments."""
    args = _parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.corpus_only:
        corpus = build_corpus()
        write_corpus(corpus)
        MODEL_DIRECTORY.mkdir(parents=True, exist_ok=True)
        save_tokenizer(train_tokenizer(), MODEL_DIRECTORY)
        console.print(
            f"{len(corpus.documents)} documents in {CORPUS_DIRECTORY}\n"
            f"{len(corpus.questions)} questions in {QUESTIONS_FILE}"
        )
    elif args.evaluate:
        _evaluate(args.model, quick=args.quick)
    else:
        tokenizer = train_tokenizer()
        steps = args.steps or (QUICK_STEPS if args.quick else DEFAULT_STEPS)
        stages = QUICK_STAGES if args.quick else STAGES
        config = TrainingConfig(demo_config(tokenizer.get_vocab_size()), stages, steps, args.seed)
        if args.install:
            params, _, progression = restore_or_start(config, Checkpoints(args.out / "checkpoints"), resume=True)
            export_model(params, config.model, tokenizer)
            console.print(f"step {progression.step} is now {MODEL_DIRECTORY}")
        else:
            params, _ = train(config, tokenizer, args.out, resume=args.resume, console=console)
            export_model(params, config.model, tokenizer, args.out / "model")


if __name__ == "__main__":
    main()
