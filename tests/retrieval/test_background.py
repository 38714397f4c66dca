"""Many new passages are found by words at once, and by meaning once the background has computed their vectors."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.retrieval import Retriever, background, retriever
from tests.polling import wait_until
from tests.retrieval.opened import HeldEmbedder, open_retriever

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "anna.md": "Anna repairs violins by the river.",
    "bob.md": "Bob drives an automobile to Rome.",
    "carla.md": "Carla studies whales near Lisbon.",
    "dino.md": "Dino bakes bread in Naples.",
}


@pytest.fixture
def held() -> Iterator[HeldEmbedder]:
    embedder = HeldEmbedder()
    yield embedder
    embedder.go()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(retriever, "_MOST_EMBEDDED_FIRST", 1)
    (folder := tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def ids(found: Retriever, query: str, **options: Any) -> list[str]:
    return [passage.document_id for passage in found.search(query, 4, **options)]


def test_words_are_found_at_once_and_meanings_later(folder: Path, held: HeldEmbedder) -> None:
    opened = open_retriever(folder, held)
    assert (opened.num_passages, opened.num_pending, opened.wait(0.0)) == (4, 4, False)
    assert ids(opened, "whales") == ["carla.md"] and ids(opened, "Whose car ?") == []
    held.go()
    assert opened.wait(600) and opened.num_pending == 0
    assert ids(opened, "Whose car ?")[0] == "bob.md" and sorted(held.in_background) == sorted(
        passage.text for name in TEXTS for passage in opened.passages(name)
    )
    opened.close()


def test_scores_and_the_least_score_are_those_of_vectors_before_they_are_stored(
    folder: Path, held: HeldEmbedder
) -> None:
    opened = open_retriever(folder, held)
    query = "Carla studies bread"
    (before, *others) = opened.search(query, 4)
    assert before.document_id == "carla.md" and 0.5 < before.score < 1.0 and len(others) == 1
    assert ids(opened, query, min_score=before.score) == ["carla.md"]
    held.go()
    assert opened.wait(600)
    after = {passage.document_id: passage.score for passage in opened.search(query, 4)}
    assert after["carla.md"] == pytest.approx(before.score) and after["dino.md"] == pytest.approx(others[0].score)
    opened.close()


def test_the_index_is_that_of_vectors_computed_first(
    folder: Path, held: HeldEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.go()
    opened = open_retriever(folder, held)
    assert opened.wait(600) and held.in_background
    monkeypatch.setattr(retriever, "_MOST_EMBEDDED_FIRST", 4)
    first = open_retriever(folder, other := HeldEmbedder())
    assert first.num_pending == 0 and not other.in_background
    for query in ("car in Rome", "whales bread", "Anna", "by the river near Naples"):
        assert opened.search(query, 4) == first.search(query, 4) != []


def test_what_was_computed_before_a_process_ended_is_not_computed_again(
    folder: Path, held: HeldEmbedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_FILLED_TOGETHER", 1)
    opened = open_retriever(folder, held, index_dir=tmp_path / "index")
    held.permits.release()
    wait_until(lambda: opened.num_pending == 3, timeout_s=600)
    closing = threading.Thread(target=opened.close)  # which waits for the call that is under way
    closing.start()
    wait_until(lambda: opened._background._is_closed, timeout_s=600)
    held.go()
    closing.join()
    again = open_retriever(folder, other := HeldEmbedder(), index_dir=tmp_path / "index")
    other.go()
    assert again.wait(600) and again.num_pending == 0 and ids(again, "Whose car ?")[0] == "bob.md"
    assert len(held.in_background) in (1, 2), "the one that was under way may end"
    assert len(held.in_background) + len(other.in_background) == 4
    assert not {*held.in_background} & {*other.in_background}
    again.close()


def test_a_process_may_end_without_closing(folder: Path) -> None:
    """XLA aborts a process that ends while a thread computes."""
    script = f"""
from pathlib import Path

from tests.retrieval.opened import HeldEmbedder, open_retriever
from ccjax.retrieval import background, retriever

retriever._MOST_EMBEDDED_FIRST = 0
held, close = HeldEmbedder(), background.BackgroundWork.close

def told(self):
    held.go()
    close(self)
    print("ended:", self._is_done.is_set(), flush=True)

background.BackgroundWork.close = told
opened = open_retriever(Path({str(folder)!r}), held)
print(opened.num_pending)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4\nended: True\n"), done.stderr


