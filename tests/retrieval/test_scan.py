"""Which files of a directory are found: hidden ones, links, loops and odd names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ccjax.retrieval.scan import find_files


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_ids_are_sorted_posix_paths_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "b.md", "a/z.md", "a/b/c.txt", ".hidden.md", ".git/config.md", "a/.cache/x.md")
    files, failed = find_files(tmp_path)
    assert list(files) == ["a/b/c.txt", "a/z.md", "b.md"] and failed == ()
    assert files["a/b/c.txt"].read_text() == "a/b/c.txt"


def test_the_skipped_directory_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.md", "index/passages.json")
    assert list(find_files(tmp_path, skip=tmp_path / "index")[0]) == ["a.md"]


def test_link_loops_terminate_and_no_file_is_found_twice(tmp_path: Path) -> None:
    docs, outside = tmp_path / "docs", tmp_path / "outside"
    write(docs, "x/one.md", "y/two.md")
    write(outside, "three.md")
    (docs / "self").symlink_to(docs)
    (docs / "up").symlink_to(tmp_path)  # would lead to beside.md
    (tmp_path / "beside.md").write_text("not a document")
    (docs / "x" / "to_y").symlink_to(docs / "y")
    (docs / "y" / "to_x").symlink_to(docs / "x")
    (docs / "a_link").symlink_to(outside)
    (docs / "b_link").symlink_to(outside)
    assert list(find_files(docs)[0]) == ["a_link/three.md", "x/one.md", "y/two.md"]


def test_links_to_files_are_listed_even_if_broken(tmp_path: Path) -> None:
    write(tmp_path, "..data/real.md")  # how Kubernetes mounts a ConfigMap
    (tmp_path / "shown.md").symlink_to("..data/real.md")
    (tmp_path / "broken.md").symlink_to("nowhere.md")
    (tmp_path / "circle.md").symlink_to("circle.md")
    assert list(find_files(tmp_path)[0]) == ["broken.md", "circle.md", "shown.md"]


def test_a_linked_documents_directory_is_walked(tmp_path: Path) -> None:
    write(tmp_path / "real", "a.md")
    (tmp_path / "docs").symlink_to("real")
    assert list(find_files(tmp_path / "docs")[0]) == ["a.md"]


def test_a_name_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "good.md")
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.md")).write_text("x")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    files, failed = find_files(tmp_path)
    assert list(files) == ["good.md"]
    assert failed == ((f"{tmp_path}/bad\ufffd.md", "the name is not UTF-8"),)


def test_an_unreadable_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.md", "locked/b.md")
    scandir = os.scandir

    def refuse(directory: Path):  # a real mode of 0 does not stop the root user
        if Path(directory).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", refuse)
    files, failed = find_files(tmp_path)
    assert list(files) == ["a.md"]
    assert failed == ((str(tmp_path / "locked"), "cannot be listed: Permission denied"),)
