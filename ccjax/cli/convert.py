"""Converts a model to a checkpoint that loads fast, or back: ccjax convert MODEL DIR [--quantization int8]

The checkpoint (Orbax, with tokenizer files and config.json) is a directory that every --model accepts. Both forms of
the same weights share stored KV.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ccjax.cli.progress import Stages, bars
from ccjax.config.engine import DTYPES, QUANTIZATIONS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX would reserve three quarters of a GPU that is not used here
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"ccjax convert: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from ccjax.loading.conversion import to_checkpoint, to_hugging_face

    if args.to == "huggingface" and args.quantization is not None:
        raise ValueError(f"--quantization: wanted none with --to huggingface, got {args.quantization!r}")
    with contextlib.closing(Stages(bars())) as progress:
        settings: dict[str, Any] = {"dtype": args.dtype, "tokenizer": args.tokenizer, "progress": progress}
        if args.to == "huggingface":
            to_hugging_face(args.model, args.directory, **settings)
        else:
            to_checkpoint(args.model, args.directory, quantization=args.quantization, **settings)
    num_bytes = sum(path.stat().st_size for path in args.directory.rglob("*") if path.is_file())
    print(f"{args.directory}: {num_bytes / 1e9:.2f} GB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ccjax convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="as --model of ccjax serve")
    add("directory", type=Path, metavar="DIR", help="output; a checkpoint there stays until the new one is complete")
    add("--to", default="orbax", choices=["orbax", "huggingface"], help="form to write (default orbax)")
    add("--quantization", choices=QUANTIZATIONS, help="weights of products in 8 bits (default: none)")
    text = "of the other weights (default: without loss)"
    add("--dtype", choices=DTYPES, help=text)
    add("--tokenizer", type=Path, metavar="DIR", help="take the tokenizer files of this directory")
    return parser