def test_vectors_give_way_to_what_is_wanted_but_are_computed_in_the_end(
    folder: Path, held: HeldEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(background, "_FILLED_TOGETHER", 1)
    opened = open_retriever(folder, held)
    opened.give_way(lambda: bool(looks.append(len(held.in_background)) or True))
    held.go()
    assert opened.wait(600) and opened.num_pending == 0
    pauses = [looks.count(done) for done in range(1, 4)]
    assert min(pauses) > 1, f"nobody looked whether something else is wanted: {pauses}"
    opened.close()


def test_documents_deleted_meanwhile_are_not_filled(folder: Path, held: HeldEmbedder) -> None:
    opened = open_retriever(folder, held)
    (folder / "bob.md").unlink()
    (folder / "emma.md").write_text("Emma teaches chess in Oslo.")
    assert opened.refresh().removed == ("bob.md",)
    assert ids(opened, "chess Oslo") == ["emma.md"]
    held.go()
    assert opened.wait(600) and (opened.num_passages, opened.num_pending) == (4, 0)
    assert "bob.md" not in ids(opened, "Whose car ?")
    opened.close()


def test_another_process_finds_meanings_too(folder: Path, held: HeldEmbedder, tmp_path: Path) -> None:
    first = open_retriever(folder, held, index_dir=tmp_path / "index")
    second = open_retriever(folder, waiting := HeldEmbedder(), index_dir=tmp_path / "index")
    assert second.num_pending == 4
    held.go()
    assert first.wait(600)
    second.refresh()
    assert second.num_pending == 0 and ids(second, "Whose car ?")[0] == "bob.md"
    waiting.go()
    assert second.wait(600)
    for one in (first, second):
        one.close()


def test_a_failure_leaves_words_and_is_tried_again(
    folder: Path, held: HeldEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    held.error = ValueError("no memory")
    held.go()
    opened = open_retriever(folder, held)
    assert opened.wait(600) and opened.num_pending == 4 and "no memory" in caplog.text
    assert ids(opened, "whales") == ["carla.md"]
    held.error = None
    opened.refresh()
    assert opened.wait(600) and opened.num_pending == 0
    opened.close()


def test_a_passage_that_the_encoder_fails_on_is_found_by_words_and_keeps_no_other_from_its_vector(
    folder: Path, held: HeldEmbedder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    embed, strange = held.embed, "automobile"

    def failing(texts: Sequence[str]) -> np.ndarray:
        if any(strange in text for text in texts):
            raise RuntimeError("strange text")
        return embed(texts)

    monkeypatch.setattr(held, "embed", failing)
    held.go()
    for most_first in (1, 4):  # in the background, and before they are searchable
        monkeypatch.setattr(retriever, "_MOST_EMBEDDED_FIRST", most_first)
        caplog.clear()
        opened = open_retriever(folder, held, index_dir=tmp_path / str(most_first))
        assert [(found.document_id, found.score) for found in opened.search("Rome", 1)] == [("bob.md", 0.0)]
        opened.refresh()
        assert opened.wait(600) and opened.num_pending == 0
        (told,) = caplog.messages
        assert told.startswith("bob.md#0 is found by words alone") and "strange text" in told
        assert ids(opened, "Rome")[0] == "bob.md" and ids(opened, "whales")[0] == "carla.md"
        assert ids(opened, "automobile Rome", min_score=99.0) == ["bob.md"], "a question that it fails on"
        assert "a question is searched for by words alone" in caplog.messages[-1]
        opened.close()
    strange = "nothing any more"
    opened = open_retriever(folder, held, index_dir=tmp_path / "4")
    assert opened.wait(600) and opened.search("Rome", 1)[0].score > 0, "the next process tries again"
    opened.close()


def test_a_search_by_vectors_alone_says_that_the_encoder_fails_on_a_question(
    folder: Path, held: HeldEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.go()
    opened = open_retriever(folder, held, search="dense")
    monkeypatch.setattr(held, "embed", lambda texts: (_ for _ in ()).throw(RuntimeError("strange text")))
    with pytest.raises(RuntimeError, match="strange text"):
        opened.search("Rome", 1)
    opened.close()


def test_a_search_embeds_few_passages_whose_vectors_are_missing_and_each_once(
    folder: Path, held: HeldEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(90):
        (folder / f"more{number:02}.md").write_text(f"Whales {number} near Lisbon.")
    monkeypatch.setattr(retriever, "_MOST_SCORED", 8)
    opened = open_retriever(folder, held)
    held.taken()
    assert ids(opened, "whales near Lisbon", min_score=0.99) == []
    question, *passages = held.taken()
    assert question == "whales near Lisbon" and len(passages) == len(set(passages)) == 8
    assert len(ids(opened, "whales near Lisbon", min_score=0.5)) == 4
    held.go()
    opened.close()


def test_processes_that_share_an_index_seldom_compute_the_same(folder: Path, tmp_path: Path) -> None:
    for number in range(400):
        (folder / f"more{number}.md").write_text(f"Whale {number}.")
    held = [HeldEmbedder() for _ in range(2)]
    opened = [open_retriever(folder, embedder, index_dir=tmp_path / "index") for embedder in held]

    def is_over() -> bool:
        for embedder in held:
            embedder.permits.release()
        return not any(one.num_pending for one in opened)

    wait_until(is_over)
    for embedder, one in zip(held, opened, strict=True):
        embedder.go()
        one.close()
    assert sum(len(embedder.in_background) for embedder in held) < 1.5 * 404


def test_a_dense_search_has_all_vectors_before_it_begins(folder: Path, held: HeldEmbedder, tmp_path: Path) -> None:
    opened = open_retriever(folder, held, search="dense")
    assert opened.num_pending == 0 and not held.in_background and ids(opened, "Whose car ?")[0] == "bob.md"
    opened.close()
    hybrid = open_retriever(folder, held, index_dir=tmp_path / "index")
    assert hybrid.num_pending == 4
    other = HeldEmbedder()
    other.go()
    other.error = ValueError("no memory")
    with pytest.raises(ValueError, match="embedder: the vectors of some passages could not be computed"):
        open_retriever(folder, other, search="dense", index_dir=tmp_path / "index")
    other.error = None
    opened = open_retriever(folder, other, search="dense", index_dir=tmp_path / "index")
    assert opened.num_pending == 0 and ids(opened, "Whose car ?")[0] == "bob.md"
    opened.close()
    held.go()
    hybrid.close()


def test_progress_is_logged(folder: Path, held: HeldEmbedder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ccjax"):
        held.go()
        assert open_retriever(folder, held).wait(600)
    assert "the vectors of 4 passages are computed" in caplog.text and "vectors: 0 passages left" in caplog.text
