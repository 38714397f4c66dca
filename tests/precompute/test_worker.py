"""The worker that reads the documents."""

from __future__ import annotations

from types import SimpleNamespace

from ccjax.precompute import worker as worker_module
from ccjax.precompute.worker import Worker
from ccjax.retrieval import retriever
from tests.retrieval.opened import HeldEmbedder, open_retriever


def test_it_begins_when_all_vectors_are_computed(tmp_path, monkeypatch):
    """Neighbours are found by them."""
    monkeypatch.setattr(retriever, "_MOST_EMBEDDED_FIRST", 0)
    monkeypatch.setattr(retriever, "_PROGRESS_S", 0.01)
    (tmp_path / "anna.md").write_text("Anna repairs violins by the river.")
    held, told = HeldEmbedder(), []

    def progress(*step):
        told.append(step)
        if step[0] == "embed":
            held.go()

    opened = open_retriever(tmp_path, held, progress=progress)
    opened.give_way(lambda: True)
    monkeypatch.setattr(worker_module, "open_documents", lambda *_: opened)
    worker = object.__new__(Worker)
    worker._settings = SimpleNamespace(model="tiny", documents=None)
    worker._model = SimpleNamespace(tokenizer=None)
    worker._progress = None
    assert worker._open_documents() is opened and opened.num_pending == 0
    assert ("embed", 0, 1) in told and not opened._background.is_wanted()
    opened.close()
