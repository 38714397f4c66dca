"""Passages that were prepared before any request, through the socket: what a request then reuses, and how."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ccjax.server import ServerSettings
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import DOCUMENTS, Server
from tests.server.test_traffic import metrics

ADMIN = "admin-sesame"
PASSAGES = [{"text": text, "id": name} for name, text in DOCUMENTS.items()]
FRAME = "She paints houses by the river and sails from Naples in the morning.\n\nHis oven is in the library of Paris.\n"
TO_PREPARE, COMPUTED = ("ccjax_documents_to_prepare",), ("ccjax_prepared_passages_total", "computed")


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frame") / "frame.txt"
    path.write_text(FRAME)
    return path


def ask(server: Server, passages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The reuse of each passage, or of those that the server finds."""
    messages = [{"role": "user", "content": "Who sings?"}]
    body = {"messages": messages, "max_tokens": 1} | ({} if passages is None else {"documents": passages})
    answer = patience.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [document for document in answer.json()["reuse"]["per_document"] if document["role"] == "passage"]


def share(parts: list[dict[str, Any]], kind: str) -> float:
    return sum(part[f"{kind}_tokens"] for part in parts) / sum(part["num_tokens"] for part in parts)


def test_default_server_reuses_warmed_passages_with_little_recompute(start_server, frame) -> None:
    settings = ServerSettings(admin_key=ADMIN)
    with start_server(settings, frame=str(frame)) as server:
        job = patience.warmed(server.url, ADMIN, documents=PASSAGES)
        assert (job["total"], job["done"], job["computed"]) == (5, 5, 5)
        assert server.engine.cache.num_variants == 1 + 2 + 2 * 5
        first, *others = parts = ask(server, PASSAGES)
        assert first["exact"] and not first["framed"] and first["recomputed_tokens"] == 0
        assert all(part["framed"] and not part["exact"] for part in others)
        assert share(parts, "computed") == 0.0 and share(parts, "reused") >= 0.8
        assert (
            0
            < sum(part["recomputed_tokens"] for part in others)
            <= math.ceil(0.15 * sum(part["num_tokens"] for part in others))
        )


def test_without_a_frame_passages_computed_alone_are_reused(start_server) -> None:
    with start_server(ServerSettings(admin_key=ADMIN), frame="none") as server:
        patience.warmed(server.url, ADMIN, documents=PASSAGES)
        assert server.engine.cache.num_variants == 1 + 5
        parts = ask(server, PASSAGES)
        assert not any(part["framed"] for part in parts) and share(parts, "reused") >= 0.8


def test_system_prompt_is_excluded_from_cci_and_overlap(start_server) -> None:
    """Of a passage computed alone CCI is one half (eq. 9), behind another passage nothing overlaps (eq. 6)."""
    with start_server(ServerSettings(admin_key=ADMIN), strategy="cachecraft") as server:
        patience.warmed(server.url, ADMIN, documents=PASSAGES[:3])
        _, *others = ask(server, PASSAGES[:3])
        assert [part["cfo"] for part in others] == [0.5, 0.5]
        assert [part["recomputed_tokens"] for part in others] == [
            math.ceil(0.5 * part["num_tokens"]) for part in others
        ]


def test_indexed_documents_are_prepared_before_any_request(start_server, frame, caplog) -> None:
    with caplog.at_level("INFO"), start_server(ServerSettings(top_k=5), prepares=True, frame=str(frame)) as server:
        wait_until(lambda: metrics(server)[TO_PREPARE] == 0)
        assert metrics(server)[COMPUTED] == 5
        first, *others = parts = ask(server, None)
        assert len(parts) == 5 and share(parts, "computed") == 0.0
        assert first["exact"] and all(part["framed"] for part in others)
        text = "documents: all documents are prepared; 5 passages were computed in idle time"
        wait_until(lambda: text in caplog.messages)


def test_changed_documents_are_prepared_again(start_server, frame, docs_dir) -> None:
    settings = ServerSettings(top_k=5, refresh_interval_s=0.05)
    with start_server(settings, prepares=True, frame=str(frame)) as server:
        wait_until(lambda: metrics(server)[TO_PREPARE] == 0)
        added = docs_dir / "fred.md"
        try:
            added.write_text("# Fred\n\nFred sings in the choir of Turin.")
            wait_until(lambda: metrics(server)[COMPUTED] == 6)
            assert share(ask(server, None), "computed") == 0.0
        finally:
            added.unlink()


def test_preparing_stops_when_space_runs_out_and_evicts_nothing(start_server, caplog) -> None:
    """There is space for some of the five passages, with two variants each."""
    with caplog.at_level("INFO"):
        with start_server(ServerSettings(), prepares=True, frame="none", host_cache_bytes=24_000) as server:
            wait_until(lambda: metrics(server)[TO_PREPARE] == 0)
            usage = server.engine.cache.usage()["host"]
            assert 2 < usage.num_variants < 1 + 5 and usage.evicted == 0, usage
            wait_until(
                lambda: any("stay unprepared, since the cache is nearly full" in message for message in caplog.messages)
            )


def test_nothing_is_prepared_if_disabled_or_read_only(start_server) -> None:
    for settings in ({"prepares": False}, {"prepares": True, "strategy": "full"}):
        with start_server(ServerSettings(), **settings) as server:
            backend = server.service.backend
            wait_until(lambda worker=backend.worker: not worker.thread._may_work_idly)
            assert server.engine.cache.num_variants == 0


def test_passages_of_a_request_are_prepared_in_idle_time(start_server, frame) -> None:
    """All of them, whether they stood first, behind one passage or behind several."""
    with start_server(ServerSettings(), frame=str(frame)) as server:
        ask(server, PASSAGES[:3])
        wait_until(lambda: metrics(server)[("ccjax_variants_prepared_total",)] == 3)
        first, *others = parts = ask(server, PASSAGES[2::-1])
        assert first["exact"] and not first["framed"] and share(parts, "computed") == 0.0
        assert all(part["framed"] and not part["exact"] for part in others)


def test_passages_prepared_for_a_request_stay_until_it_runs_where_memory_is_full(start_server, frame) -> None:
    """Memory holds little more than one request's passages, and all of them are new."""
    sentences = [part for text in DOCUMENTS.values() for part in text.splitlines()[-1].split(". ")]
    passages = [
        [{"text": ". ".join((*sentences[first : first + 4], sentences[last]))} for first in range(4)]
        for last in range(10)
    ]
    with start_server(ServerSettings(repair=False), frame=str(frame), host_cache_bytes=100_000) as server:
        for own in passages:
            parts = ask(server, own)
            assert all(part["framed"] for part in parts), parts
        assert server.engine.cache.usage()["host"].evicted > 0
