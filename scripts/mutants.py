"""Checks that the tests detect defects: python scripts/mutants.py [FOLDER ...]

Each mutant in scripts/mutants_of/*.toml changes one place of the product and names a test that must then fail. All run
in copies of the working tree, which itself is not changed. Prints killed and survived mutants by folder.

Exit codes: 0 every mutant was killed; 1 some survived; 2 a mutant or its test does not apply to this tree any more.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "scripts" / "mutants_of"
LONGEST_S = 600.0
"""A mutant that hangs its test for this long counts as killed; the unchanged tests take seconds."""

_KILLED, _SURVIVED, _INVALID = "killed", "survived", "does not apply"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change and the test that must detect it.

    Attributes:
      file: relative path of the source.
      old, new: the text to replace, and its replacement.
      test: pytest's id of the test, or of a file or class with several.
      within: qualified name of the function or class in which `old` occurs once; empty for the whole file.
    """

    file: str
    old: str
    new: str
    test: str
    within: str = ""

    @property
    def folder(self) -> str:
        """The folder it is counted under: `ccjax/policy`, `store`, ..."""
        parts = Path(self.file).parts
        return "/".join(parts[: 2 if parts[0] in ("ccjax", "models") else 1])

    def applied(self, source: str) -> str:
        """`source` with the change; ValueError if `old` does not occur exactly once."""
        first, last = _span(source, self.within) if self.within else (0, len(source))
        count = source.count(self.old, first, last)
        if count != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {count} times in {self.within or 'the file'}, not once")
        begin = source.index(self.old, first, last)
        changed = source[:begin] + self.new + source[begin + len(self.old) :]
        if changed == source:
            raise ValueError(f"{self.file}: {self.old!r} is replaced by itself")
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(f"{self.file}: with {self.new!r} it is no Python: {error}") from error
        return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mutants.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="only mutants of paths with this prefix")
    parser.add_argument("--check", action="store_true", help="only check that every mutant applies; run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="copies at once")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs: wanted a positive number, got {args.jobs}")
    try:
        mutants = [mutant for mutant in read_mutants(LISTS) if mutant.file.startswith(tuple(args.folders or [""]))]
    except ValueError as error:
        print(f"mutants.py: error: {error}", file=sys.stderr)
        return 2
    problems = [problem for mutant in mutants if (problem := _problem(mutant))]
    if not mutants:
        problems = [f"no mutant's file begins with {' or '.join(args.folders)}"]
    if problems or args.check:
        print("\n".join(problems) or f"{len(mutants)} mutants apply")
        return 2 if problems else 0
    return run(mutants, args.jobs)


def read_mutants(folder: Path) -> list[Mutant]:
    """All mutants of a folder's lists; ValueError if one is incomplete or occurs twice."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        for number, table in enumerate(tomllib.loads(path.read_text("utf-8"))["mutant"], 1):
            try:
                mutants.append(Mutant(**table))
            except TypeError as error:
                raise ValueError(f"{path.name}, mutant {number}: {error}") from error
    twice = [mutant for mutant, count in collections.Counter(mutants).items() if count > 1]
    if twice:
        raise ValueError(f"listed twice: {twice[0]}")
    return mutants


def run(mutants: Sequence[Mutant], num_jobs: int) -> int:
    """Runs each mutant's test, after all of these tests passed without mutants; returns the exit code."""
    with contextlib.ExitStack() as stack:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(num_jobs):
            copies.put(stack.enter_context(_copy()))
        compiled = stack.enter_context(tempfile.TemporaryDirectory(prefix="ccjax-mutants-compiled-"))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(num_jobs))
        ticks = itertools.count(1)
        started = time.monotonic()

        def outcome(mutant: Mutant | None, tests: Sequence[str]) -> tuple[str, str]:
            copy = copies.get()
            try:
                return _outcome(copy, mutant, tests, compiled, next(ticks))
            finally:
                copies.put(copy)

        tests = sorted({mutant.test for mutant in mutants})
        print(f"{len(tests)} tests without any mutant", flush=True)
        shares = [tests[number::num_jobs] for number in range(num_jobs)]
        for status, said in pool.map(lambda share: outcome(None, share), [share for share in shares if share]):
            if status != _SURVIVED:
                print(f"these tests fail without a mutant, or some are skipped:\n{said}")
                return 2
        # Adjacent mutants in the list share tests, and so their compiled steps.
        results: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for number, (mutant, (status, said)) in enumerate(
            zip(mutants, pool.map(lambda mutant: outcome(mutant, [mutant.test]), mutants), strict=True), 1
        ):
            results[mutant.folder][status] += 1
            print(f"[{number}/{len(mutants)}, {time.monotonic() - started:.0f} s] {status}: {mutant.file}", flush=True)
            if status != _KILLED:
                print(f"  {mutant.old!r} -> {mutant.new!r}\n  {mutant.test}\n{said}", flush=True)
    total = collections.Counter[str]()
    print(f"\n{'folder':24}{'killed':>8}{'survived':>10}")
    for folder in sorted(results):
        total.update(results[folder])
        print(f"{folder:24}{results[folder][_KILLED]:8}{results[folder][_SURVIVED]:10}")
    print(f"{'all':24}{total[_KILLED]:8}{total[_SURVIVED]:10}   in {time.monotonic() - started:.0f} s")
    return 2 if total[_INVALID] else 1 if total[_SURVIVED] else 0


