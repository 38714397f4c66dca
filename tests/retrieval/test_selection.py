"""Which of the passages found are returned: near-duplicates once, neighbours within a budget, none below a score."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ccjax.retrieval import retriever as retriever_module
from ccjax.retrieval.index import PassageIndex
from tests.retrieval.opened import CountingEmbedder, open_retriever

STORY = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(60))


def found(folder: Path, query: str, top_k: int, **options) -> list[str]:
    how = {name: options.pop(name) for name in ("min_score", "context_tokens") if name in options}
    retriever = open_retriever(folder, CountingEmbedder(), **({"chunk_tokens": 100} | options))
    return [passage.passage_id for passage in retriever.search(query, top_k, **how)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("# Sea\n\nThe tide is high.", "# SEA\n\nThe  tide is high!"),
        ("# Sea\n\nDie Flut “steigt”.", "# Sea\n\nDie *Flut*\nsteigt"),
        (f"# Sea\n\n{STORY} end.", f"# Sea\n\n{STORY} finish."),
        (f"# Sea\n\nBefore: {STORY}", f"# Sea\n\n{STORY}"),
    ],
)
def test_near_duplicates_come_once(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "a.md").write_text(first)
    (tmp_path / "b.md").write_text(second)
    (tmp_path / "c.md").write_text("# Sea\n\nAnother text about the sea.")
    ids = found(tmp_path, "the sea, wordaa wordba tide Flut", 5)
    assert len(ids) == 2 and "c.md#0" in ids


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"# Pump A\n\n{STORY}", f"# Pump B\n\n{STORY}"),
        (f"# Pump\n\n{STORY} 4 bar.", f"# Pump\n\n{STORY} 9 bar."),
        ("# Pump\n\nThe pump is red.", "# Pump\n\nThe pump is blue."),
        (f"# Pump\n\n{STORY}", f"# Pump\n\n{' '.join(STORY.split()[:40])}"),
    ],
)
def test_what_tells_them_apart_keeps_both(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "a.md").write_text(first)
    (tmp_path / "b.md").write_text(second)
    assert sorted(found(tmp_path, "pump wordaa wordba", 5)) == ["a.md#0", "b.md#0"]


@pytest.mark.parametrize("search", ["dense", "hybrid", "lexical"])
def test_many_copies_leave_room_for_other_passages(tmp_path: Path, search: str) -> None:
    for number in range(40):
        (tmp_path / f"copy{number:02}.md").write_text("# Tide\n\nThe tide is high.")
    (tmp_path / "other.md").write_text("# Wind\n\nThe tide and a wind.")
    retriever = open_retriever(tmp_path, None if search == "lexical" else CountingEmbedder(), search=search)
    passages = retriever.search("the high tide", 3)
    assert [passage.document_id[:4] for passage in passages] == ["copy", "othe"]
    *_, (last, is_all) = retriever.stages("the high tide", 3, 4)
    assert is_all and last == passages


def test_a_file_and_a_link_to_it_come_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The tide is high.")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "c.txt").hardlink_to(tmp_path / "a.txt")
    assert found(tmp_path, "tide", 5) == ["a.txt#0", "c.txt#0"]  # whose title, the name, differs
    (tmp_path / "a.txt").write_text("# Tide\n\nThe tide is high.")
    (tmp_path / "a.txt").rename(tmp_path / "a.md")
    (tmp_path / "c.txt").rename(tmp_path / "c.md")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.md").symlink_to(tmp_path / "a.md")
    assert found(tmp_path, "tide", 5) == ["a.md#0"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    words = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot")
    (tmp_path / "book.md").write_text("\n\n".join(f"The word {word} has its place here." for word in words))
    (tmp_path / "other.md").write_text("Nothing about it.")
    return tmp_path


def test_neighbours_come_where_they_are_read_within_the_budget(book: Path) -> None:
    def ids(tokens: int, query: str = "charlie", top_k: int = 1) -> list[str]:
        some = found(book, query, top_k, chunk_tokens=8, context_tokens=tokens)
        return [passage_id.removeprefix("book.md#") for passage_id in some]

    assert ids(0) == ids(15) == ["2"]
    assert ids(16) == ids(23) == ["2", "3"]
    assert ids(24) == ids(1000) == ["1", "2", "3"]
    assert ids(1000, "alpha") == ["0", "1"] and ids(1000, "foxtrot") == ["4", "5"]
    assert ids(1000, "bravo alpha alpha", 2) == ["0", "1", "2"]  # each once


def test_passages_below_the_least_score_are_not_found(book: Path) -> None:
    assert found(book, "charlie", 3, chunk_tokens=8, min_score=0.3) == ["book.md#2"]
    assert found(book, "charlie", 3, chunk_tokens=8, min_score=0.99) == []
    assert len(found(book, "charlie", 3, chunk_tokens=8, min_score=-1.0, search="dense")) == 3


def test_more_passages_are_found_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(120):
        (tmp_path / f"copy{number:03}.md").write_text("# Tide\n\nThe tide is high.")
    monkeypatch.setattr(retriever_module, "_MOST_FOUND", 20)
    wanted, stages = [], PassageIndex.stages

    def counted(index: PassageIndex, words, vectors, count: int, *args, **options):
        wanted.append(count)
        return stages(index, words, vectors, count, *args, **options)

    monkeypatch.setattr(PassageIndex, "stages", counted)
    assert len(found(tmp_path, "the high tide", 3)) == 1
    assert wanted == [11, 44]


def test_passages_above_the_score_are_found_behind_many_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a hybrid search the first ones need not be the most similar ones."""
    for number in range(30):
        (tmp_path / f"page{number:02}.md").write_text(f"The tide rises on day {number}.")
    stages = PassageIndex.stages

    def scored(index: PassageIndex, *args, **options):
        for hits, is_all in stages(index, *args, **options):
            yield [dataclasses.replace(hit, score=0.1 if 1 < at < 15 else 0.9) for at, hit in enumerate(hits)], is_all

    monkeypatch.setattr(PassageIndex, "stages", scored)
    assert len(found(tmp_path, "tide rises", 5, min_score=0.5)) == 5
