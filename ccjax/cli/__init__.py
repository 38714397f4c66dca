"""The command `ccjax`; its subcommands are modules of this package, imported when they run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ccjax import __version__

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "precompute": "compute the KV of documents ahead of traffic",
    "evaluate": "measure what reuse costs in answers",
    "calibrate": "find how much reuse must recompute",
    "snapshot": "save, restore or inspect a whole chunk-cache",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand with the remaining arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="ccjax",
        description="Retrieval-augmented generation that reuses the KV of passages.",
        epilog="ccjax COMMAND --help lists the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ccjax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    argv = sys.argv[1:] if argv is None else argv
    command = parser.parse_args(argv[:1]).command
    return importlib.import_module(f"ccjax.cli.{command}").main(argv[1:])
