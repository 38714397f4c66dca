"""Measures ccjax: `python scripts/bench.py NAME [--quick] [--json]`. Each benchmark is a module of scripts/benchmarks.

Prints a table; with --json, one object of raw figures as the last line: `benchmark`, `date`, `commit`, `machine`,
`device`, `python`, `versions` (package -> version), and the keys that `bench.py NAME --help` names.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ccjax.errors import ConfigError  # noqa: E402
from scripts.benchmarks.common import BenchmarkError  # noqa: E402

BENCHMARKS = (
    "ttft",
    "decode",
    "serve",
    "clients",
    "cluster",
    "loading",
    "store",
    "retrieval",
    "ragcache",
    "trace",
    "kernels",
    "recognition",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the named benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__)
    parsers = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in BENCHMARKS:
        about = _docstring(name)
        how = argparse.RawDescriptionHelpFormatter
        subparser = parsers.add_parser(name, help=about.splitlines()[0], description=about, formatter_class=how)
        if name not in argv:
            continue  # others may need packages that are not installed here
        module = importlib.import_module(f"scripts.benchmarks.{name}")
        subparser.add_argument(
            "--json", action="store_true", help="print raw figures as one JSON object on the last line"
        )
        subparser.add_argument("--quick", action="store_true", help="small sizes, under a minute, to see that it runs")
        module.add_arguments(subparser)
        if "--quick" in argv:
            subparser.set_defaults(**getattr(module, "QUICK", {}))
        subparser.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    # Two thread pools share the machine: idle torch threads must sleep, not spin, while JAX is timed.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    try:
        figures = arguments.run(arguments)
    except (BenchmarkError, ConfigError) as error:
        sys.exit(f"bench.py {arguments.name}: {error}")
    if arguments.json:
        print(json.dumps(figures))
    if figures.get("failures"):
        sys.exit("\n".join(figures["failures"]))


def _docstring(name: str) -> str:
    source = (Path(__file__).parent / "benchmarks" / f"{name}.py").read_text("utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


if __name__ == "__main__":
    main()
