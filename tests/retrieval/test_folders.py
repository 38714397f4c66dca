"""Folders as they are: missing, emptied, unreadable, exchanged, moved; and what is said about them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ccjax.retrieval.changes as changes
import ccjax.retrieval.documents as documents
from ccjax.config.documents import DocumentOptions
from ccjax.retrieval import RefreshReport
from ccjax.retrieval.documents import LoadedDocument, parse_document
from ccjax.retrieval.index import PassageIndex
from ccjax.server.loading import open_documents
from tests.retrieval.opened import CountingEmbedder, open_retriever


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    (docs / "sub").mkdir(parents=True)
    (docs / "moon.md").write_text("The moon pulls the ocean.")
    (docs / "sub" / "tea.md").write_text("Tea was shipped from Canton.")
    (docs / "sub" / "bees.jsonl").write_text('{"_id": "1", "title": "Bees", "text": "Bees dance in the hive."}\n')
    return docs


def moved_away(docs: Path) -> None:
    docs.rename(docs.with_name("elsewhere"))


def emptied(docs: Path) -> None:
    moved_away(docs)
    docs.mkdir()


def replaced_by_a_file(docs: Path) -> None:
    moved_away(docs)
    docs.write_text("x")


def dangling(docs: Path) -> None:
    moved_away(docs)
    docs.symlink_to(docs.with_name("nowhere"))


def looping(docs: Path) -> None:
    moved_away(docs)
    docs.symlink_to(docs)


@pytest.mark.parametrize("happens", [moved_away, emptied, replaced_by_a_file, dangling, looping])
def test_a_root_that_cannot_be_read_now_keeps_its_index(
    docs: Path, tmp_path: Path, happens: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    embedder = CountingEmbedder()
    retriever = open_retriever(docs, embedder, index_dir=tmp_path / "index")
    embedder.taken()
    happens(docs)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            report = retriever.refresh()
            assert not report.removed and not report.added and len(report.failed) == 1
            assert retriever.search("tea", 1)[0].document_id == "sub/tea.md"
    assert len(caplog.records) == 1 and "skipped" in caplog.text
    if docs.is_symlink() or docs.is_file():
        docs.unlink()
    elif docs.exists():
        docs.rmdir()
    docs.with_name("elsewhere").rename(docs)
    assert retriever.refresh() == RefreshReport() and {*embedder.taken()} == {"tea"}
    shutil.rmtree(docs / "sub")  # a real deletion
    assert retriever.refresh().removed == ("sub/bees.jsonl/1", "sub/tea.md")


@pytest.mark.parametrize("name", ["sub", "sub/tea.md", "sub/bees.jsonl"])
def test_what_may_not_be_read_any_more_keeps_its_text_until_it_is_gone(
    docs: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = open_retriever(docs)
    ids = retriever.document_ids
    denied = docs / name
    scandir, opened = os.scandir, Path.open

    def refuse(call: Callable) -> Callable:
        def checked(path: Path, *args: object, **options: object) -> object:
            if Path(path) == denied:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **options)

        return checked

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse(scandir))
        patch.setattr(Path, "open", refuse(opened))
        report = retriever.refresh()
        assert [path for path, _ in report.failed] == [str(denied)] and "Permission denied" in report.failed[0][1]
        assert report.removed == () and retriever.document_ids == ids
    assert retriever.refresh() == RefreshReport()
    shutil.rmtree(denied) if denied.is_dir() else denied.unlink()
    assert retriever.refresh().removed


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Directories that count as mounted file systems."""
    mounted: set[Path] = set()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in mounted)
    return mounted


