"""Finds the files of a documents directory."""

from __future__ import annotations

import os
from pathlib import Path


def find_files(docs_dir: Path, *, skip: Path | None = None) -> tuple[dict[str, Path], tuple[tuple[str, str], ...]]:
    """All files below `docs_dir` by document id, and the directories that cannot be read.

    A document id is the path below `docs_dir` with forward slashes; the mapping is sorted by it. Hidden files and
    directories are left out, and so is the directory `skip`. Links to directories are followed, but every directory is
    visited once, under its real path if that is below `docs_dir`: loops end, nothing is indexed twice.

    Returns:
      (files, failed): `failed` holds (path, reason) of unreadable directories and of names that are not UTF-8.
    """
    files: dict[str, Path] = {}
    failed: list[tuple[str, str]] = []
    seen = set(docs_dir.resolve().parents)  # a link to one of them would lead out and back in
    if skip is not None:
        seen.add(skip.resolve())
    waiting = [docs_dir]  # real directories are all walked before the first link is followed
    links: list[Path] = []
    while waiting or links:
        directory = waiting.pop() if waiting else links.pop(0)
        try:
            real = directory.resolve()
            if real in seen:
                continue
            seen.add(real)
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except (OSError, RuntimeError) as error:  # RuntimeError: a link that turned into a loop meanwhile
            failed.append((str(directory), f"cannot be listed: {getattr(error, 'strerror', None) or error}"))
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith("."):
                continue
            try:
                entry.name.encode()
            except UnicodeEncodeError:
                failed.append((os.fsencode(path).decode("utf-8", "replace"), "the name is not UTF-8"))
                continue
            if os.path.isdir(path):  # False, not an error, if the entry cannot be examined
                (links if entry.is_symlink() else waiting).append(path)
            else:
                files[path.relative_to(docs_dir).as_posix()] = path
    return dict(sorted(files.items())), tuple(failed)
