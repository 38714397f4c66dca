"""Finds the files of a documents directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

_IGNORE_FILES = (".gitignore", ".ccjaxignore")
_NEVER = "node_modules/ bower_components/ __pycache__/ site-packages/ _build/ _site/ htmlcov/".split()
_BUILT = "/build/ /coverage/ /dist/ /target/".split()
_PROJECT_FILES = frozenset(
    "Cargo.toml CMakeLists.txt Makefile build.gradle package.json pom.xml pyproject.toml setup.py".split()
)
_QUERIES = ["/queries.jsonl", "/qrels/"]
"""BEIR's questions and right answers, beside its documents."""
CANNOT_READ = "cannot be read"
"""Reason of what may be back later, such as on a disk that is not mounted."""
_Rules = list[tuple[bool, bool, re.Pattern[str]]]
"""(whether what matches is left out, whether directories match with a slash behind, pattern), later ones first."""
_AllRules = tuple[tuple[Path, _Rules], ...]


def find_files(
    docs_dir: Path, *, skip: Path | None = None, exclude: Sequence[str] = (), outside_links: bool = False
) -> tuple[dict[str, Path], tuple[tuple[str, str], ...]]:
    """All files below `docs_dir` by document id, and what cannot be read.

    A document id is the path below `docs_dir` with forward slashes; the mapping is sorted by it. Left out are hidden
    files and directories, the directory `skip`, what `.gitignore` and `.ccjaxignore` files name, packages of other
    projects (`node_modules`, `site-packages`), the output of builds beside a project's file, `queries.jsonl` and
    `qrels` beside `corpus.jsonl`, and links to files that are found anyway. Links to directories are followed, but
    every directory is visited once, under its real path if that is below `docs_dir`: loops end, nothing is indexed
    twice.

    Args:
      exclude: patterns as in `.gitignore` that come before those of the files.
      outside_links: whether links that lead out of `docs_dir` are followed.

    Returns:
      (files, failed): `failed` holds (path, reason) of unreadable directories and of links that lead nowhere, whose
      reason begins with `CANNOT_READ`, of names that are not UTF-8, and of links that are not followed.
    """
    files: dict[str, Path] = {}
    failed: list[tuple[str, str]] = []
    root = Path(os.path.realpath(docs_dir))  # a link may lead in circles
    seen = set(root.parents)  # a link to one of them would lead out and back in
    if skip is not None:
        seen.add(skip.resolve())
    always: _AllRules = ((docs_dir, _rules(exclude)),)
    waiting: list[tuple[Path, _AllRules]] = [(docs_dir, ((docs_dir, _rules(_NEVER)),))]
    links: list[tuple[Path, _AllRules]] = []  # real directories are all walked before the first link is followed
    linked: dict[str, Path] = {}
    while waiting or links:
        directory, rules = waiting.pop() if waiting else links.pop(0)
        try:
            real = directory.resolve()
            if real in seen:
                continue
            seen.add(real)
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            rules = (*rules, (directory, _rules_of(directory, {entry.name for entry in entries})))
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a link that turned into a loop meanwhile
            failed.append((str(directory), f"{CANNOT_READ}: {getattr(error, 'strerror', None) or error}"))
            continue
        for entry in entries:
            path, is_dir = Path(entry.path), os.path.isdir(entry.path)  # False if the entry cannot be examined
            if entry.name.startswith(".") or _is_ignored(path, is_dir, (*rules, *always)):
                continue
            try:
                entry.name.encode()
            except UnicodeEncodeError:
                failed.append((os.fsencode(path).decode("utf-8", "replace"), "the name is not UTF-8"))
                continue
            if not os.path.exists(path):
                failed.append((str(path), f"{CANNOT_READ}: the link leads nowhere"))
            elif entry.is_symlink() and not outside_links and _leads_out(path, root):
                failed.append((str(path), "a link out of the directory, which is followed with docs_links only"))
            elif is_dir:
                (links if entry.is_symlink() else waiting).append((path, rules))
            else:
                (linked if entry.is_symlink() else files)[path.relative_to(docs_dir).as_posix()] = path
    found = {os.path.realpath(path) for path in files.values()}
    for name, path in sorted(linked.items()):
        if (target := os.path.realpath(path)) not in found:
            found.add(target)
            files[name] = path
    return dict(sorted(files.items())), tuple(failed)


def _rules_of(directory: Path, names: set[str]) -> _Rules:
    lines = _BUILT * bool(names & _PROJECT_FILES) + _QUERIES * ({"corpus.jsonl", "queries.jsonl"} <= names)
    for name in _IGNORE_FILES:
        if name in names and (directory / name).is_file():
            lines += (directory / name).read_text("utf-8-sig", "replace").split("\n")
    return _rules(lines)


def _rules(lines: Iterable[str]) -> _Rules:
    """Those lines that are valid. A pattern of pathspec also matches all below a directory that it names; as in git,
    these match the directory alone, so that what is below one that a later line brought back is judged by itself."""
    rules: _Rules = []
    for line in lines:
        try:
            (pattern,) = GitIgnoreSpec.from_lines([line.removesuffix("\r")]).patterns
        except ValueError:
            continue
        if pattern.include is not None and pattern.regex is not None:
            ends = "ps_d" in pattern.regex.groupindex  # behind the directory that it names
            regex = pattern.regex.pattern
            rules.insert(0, (pattern.include, ends, re.compile(rf"(?:{regex})\Z" if ends else regex)))
    return rules


def _is_ignored(path: Path, is_dir: bool, rules: _AllRules) -> bool:
    for base, some in reversed(rules):
        name = path.relative_to(base).as_posix()
        for is_left_out, has_slash, pattern in some:
            if pattern.search(name + "/" * (is_dir and has_slash)):
                return is_left_out
    return False


def _leads_out(path: Path, root: Path) -> bool:
    try:
        return not path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # it was deleted a moment ago
        return False