@pytest.mark.parametrize("leaves", ["an empty directory", "nothing", "an empty root"])
def test_a_file_system_below_the_root_that_is_not_mounted_keeps_its_documents(
    docs: Path, tmp_path: Path, mounted: set[Path], leaves: str, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.add(docs / "sub")
    open_retriever(docs, index_dir=tmp_path / "index").close()
    (docs / "sub").rename(tmp_path / "disk")
    mounted.clear()
    if leaves != "nothing":
        (docs / "sub").mkdir()
    if leaves == "an empty root":
        (docs / "moon.md").rename(tmp_path / "moon.md")
    for _ in range(2):  # also after a restart
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            retriever = open_retriever(docs, index_dir=tmp_path / "index")
            reports = [retriever.report, *(retriever.refresh() for _ in range(3))]
        assert all(not report.removed and len(report.failed) == 1 for report in reports)
        path, reason = reports[0].failed[0]
        assert (path, "until it has a document" in reason) == (str(docs if "root" in leaves else docs / "sub"), True)
        assert len(caplog.records) == 1 and retriever.search("tea", 1)[0].document_id == "sub/tea.md"
        retriever.close()
    retriever = open_retriever(docs, index_dir=tmp_path / "index")
    (docs / "moon.md").write_text("The moon pulls the whole ocean.")
    assert retriever.refresh().changed == ("moon.md",)
    shutil.rmtree(docs / "sub", ignore_errors=True)
    (tmp_path / "disk").rename(docs / "sub")
    mounted.add(docs / "sub")
    assert retriever.refresh() == RefreshReport()
    (docs / "sub" / "tea.md").unlink()  # real deletions
    assert retriever.refresh().removed == ("sub/tea.md",)
    (docs / "sub" / "bees.jsonl").unlink()
    assert retriever.refresh().removed == ("sub/bees.jsonl/1",)
    mounted.clear()
    assert retriever.refresh() == RefreshReport()


def test_documents_in_place_of_a_file_system_replace_its_documents(docs: Path, mounted: set[Path]) -> None:
    mounted.add(docs / "sub")
    retriever = open_retriever(docs)
    mounted.clear()
    shutil.rmtree(docs / "sub")
    assert not retriever.refresh().removed
    (docs / "sub").mkdir()
    (docs / "sub" / "new.md").write_text("Something else.")
    (docs / "sub" / "tea.md").write_text("Tea was shipped from Canton.")
    report = retriever.refresh()
    assert (report.added, report.removed) == (("sub/new.md",), ("sub/bees.jsonl/1",))
    shutil.rmtree(docs / "sub")  # now a directory like any other
    assert retriever.refresh() == RefreshReport(removed=("sub/new.md", "sub/tea.md"))


def test_all_documents_of_a_mounted_file_system_may_change_at_once(docs: Path, mounted: set[Path]) -> None:
    mounted.add(docs / "sub")
    retriever = open_retriever(docs)
    (docs / "sub" / "bees.jsonl").unlink()
    (docs / "sub" / "tea.md").write_text("Tea is grown in Assam.")
    assert retriever.refresh().changed == ("sub/tea.md",)
    mounted.clear()
    shutil.rmtree(docs / "sub")
    assert not retriever.refresh().removed


@pytest.mark.parametrize("saved", [True, False])
def test_a_root_that_is_missing_at_the_start_is_answered_from_its_index(
    docs: Path, tmp_path: Path, saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if saved:
        open_retriever(docs, index_dir=tmp_path / "index").close()
    moved_away(docs)
    if not saved:
        with pytest.raises(ValueError, match="docs_dir: wanted a directory"):
            open_retriever(docs, index_dir=tmp_path / "index")
        return
    with caplog.at_level(logging.WARNING):
        retriever = open_retriever(docs, index_dir=tmp_path / "index")
        retriever.refresh()
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text
    assert retriever.search("tea", 1)[0].document_id == "sub/tea.md"
    assert retriever.report.failed[0][0] == str(docs) and not retriever.report.removed
    docs.with_name("elsewhere").rename(docs)
    assert retriever.refresh() == RefreshReport()


def test_links_that_lead_nowhere_now_keep_their_documents_until_they_are_gone(docs: Path) -> None:
    retriever = open_retriever(docs)
    shutil.move(docs / "sub", docs.with_name("mounted"))
    shutil.move(docs / "moon.md", docs.with_name("moon.md"))
    (docs / "sub").symlink_to("../mounted")
    (docs / "moon.md").symlink_to("../moon.md")
    failed = retriever.refresh().failed
    assert [path for path, _ in failed] == [str(docs / "moon.md"), str(docs / "sub"), str(docs)]
    retriever.close()
    retriever = open_retriever(docs, docs_links=True)
    ids = retriever.document_ids
    assert len(ids) == 3
    docs.with_name("mounted").rename(docs.with_name("unmounted"))
    docs.with_name("moon.md").unlink()
    report = retriever.refresh()
    assert report.removed == () and retriever.document_ids == ids and len(report.failed) == 2
    docs.with_name("unmounted").rename(docs.with_name("mounted"))
    (docs / "moon.md").unlink()
    assert retriever.refresh().removed == ("moon.md",)


def test_a_broken_file_is_gone(docs: Path) -> None:
    retriever = open_retriever(docs)
    (docs / "sub" / "tea.md").write_bytes(b"caf\xe9\x00")
    assert retriever.refresh().removed == ("sub/tea.md",)


@pytest.mark.parametrize("left", ["lost+found/", "Thumbs.db", "NOT_MOUNTED", "a broken link"])
def test_a_root_without_any_document_at_once_is_not_deleted(docs: Path, left: str) -> None:
    retriever = open_retriever(docs)
    emptied(docs)
    if left == "a broken link":
        (docs / "tea.md").symlink_to("nowhere.md")
    else:
        (docs / left).mkdir() if left.endswith("/") else (docs / left).write_text("x")
    report = retriever.refresh()
    assert not report.removed and "is empty all at once" in report.failed[-1][1]
    (docs / "new.md").write_text("Another text.")
    assert len(retriever.refresh().removed) == 3


def test_a_link_is_followed_at_each_refresh_and_all_changes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        for n in range(5):
            (tmp_path / version / f"{n}.md").write_text(f"Release {version} has page {n}.")
    (tmp_path / "one" / "old.md").write_text("Release one alone.")
    (tmp_path / "current").symlink_to("one")
    retriever = open_retriever(tmp_path / "current", CountingEmbedder())
    seen, write = [], PassageIndex.write

    def write_and_look(index: PassageIndex, *args: object, **options: object) -> None:
        write(index, *args, **options)  # pyright: ignore[reportArgumentType]
        seen.append({passage.text.split("Release ")[1].split()[0] for passage in retriever.search("release", 99)})

    monkeypatch.setattr(PassageIndex, "write", write_and_look)
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(tmp_path / "current")
    report = retriever.refresh()
    assert report.removed == ("old.md",) and len(report.changed) == 5 and seen == [{"two"}]
    assert retriever.refresh() == RefreshReport()


@pytest.mark.parametrize("how", ["directory", "file", "copy and delete", "into a link"])
def test_moved_documents_are_not_embedded_again(docs: Path, how: str, tmp_path: Path) -> None:
    embedder = CountingEmbedder()
    retriever = open_retriever(docs, embedder, docs_links=True)

    def found() -> list[tuple[str, float]]:
        best = (retriever.search(word, 1)[0] for word in ("tea", "ocean", "bees"))
        return [(passage.text, passage.score) for passage in best]

    before = found()
    embedder.taken()
    if how == "directory":
        (docs / "sub").rename(docs / "other")
    elif how == "file":
        (docs / "moon.md").rename(docs / "sub" / "moon.md")
    elif how == "copy and delete":
        shutil.copytree(docs / "sub", docs / "other")
        shutil.rmtree(docs / "sub")
    else:
        (docs / "sub").rename(tmp_path / "outside")
        (docs / "linked").symlink_to(tmp_path / "outside")
    report = retriever.refresh()
    assert report.removed and len(report.added) == len(report.removed) and embedder.taken() == []
    assert found() == before and all(score > 0 for _, score in before)


@pytest.mark.parametrize("how", ["moved", "copied", "moved and changed", "beside a damaged index", "other passages"])
def test_a_moved_folder_is_not_embedded_again(
    docs: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ccjax serve --docs` opens it, with the index in the user's cache."""
    embedder = CountingEmbedder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ccjax.retrieval.retriever.default_embedder", lambda: embedder)
    tokenizer: Any = types.SimpleNamespace(encode=lambda text, allow_special: text.split())

    def opened(folder: Path, **options: Any) -> tuple[list[tuple[str, float]], list[str]]:
        """What is found, and the texts that were embedded for it, in order."""
        retriever = open_documents("demo", DocumentOptions(docs=str(folder), **options), tokenizer)
        assert retriever is not None and retriever._background.is_wanted(), "until a server says what is wanted"
        embedded = sorted(embedder.taken())
        best = [retriever.search(word, 1)[0] for word in ("tea", "ocean", "bees")]
        embedder.taken()
        retriever.close()
        return [(passage.text, passage.score) for passage in best], embedded

    before, embedded = opened(docs)
    assert len(embedded) == 3
    moved = docs.with_name("moved")
    if how == "copied":
        shutil.copytree(docs, moved)
    else:
        docs.rename(moved)
    if how == "moved and changed":
        (moved / "moon.md").write_text("The moon pulls the whole ocean.")
    elif how == "beside a damaged index":
        (tmp_path / "cache" / "ccjax" / "index" / "0").mkdir()
        (tmp_path / "cache" / "ccjax" / "index" / "0" / "passages.sqlite").write_text("damaged")
    after, again = opened(moved, chunk_tokens=40 if how == "other passages" else 200)
    assert [text for text, _ in after][::2] == [text for text, _ in before][::2]
    if how == "other passages":
        assert again == embedded
    else:
        assert again == (["Moon\nThe moon pulls the whole ocean."] if how == "moved and changed" else [])
        assert after == before or how == "moved and changed"


def test_each_problem_is_told_once_and_many_as_a_number(docs: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = "".join(f"bad {n}\n" for n in range(3000))
    (docs / "bad.jsonl").write_text(lines)
    for number in range(50):
        (docs / f"photo{number}.PNG").write_bytes(b"\x89PNG")
    (docs / "Makefile").write_text("all:")
    with caplog.at_level(logging.INFO):
        retriever = open_retriever(docs)
        for _ in range(3):
            retriever.refresh()
        messages = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert len(messages) == 22 and "2980 more" in messages[20] and len(retriever.report.failed) == 3000
        assert messages[21] == "skipped files of types that are not read: .png, none"
        summary = "3 documents in 3 passages; skipped 3000 not JSON; 51 unsupported file type (.png 50, none 1)"
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [summary]
        assert retriever.report.unsupported == ((".png", 50), ("", 1))
        caplog.clear()
        (docs / "song.mp3").write_bytes(b"ID3")
        retriever.refresh()
        assert [record.getMessage() for record in caplog.records] == ["skipped files of types that are not read: .mp3"]
        caplog.clear()
        (docs / "empty.md").write_text("")
        retriever.refresh()
        assert [record.getMessage() for record in caplog.records] == [f"skipped {docs / 'empty.md'}: the file is empty"]


def test_an_entry_that_cannot_be_looked_at_stops_no_other(docs: Path) -> None:
    """Like one in a directory without permission, which tests that run as root cannot make."""
    (docs / "photo.png").symlink_to("n" * 300)  # no file may have so long a name
    retriever = open_retriever(docs)
    assert "moon.md" in retriever.document_ids
    assert retriever.refresh().removed == ()


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.ipynb", "a.txt", "a.csv"])
def test_what_cannot_be_used_is_parsed_once_for_each_change_and_stays_reported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []

    def counted(path: Path, data: bytes) -> LoadedDocument:
        parsed.append(data)
        return parse_document(path, data)

    monkeypatch.setattr(changes, "parse_document", counted)
    broken, path = [b"x\0\xffy\0\0" * 30, b"z\0\xffy\0\0" * 30], tmp_path / name
    (tmp_path / "b.md").write_text("The heron nests on the weir.")
    path.write_bytes(broken[0])
    with contextlib.closing(open_retriever(tmp_path)) as retriever:
        first = retriever.report.failed
        assert [told for told, _ in first] == [str(path)] and parsed[0] == broken[0] and len(parsed) == 2
        assert retriever.refresh().failed == first and len(parsed) == 2
        path.write_bytes(broken[1])
        assert len(retriever.refresh().failed) == 1 == len(retriever.refresh().failed) and parsed[2:] == broken[1:]
        path.unlink()
        assert not retriever.refresh().failed
        path.write_bytes(broken[1])
        assert len(retriever.refresh().failed) == 1 and parsed[3:] == broken[1:]


@pytest.mark.parametrize(
    ("error", "reason", "kept"),
    [
        (ChildProcessError("no memory is left"), "cannot be read: no memory is left", ("a.txt",)),
        (OSError("no document part"), "cannot be parsed: OSError: no document part", ()),
        (KeyError("part"), "cannot be parsed: KeyError: 'part'", ()),
    ],
)
def test_what_cannot_be_read_at_the_moment_keeps_its_text_and_what_is_broken_does_not(
    error: Exception, reason: str, kept: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.md").write_text("The heron nests on the weir.")
    (tmp_path / "a.txt").write_text("The swan is black.")
    with contextlib.closing(open_retriever(tmp_path)) as retriever:
        (tmp_path / "a.txt").write_text("The otter lives below the mill.")
        with monkeypatch.context() as patched:

            def failing(data: bytes) -> LoadedDocument:
                raise error

            patched.setitem(documents._READERS, ".txt", failing)
            assert retriever.refresh().failed == ((str(tmp_path / "a.txt"), reason),)
            assert {*retriever.document_ids} == {"b.md", *kept}
        if kept:
            assert not retriever.refresh().failed
            assert "otter" in retriever.passages("a.txt")[0].text


def test_a_moved_folder_is_not_embedded_again_while_another_process_writes_its_index(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.md").write_text("Whales sing.")
    open_retriever(tmp_path / "old", CountingEmbedder(), index_dir=tmp_path / "indexes" / "old").close()
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "indexes" / "empty").mkdir()
    (tmp_path / "indexes" / "empty" / "passages.sqlite").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "indexes" / "old" / "passages.sqlite")) as writer:
        writer.execute("BEGIN IMMEDIATE")
        from_s, embedder = time.monotonic(), CountingEmbedder()
        where = {"index_dir": tmp_path / "indexes" / "new", "others": tmp_path / "indexes"}
        opened = open_retriever(tmp_path / "new", embedder, **where)
        assert time.monotonic() - from_s < 30, "it waited for the other process"
    assert opened.num_passages == 1 and embedder.texts == []
    assert (tmp_path / "indexes" / "empty" / "passages.sqlite").stat().st_size == 0, "it is another folder's"
    opened.close()
