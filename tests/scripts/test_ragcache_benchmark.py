"""The RAGCache benchmark: arrivals and searches against a scripted engine, and a small run."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import pytest

from ccjax.requests import Delta, Response
from ccjax.retrieval.vectors import Found
from ccjax.types import Document, DocumentReuse, ReuseReport
from scripts.benchmarks import ragcache
from scripts.benchmarks.common import BenchmarkError
from tests.scripts import in_process
from tests.server.tiny_model import write_tiny_model

REUSED = tuple(DocumentReuse("passage", None, 9, *tokens) for tokens in ((6, 3, 0), (0, 0, 9)))
SYSTEM = DocumentReuse("instructions", None, 10, 10, 0, 0)
REPORT = ReuseReport("bounded", "prefix", 28, 0, 0, 0, 0.5, True, per_document=(SYSTEM, *REUSED))
TOKEN, ANSWER = Delta("x"), Delta("", response=Response("x", (1,), "length", REPORT, 9, 0.0, 0.0))
PASSAGES = [Document(f"Town {n} has {n} bridges.", str(n), f"Town {n}") for n in range(5)]


def engine(*events):
    """Begins and answers each request at once, with these events or one token."""

    def submit(request, emit, *, on_start=lambda: None):
        on_start()
        for event in events or (TOKEN, ANSWER):
            emit(event)
        return lambda: None

    return argparse.Namespace(submit=submit, batch_counts=argparse.Namespace(waiting=0))


def test_ttft_counts_from_the_planned_arrival_and_hits_as_in_the_paper(monkeypatch):
    """A passage recomputed in part is a hit, the system prompt is no passage (RAGCache sec. 7.4)."""
    clock = argparse.Namespace(now_s=100.0)
    clock.perf_counter = lambda: clock.now_s
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(ragcache, "time", clock)
    busy, answer = engine(), engine().submit
    busy.submit = lambda request, emit: (clock.sleep(0.5), answer(request, emit))
    served = ragcache.open_loop(busy, [ragcache.request_of("?", PASSAGES[:2])] * 3, np.array([0.0, 0.0, 2.0]))
    np.testing.assert_allclose(served, [[0.5, 0.5], [1.0, 0.5], [0.5, 0.5]])


def test_a_failed_request_ends_the_run():
    with pytest.raises(BenchmarkError, match="RuntimeError: no device"):
        ragcache.open_loop(engine(RuntimeError("no device")), [ragcache.request_of("?", PASSAGES)], np.zeros(1))


@pytest.mark.parametrize(
    ("lists", "wanted"),
    [
        (([1, 2], [2, 1], [2, 1]), (True, 2)),  # begun at the first list, again at the second
        (([1, 2], [2, 1]), (False, 1)),
        (([1, 2],), (False, 0)),
    ],
)
def test_the_exposed_part_of_a_search_ends_when_the_right_answer_begins(lists, wanted):
    def stages():
        for number, rows in enumerate(lists, 1):
            time.sleep(0.01)
            yield Found(np.array(rows), np.ones(2), number == len(lists))

    search_s, exposed_s, was_right, num_started, ttft_s = ragcache.search(engine(), stages(), PASSAGES, "?")
    assert (was_right, num_started) == wanted
    assert exposed_s < search_s - 0.009 if was_right else exposed_s == search_s
    assert ttft_s >= search_s


def test_bench_measures_both_parts(tmp_path):
    docs = [{"doc_id": n, "title": f"Town {n}", "text": f"It has {n} bridges."} for n in range(8)]
    rows = [{"question": f"How many has {n}?", "docs": [docs[n % 2], docs[n % 2 + 1], docs[5]]} for n in range(12)]
    (tmp_path / "qa").mkdir()
    (tmp_path / "qa" / "rag_top5_musique.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_tiny_model(tmp_path / "tokenizer_llama3", [doc["text"] for doc in docs])
    table, figures = in_process.figures("ragcache", "--data", tmp_path, "--strategies", "prefix", "--budgets", 4)
    (case,) = figures["order"]
    assert 0.0 < case["hit_ratio"] <= 1.0 and case["rate"] > 0.0
    assert case["mean_gain"] == pytest.approx(case["off"]["mean"] / case["on"]["mean"]) == case["mean_gains"][0]
    (searched,) = figures["speculation"]
    assert searched["gain"]["mean"] == pytest.approx(searched["search_ms"] / searched["exposed_ms"])
    assert 0.0 <= searched["right_share"] <= 1.0 and figures["shapes"]["vectors"] == 4000
    assert any("Cache-aware order" in line for line in table)
