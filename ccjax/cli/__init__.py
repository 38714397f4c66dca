"""The command `ccjax`; its subcommands are modules of this package, imported when they run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

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
    command, rest = command_of(
        "ccjax", "Retrieval-augmented generation that reuses the KV of passages.", COMMANDS, argv
    )
    return importlib.import_module(f"ccjax.cli.{command}").main(rest)


def command_of(
    prog: str, description: str | None, commands: Mapping[str, str], argv: Sequence[str] | None
) -> tuple[str, Sequence[str]]:
    """The command that the arguments begin with, of some with their help texts, and the remaining arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"{prog} COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ccjax {__version__}")
    named = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in commands.items():
        named.add_parser(name, help=text)
    argv = sys.argv[1:] if argv is None else argv
    return parser.parse_args(argv[:1]).command, argv[1:]
