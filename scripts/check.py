"""Lint, and the tests nearest to a change: python scripts/check.py [PATH ...]

PATHs are files or folders of the repository; the default are files that differ from the last commit, or those that it
changed. Tests reach a file by imports, including lazy ones, and by the scripts and modules that they start by name. The
nearest run first, as many as fit into the time (--seconds); `make test` runs all. Exit codes are pytest's, or those of
the linter that failed.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = ROOT / "tests" / "seconds.json"
"""Duration of each test file, written by `make test ARGS=--record`."""

FOLDERS = ("ccjax", "models", "pallas_kernels", "store", "scripts", "tests")
_FOLDERS = {"models": "models", "store": "store", "kernels": "pallas_kernels"}
_LINKED = re.compile(r"^ccjax\.(models|store|kernels)\b")
_NEW_FILE_S = 5.0
_NAMED = re.compile(r"\b((?:scripts|tests)/[\w/]+\.py|(?:scripts|tests|ccjax)(?:\.\w+)+)\b")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="check.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="what changed")
    parser.add_argument("--seconds", type=float, default=160.0, metavar="S", help="of tests, in all workers together")
    parser.add_argument("--list", action="store_true", help="only list the tests")
    args = parser.parse_args(argv)
    missing = [path for path in args.paths if not (ROOT / path).exists()]
    if missing:
        parser.error(f"wanted files or folders of the repository, got {missing[0]!r}")
    changed = _files(args.paths) if args.paths else changed_files()
    seconds = json.loads(SECONDS.read_text("utf-8")) if SECONDS.exists() else {}
    near = nearest_tests(changed)
    chosen = within(near, seconds, args.seconds)
    print(
        f"{len(changed)} files changed; {len(near)} test files reach them, the nearest {len(chosen)} run",
        flush=True,
    )
    if args.list:
        print(*chosen, sep="\n")
        return 0
    lint = [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    product = [path for path in changed if path.endswith(".py") and not path.startswith("tests/")]
    if product:
        lint.append(["pyright", "--pythonpath", sys.executable, *product])
    for command in lint:
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode
        if code:
            return code
    if not chosen:
        return 0
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *chosen], cwd=ROOT
    ).returncode


def changed_files() -> list[str]:
    """Files changed in the working tree and index since the last commit, or by that commit if there are none."""
    listed = _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return [path for path in listed or _git("show", "--name-only", "--format=", "HEAD") if (ROOT / path).exists()]


def nearest_tests(changed: Iterable[str]) -> dict[str, int]:
    """Test files that reach a changed file, with the number of steps, nearest first."""
    users: dict[str, set[str]] = collections.defaultdict(set)
    for path, used in imports().items():
        for dependency in used:
            users[dependency].add(path)
    steps = dict.fromkeys((path for path in changed if path.endswith(".py")), 0)
    waiting = collections.deque(steps)
    while waiting:
        path = waiting.popleft()
        for user in users[path]:
            if user not in steps:
                steps[user] = steps[path] + 1
                waiting.append(user)
    for path in changed:
        if not path.endswith(".py"):  # a page, a list, an asset: files that name it
            for user in _git("grep", "-lF", Path(path).name, "--", "tests"):
                steps.setdefault(user, 1)
    tests = {path: count for path, count in steps.items() if Path(path).name.startswith("test_")}
    mirrored = {_mirror(path) for path in changed}
    return dict(sorted(tests.items(), key=lambda item: (str(Path(item[0]).parent) not in mirrored, item[1], item[0])))


def within(near: Mapping[str, int], seconds: Mapping[str, float], most_s: float) -> list[str]:
    """As many of the nearest as take `most_s` together, and at least the nearest one. A file that alone takes half of
    that is left out unless it is the nearest or has changed itself."""
    chosen, left = [], most_s
    for path, steps in near.items():
        takes = seconds.get(path, _NEW_FILE_S)
        if not chosen or steps == 0 or takes <= min(left, most_s / 2):
            chosen.append(path)
            left -= takes
    return chosen


@functools.cache
def imports() -> Mapping[str, frozenset[str]]:
    """The files that each of our files imports or names, as relative paths."""
    files = {str(path.relative_to(ROOT)): path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return {name: frozenset(_used(name, path.read_text("utf-8"), files) - {name}) for name, path in files.items()}


def _used(name: str, source: str, files: Mapping[str, Path]) -> set[str]:
    found = set()
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name.startswith("tests/"):
            for text in _NAMED.findall(node.value):
                modules.append(text.removesuffix(".py").replace("/", "."))
    for module in modules:
        path = _LINKED.sub(lambda found: _FOLDERS[found[1]], module).replace(".", "/")
        found |= {path + ".py", path + "/__init__.py"} & files.keys()
    if name.startswith("tests/"):
        parents = Path(name).parents
        found |= {str(parent / "conftest.py") for parent in parents} & files.keys()
    return found


def _mirror(path: str) -> str:
    """The folder whose tests cover this file."""
    parts = path.split("/")
    if parts[0] == "ccjax" and len(parts) > 2:
        return f"tests/{parts[1]}"
    if parts[0] == "tests":
        return str(Path(path).parent)
    folder = f"tests/{Path(path).parent}"
    return folder if (ROOT / folder).is_dir() else f"tests/{parts[0]}"


def _files(paths: Iterable[str]) -> list[str]:
    return [name for path in paths for name in _git("ls-files", "--cached", "--others", "--exclude-standard", path)]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
