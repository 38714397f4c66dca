"""Trains the demo model, writes the demo corpus, and measures the shipped weights. Knows nothing of serving."""

from __future__ import annotations

import argparse
from pathlib import Path

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from rich.console import Console
    from ccjax.demo.curriculum import STAGES
    from ccjax.demo.tokenizer import train_tokenizer
    from ccjax.demo.training import TrainingConfig, demo_config, train
    tokenizer = train_tokenizer()
    train(TrainingConfig(demo_config(tokenizer.get_vocab_size()), STAGES, args.steps, args.seed), tokenizer, args.out, resume=args.resume, console=Console(width=200))
main()
