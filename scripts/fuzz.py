"""Coverage-guided fuzzing of all parsers of untrusted input: `python scripts/fuzz.py --seconds 600`.

Writes findings to the folder of --output, with the commands that reproduce them; with any the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.fuzzing.fuzz import fuzz


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzzes the targets one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(prog="fuzz.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="for all targets (default 600)")
    parser.add_argument("--target", action="append", metavar="NAME", help="only this one; may be given several times")
    text = "folder of corpora and findings (default build/fuzz)"
    parser.add_argument("--output", type=Path, default=Path("build/fuzz"), metavar="DIR", help=text)
    args = parser.parse_args(argv)
    from scripts.fuzzing.targets import TARGETS

    names = args.target or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown or args.seconds <= 0:
        wanted = f"--target: wanted one of {', '.join(TARGETS)}, got {unknown[0]}" if unknown else None
        parser.error(wanted or f"--seconds: wanted more than 0, got {args.seconds}")
    found = []
    for number, name in enumerate(names, 1):
        outcome = fuzz("scripts.fuzzing.targets", name, TARGETS[name].seeds, args.seconds / len(names), args.output)
        print(f"{number}/{len(names)} {name}: {outcome.line}", flush=True)
        found += [] if outcome.is_clean else [name]
    print(f"{len(found)} of {len(names)} targets with findings" + (f": {', '.join(found)}" if found else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
