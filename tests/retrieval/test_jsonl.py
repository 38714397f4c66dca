"""Collections line by line, and what a directory with one comes to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ccjax.retrieval import RefreshReport, Retriever
from ccjax.retrieval.index import PassageIndex
from ccjax.retrieval.jsonl import lines, parse_line
from tests.retrieval.opened import CountingEmbedder, open_retriever


def collection(path: Path, *values: Any) -> Path:
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values), "utf-8")
    return path


BEES = {"_id": "bees", "title": "Bees", "text": "Bees dance in the hive.", "metadata": {"year": 2020, "tags": ["x"]}}
MOON = {"id": 7, "text": "The moon pulls the ocean.\n\nIt has no air."}


def test_each_line_is_a_document(tmp_path: Path) -> None:
    path = collection(tmp_path / "a.jsonl", BEES, "", MOON)
    first, empty, last = lines(path, 1000)
    assert first is not None and empty == b"" and last is not None
    bees_id, bees = parse_line(first, "x/a.jsonl")
    moon_id, moon = parse_line(last, "x/a.jsonl")
    assert (bees_id, bees.title, bees.text) == ("x/a.jsonl/bees", "Bees", BEES["text"])
    assert bees.metadata == {"year": 2020, "tags": ["x"]} and not bees.markdown
    assert (moon_id, moon.title) == ("x/a.jsonl/7", "7")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", "not a document: wanted an object with _id and text, got list"),
        ({"text": "a"}, "not a document: _id: wanted text, got NoneType"),
        ({"_id": True, "text": "a"}, "not a document: _id: wanted text, got bool"),
        ({"_id": " ", "text": "a"}, "not a document: wanted _id, got nothing"),
        ({"_id": "a", "text": " \n"}, "not a document: wanted text, got nothing"),
        ({"_id": "a"}, "not a document: text: wanted text, got NoneType"),
        ({"_id": "a", "title": 3, "text": "b"}, "not a document: title: wanted text, got int"),
        ({"_id": "a", "text": "long " * 100}, "over the limit max_file_bytes=300"),
    ],
)
def test_invalid_line_is_reported_and_the_others_are_read(tmp_path: Path, line: Any, reason: str) -> None:
    path = collection(tmp_path / "a.jsonl", BEES, line, MOON)
    retriever = open_retriever(tmp_path, max_file_bytes=300)
    assert retriever.document_ids == ("a.jsonl/7", "a.jsonl/bees")
    ((place, problem),) = retriever.report.failed
    assert place == f"{path}:2" and reason in problem


def test_undecodable_line_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"_id": "a", "text": "caf\xe9"}\n')
    ((_, problem),) = open_retriever(tmp_path).report.failed
    assert "utf-8" in problem


def test_a_collection_is_searched_like_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    collection(tmp_path / "sub" / "a.jsonl", BEES, MOON)
    (tmp_path / "tea.md").write_text("---\nyear: 1773\n---\nTea was shipped from Canton.")
    retriever = open_retriever(tmp_path)
    assert retriever.document_ids == ("sub/a.jsonl/7", "sub/a.jsonl/bees", "tea.md")
    (hit,) = retriever.search("bees in the hive", 1)
    assert (hit.document_id, hit.passage_id) == ("sub/a.jsonl/bees", "sub/a.jsonl/bees#0")
    assert hit.source == "sub/a.jsonl" and hit.metadata == {"year": 2020, "tags": ["x"]}
    old = retriever.search("the ocean off Canton", 9, filters={"type": "lt", "key": "year", "value": 2000})
    assert [passage.document_id for passage in old] == ["tea.md"]
    own = retriever.search("tea on the moon", 9, filters={"type": "eq", "key": "document_id", "value": "sub/a.jsonl/7"})
    assert {passage.document_id for passage in own} == {"sub/a.jsonl/7"}
    assert retriever.has_document("tea.md") and not retriever.has_document("tea")
    with pytest.raises(ValueError, match=r"filters\.type"):
        retriever.search("tea", 1, filters={"type": "like"})


def test_changed_collection_is_updated_line_by_line(tmp_path: Path) -> None:
    embedder = CountingEmbedder()

    def opened() -> Retriever:
        return open_retriever(docs, embedder, index_dir=tmp_path / "index", chunk_tokens=200)

    docs = tmp_path / "docs"
    docs.mkdir()
    path = collection(docs / "a.jsonl", BEES, MOON)
    retriever = opened()
    assert len(embedder.taken()) == 2 and retriever.refresh() == RefreshReport() and embedder.taken() == []
    collection(path, {**BEES, "text": "Bees sleep."}, {"_id": "new", "text": "Whales sing."})
    report = retriever.refresh()
    assert report == RefreshReport(added=("a.jsonl/new",), changed=("a.jsonl/bees",), removed=("a.jsonl/7",))
    assert embedder.taken() == ["Bees\nBees sleep.", "new\nWhales sing."]
    retriever.close()
    assert opened().report == RefreshReport() and embedder.taken() == []
    path.unlink()
    (docs / "b.md").write_text("Something is left.")
    assert set(opened().report.removed) == {"a.jsonl/new", "a.jsonl/bees"}


def test_collection_problems_are_reported_on_every_refresh_without_parsing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr("ccjax.retrieval.jsonl.parse_line", lambda *args: parsed.append(args[0]) or parse_line(*args))
    docs, index = tmp_path / "docs", tmp_path / "index"
    docs.mkdir()
    path = collection(docs / "a.jsonl", BEES, BEES, "{")
    for number in (3, 6):  # a new process does not know the problems
        retriever = open_retriever(docs, index_dir=index)
        for report in (retriever.report, retriever.refresh()):
            assert [name for name, _ in report.failed] == [f"{path}:2", f"{path}:3"]
            assert "wanted every one once, got 'a.jsonl/bees' again" in report.failed[0][1]
            assert retriever.num_documents == 1 and len(parsed) == number
        retriever.close()
    retriever = open_retriever(docs, index_dir=index)
    collection(path, MOON, BEES, "{")
    assert retriever.refresh().added == ("a.jsonl/7",) and len(retriever.refresh().failed) == 1
    collection(path, BEES)
    assert retriever.refresh() == RefreshReport(removed=("a.jsonl/7",)) == retriever.report
    assert retriever.refresh() == RefreshReport()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_collection_is_read_again_after_a_write_that_failed(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = collection(tmp_path / "a.jsonl", BEES, MOON)
    retriever, write = open_retriever(tmp_path), PassageIndex.write
    before, calls = [retriever.passages(name) for name in retriever.document_ids], iter(range(1, 9))

    def fails_once(index: PassageIndex, *args: Any, **options: Any) -> None:
        if next(calls) == number:
            raise OSError("no space left")
        write(index, *args, **options)

    monkeypatch.setattr(PassageIndex, "write", fails_once)
    collection(path, {**BEES, "text": "Bees sleep."}, {"_id": "new", "text": "Whales sing."})
    with pytest.raises(OSError, match="no space"):
        retriever.refresh()
    collection(path, BEES, MOON)
    retriever.refresh()
    assert [retriever.passages(name) for name in retriever.document_ids] == before


def test_a_line_that_may_go_well_the_next_time_is_read_again(tmp_path: Path) -> None:
    collection(tmp_path / "a.jsonl", BEES, MOON)
    is_full = True

    def count(text: str) -> int:
        if is_full and "moon" in text:
            raise MemoryError
        return len(text.split())

    retriever = open_retriever(tmp_path, count_tokens=count)
    assert len(retriever.report.failed) == 1
    is_full = False
    assert retriever.refresh() == RefreshReport(added=("a.jsonl/7",))


def test_unreadable_collection_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection(tmp_path / "a.jsonl", BEES)
    opened: Callable[..., Any] = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    ((name, reason),) = open_retriever(tmp_path).report.failed
    assert name == str(tmp_path / "a.jsonl") and "Permission denied" in reason
