"""Checks that the tests detect defects: python scripts/mutants.py [FOLDER ...]

Each mutant of scripts/mutants.toml changes one place of the product and names a test that must then fail. They run in
copies of the working tree.

Exit codes: 0 every mutant was killed; 1 some survived; 2 a mutant or its test does not apply to this tree any more.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 600.0
"""A mutant that hangs its test for this long counts as killed; the unchanged tests take seconds."""

_KILLED, _SURVIVED, _INVALID = "killed", "survived", "does not apply"

Mutant = dict[str, str]
"""The keys `file`, `old`, `new` and `test` (pytest's id of a test or of a file)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mutants.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="only mutants of paths with this prefix")
    parser.add_argument("--check", action="store_true", help="only check that every mutant applies; run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="copies at once")
    args = parser.parse_args(argv)
    listed = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text("utf-8"))
    mutants = [{"file": file, **mutant} for file in listed for mutant in listed[file]]
    mutants = [mutant for mutant in mutants if mutant["file"].startswith(tuple(args.folders or [""]))]
    problems = [problem for mutant in mutants if (problem := _problem(mutant))]
    if not mutants or problems or args.check:
        print("\n".join(problems) or f"{len(mutants)} mutants apply")
        return 2 if problems or not mutants else 0
    jobs = min(args.jobs, len(mutants))
    shares = [mutants[len(mutants) * job // jobs : len(mutants) * (job + 1) // jobs] for job in range(jobs)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = [status for share in pool.map(run, shares) for status in share]
    print(", ".join(f"{results.count(status)} {status}" for status in (_KILLED, _SURVIVED, _INVALID)))
    return 2 if _INVALID in results else 1 if _SURVIVED in results else 0


def applied(mutant: Mutant, source: str) -> str:
    """`source` with the change; ValueError if `old` does not occur exactly once."""
    if (count := source.count(mutant["old"])) != 1:
        raise ValueError(f"{mutant['file']}: {mutant['old']!r} occurs {count} times, not once")
    changed = source.replace(mutant["old"], mutant["new"])
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise ValueError(f"{mutant['file']}: with {mutant['new']!r} it is no Python: {error}") from error
    return changed


def run(mutants: Sequence[Mutant]) -> list[str]:
    """The outcome of each mutant, in one copy of the tree, whose tests must pass without mutants first."""
    with tempfile.TemporaryDirectory(prefix="ccjax-mutant-") as folder:
        copy = Path(folder)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        status, output = outcome(copy, sorted({mutant["test"] for mutant in mutants}))
        if status != _SURVIVED or "skipped" in output.splitlines()[-1]:
            print(f"these tests fail without a mutant, or some are skipped:\n{output}", flush=True)
            return [_INVALID] * len(mutants)
        results = []
        for mutant in mutants:
            path = copy / mutant["file"]
            source = path.read_text("utf-8")
            path.write_text(applied(mutant, source), "utf-8")
            status, output = outcome(copy, [mutant["test"]])
            path.write_text(source, "utf-8")
            details = "" if status == _KILLED else f"\n  {mutant['old']!r} -> {mutant['new']!r}\n{output}"
            print(f"{status}: {mutant['file']}, {mutant['test']}{details}", flush=True)
            results.append(status)
        return results


def outcome(copy: Path, tests: Sequence[str]) -> tuple[str, str]:
    """Whether the copy as it is now is killed by the tests, and pytest's last lines."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    # Debian's interpreters and editable installs put other copies on the path: the copy goes first.
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return _KILLED, f"took more than {LONGEST_S:.0f} s"
    killed = done.returncode == 1 or done.returncode < 0  # negative: a signal killed the process itself
    status = _KILLED if killed else _INVALID if done.returncode or " passed" not in done.stdout else _SURVIVED
    return status, "\n".join((done.stdout + done.stderr).rstrip().splitlines()[-15:])


def _problem(mutant: Mutant) -> str | None:
    """Why a mutant does not apply to this tree."""
    try:
        if set(mutant) != {"file", "old", "new", "test"}:
            return f"{mutant['file']}: wanted the keys old, new and test, got {sorted(mutant)}"
        applied(mutant, (ROOT / mutant["file"]).read_text("utf-8"))
        test = ROOT / mutant["test"].partition("::")[0]
        name = mutant["test"].rpartition("::")[2].partition("[")[0]
        if not test.is_file() or ("::" in mutant["test"] and name not in test.read_text("utf-8")):
            return f"{mutant['file']}: there is no test {mutant['test']}"
    except (OSError, ValueError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
