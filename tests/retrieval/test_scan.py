"""Which files of a directory are found: hidden ones, links, loops and odd names."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
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
    files, failed = find_files(docs, outside_links=True)
    assert list(files) == ["a_link/three.md", "x/one.md", "y/two.md"] and failed == ()


def test_links_out_of_the_directory_are_reported(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    write(docs, "x/one.md")
    write(tmp_path, "outside/three.md", "four.md")
    (docs / "folder").symlink_to(tmp_path / "outside")
    (docs / "x" / "up.md").symlink_to("../../four.md")
    (docs / "chain.md").symlink_to("x/up.md")
    (docs / "inside").symlink_to("x")
    (docs / "again.md").symlink_to("x/one.md")
    files, failed = find_files(docs)
    assert list(files) == ["x/one.md"]
    assert sorted(path for path, _ in failed) == [str(docs / name) for name in ("chain.md", "folder", "x/up.md")]
    assert all("a link out of the directory" in reason for _, reason in failed)
    assert list(find_files(docs, outside_links=True)[0]) == ["chain.md", "folder/three.md", "x/one.md"]


@pytest.mark.parametrize(
    ("patterns", "left_out"),
    [
        ("drafts/\n*.log", {"drafts/a.md", "sub/drafts/b.md", "x.log", "sub/y.log"}),
        ("/drafts/\n# x.log\n\n", {"drafts/a.md"}),
        ("*.log\n!x.log", {"sub/y.log"}),
        ("sub/**", {"sub/drafts/b.md", "sub/y.log", "sub/z z.md"}),
        ("sub/*\n!sub/y.log", {"sub/drafts/b.md", "sub/z z.md"}),
        ("z\\ z.md\nx.lo?\n[de]rafts", {"sub/z z.md", "x.log", "drafts/a.md", "sub/drafts/b.md"}),
    ],
)
def test_ignored_files_are_left_out(tmp_path: Path, patterns: str, left_out: set[str]) -> None:
    names = {"a.md", "drafts/a.md", "sub/drafts/b.md", "sub/y.log", "sub/z z.md", "x.log"}
    write(tmp_path, *names)
    assert set(find_files(tmp_path, exclude=patterns.split("\n"))[0]) == names - left_out
    for name in (".gitignore", ".ccjaxignore"):
        (tmp_path / name).write_text(patterns)
        assert set(find_files(tmp_path)[0]) == names - left_out
        (tmp_path / name).unlink()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("seed", range(60))
def test_ignore_files_leave_out_what_git_leaves_out(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    names = [f"{a}/{b}/{c}.{end}" for a in "ab" for b in ("a", "c", "d e") for c in "acx" for end in ("md", "txt")]
    write(tmp_path, *names, "a/x.md", "x.md", "c.txt")
    patterns = "a/ b c/ * */ *.md x.md x.* /a a/c a/* a/** **/c/ **/x.md a/**/x.md [ab] ?.txt d\\ e/ \x0cx.md".split(
        " "
    )
    patterns = [draw.choice(["", "", "!"]) + pattern for pattern in patterns]
    for directory in ("", "a/", "b/c/"):
        lines = draw.choices(patterns, k=draw.randrange(5))
        (tmp_path / directory / ".gitignore").write_text(draw.choice(["\n", "\r\n"]).join(lines))
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    git = ["git", "-C", tmp_path, "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"]
    wanted = {name for name in subprocess.check_output(git, text=True).split("\0") if name and ".git" not in name}
    assert set(find_files(tmp_path)[0]) == wanted


def test_ignore_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write(tmp_path, "drafts/a.md", "b.md")
    (tmp_path / ".gitignore").write_text("drafts/\n", "utf-8-sig")
    assert list(find_files(tmp_path)[0]) == ["b.md"]


def test_inner_ignore_files_come_before_outer_ones_and_the_option_before_all(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "b.md", "sub/a.txt", "sub/b.md", "sub/deep/b.md")
    (tmp_path / ".gitignore").write_text("*.txt\n")
    (tmp_path / "sub" / ".gitignore").write_text("!a.txt\n/b.md\n")
    assert list(find_files(tmp_path)[0]) == ["b.md", "sub/a.txt", "sub/deep/b.md"]
    (tmp_path / ".ccjaxignore").write_text("!a.txt\ndeep/\n")
    assert list(find_files(tmp_path)[0]) == ["a.txt", "b.md", "sub/a.txt"]
    assert list(find_files(tmp_path, exclude=["b.md", "!deep/"])[0]) == ["a.txt", "sub/a.txt"]


def test_packages_builds_and_questions_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "site/a.md", "build/b.md", "corpus.jsonl", "queries.jsonl", "other/queries.jsonl")
    write(tmp_path, "app/package.json", "app/dist/c.md", "app/src/dist/d.md", "app/node_modules/x/README.md")
    write(tmp_path, "qrels/test.tsv", "other/qrels/dev.tsv", "blog/_site/h.html")
    write(tmp_path, "rust/Cargo.toml", "rust/target/i.md", "target/j.md", "rust/vendor/k.md")
    write(tmp_path, "lib/site-packages/e.md", "docs/_build/f.md", "docs/Makefile", "docs/build/g.md")
    found = list(find_files(tmp_path)[0])
    assert found == [
        *("app/package.json", "app/src/dist/d.md", "build/b.md", "corpus.jsonl", "docs/Makefile"),
        *(
            "other/qrels/dev.tsv",
            "other/queries.jsonl",
            "rust/Cargo.toml",
            "rust/vendor/k.md",
            "site/a.md",
            "target/j.md",
        ),
    ]
    assert "app/dist/c.md" in find_files(tmp_path, exclude=["!dist/"])[0]


def test_damaged_ignore_files_are_read_as_far_as_possible(tmp_path: Path) -> None:
    write(tmp_path, "a.md", "b.md", "sub/c.md")
    (tmp_path / ".gitignore").write_bytes(b"\xff\xfe\n[\n!\nb.md\n")
    (tmp_path / "sub" / ".gitignore").mkdir()
    files, failed = find_files(tmp_path)
    assert "a.md" in files and "sub/c.md" in files and ("b.md" not in files or failed)


def test_links_that_lead_nowhere_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "..data/real.md")  # how Kubernetes mounts a ConfigMap
    (tmp_path / "shown.md").symlink_to("..data/real.md")
    (tmp_path / "broken.md").symlink_to("nowhere.md")
    (tmp_path / "circle.md").symlink_to("circle.md")
    files, failed = find_files(tmp_path)
    assert list(files) == ["shown.md"]
    assert failed == tuple(
        (str(tmp_path / name), "cannot be read: the link leads nowhere") for name in ("broken.md", "circle.md")
    )


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
    assert failed == ((str(tmp_path / "locked"), "cannot be read: Permission denied"),)