def _problem(mutant: Mutant) -> str | None:
    """Why a mutant does not apply to this tree."""
    try:
        mutant.applied((ROOT / mutant.file).read_text("utf-8"))
        test = ROOT / mutant.test.partition("::")[0]
        name = mutant.test.rpartition("::")[2].partition("[")[0]
        if not test.is_file() or ("::" in mutant.test and name not in test.read_text("utf-8")):
            return f"{mutant.file}: there is no test {mutant.test}"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _span(source: str, qualified_name: str) -> tuple[int, int]:
    """First and last offset of a function or class, named like `Class.method`."""
    node: ast.AST = ast.parse(source)
    for part in qualified_name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [child for child in ast.walk(node) if isinstance(child, kinds) and child.name == part]
        if len(found) != 1:
            raise ValueError(f"{qualified_name}: there are {len(found)} definitions of {part}, not one")
        node = found[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.end_lineno
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """A copy of the working tree, without what git ignores."""
    with tempfile.TemporaryDirectory(prefix="ccjax-mutant-") as folder:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name, follow_symlinks=False)
        yield Path(folder)


def _outcome(copy: Path, mutant: Mutant | None, tests: Sequence[str], compiled: str, tick: int) -> tuple[str, str]:
    """The result of a run, and pytest's last lines."""
    path = copy / (mutant.file if mutant else "pyproject.toml")
    source, times = path.read_text("utf-8"), (path.stat().st_atime, path.stat().st_mtime)
    try:
        if mutant:
            path.write_text(mutant.applied(source), "utf-8")
            os.utime(path, (tick, tick))  # a unique time: Python checks compiled files by time and size
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
        # Debian's interpreters and editable installs put other copies on the path: the copy goes first.
        environment = os.environ | {"PYTHONPATH": str(copy), "JAX_COMPILATION_CACHE_DIR": compiled}
        with tempfile.TemporaryFile("w+") as output:
            try:
                code = subprocess.run(
                    command, cwd=copy, env=environment, stdout=output, stderr=output, timeout=LONGEST_S
                ).returncode
            except subprocess.TimeoutExpired:
                return _KILLED, f"took more than {LONGEST_S:.0f} s"
            output.seek(0)
            said = output.read()
    finally:
        path.write_text(source, "utf-8")
        os.utime(path, times)
    last = "\n".join("    " + line for line in said.splitlines()[-15:])
    if code == 1 or (code < 0 and mutant):  # a signal: the process itself was killed by it
        return _KILLED, last
    ran = [line for line in said.splitlines() if " passed" in line]
    if code == 0 and ran and (mutant or "skipped" not in ran[-1]):
        return _SURVIVED, last
    return _INVALID, last


if __name__ == "__main__":
    sys.exit(main())
