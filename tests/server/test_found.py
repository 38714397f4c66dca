"""What the server's own documents are searched for, through the socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ccjax.cli.serving.messages import final_line
from ccjax.cli.serving.options import ServeOptions
from ccjax.retrieval import retriever
from ccjax.server import ServerSettings
from ccjax.server.preparing import DocumentPreparation
from tests.polling import wait_until
from tests.retrieval.opened import HeldEmbedder
from tests.server import patience
from tests.server.conftest import Server, StartServer

if TYPE_CHECKING:
    import openai


def found(client: openai.OpenAI, *turns: str, top_k: int = 1, documents: list | None = None) -> list[str]:
    """The documents in the prompt for the last of a user's turns."""
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "I see."}]
    body = {"retrieval": {"top_k": top_k}} if documents is None else {"documents": documents}
    answer = client.chat.completions.create(model="tiny", messages=messages[:-1], max_tokens=1, extra_body=body)
    assert answer.model_extra is not None
    parts = answer.model_extra["reuse"]["per_document"]
    return [part["document_id"].split("#")[0] for part in parts if part["document_id"]]


def test_a_follow_up_is_searched_for_with_the_question_before_it(client: openai.OpenAI) -> None:
    assert found(client, "Where does Carla sail with her boat?", "And what is its name?") == ["carla.md"]
    assert found(client, "Who bakes bread in Naples?", "What burns there?") == ["dino.md"]
    assert found(client, "Who repairs violins in Paris?", "And the one who drives a van?") == ["bob.md"]


def test_another_question_is_searched_for_alone(client: openai.OpenAI) -> None:
    last = "In which library does the chess club of Oslo meet on Tuesdays?"
    assert found(client, "Who bakes bread in Naples, with an oven that burns olive wood every morning?", last) == [
        "emma.md"
    ]


def test_a_pasted_log_does_not_hide_the_question(server: Server, client: openai.OpenAI) -> None:
    log = "\n".join(f"[{n:06}] violins=3 paris=0x{n:x} shop/river.py:{n} repairs=7" for n in range(5))
    assert found(client, f"{log}\n\nHow often does the chess club of the library in Oslo meet?") == ["emma.md"]
    assert found(client, log) == ["anna.md"]


def test_the_prompt_and_the_report_say_that_nothing_was_found(start_server: StartServer) -> None:
    with start_server(ServerSettings(top_k=3, min_score=0.5)) as server, server.client() as client:
        assert found(client, "Emma teaches chess. Her club meets on Tuesdays?", top_k=3) == ["emma.md"]
        assert found(client, "How do submarines navigate under arctic ice?") == ["nothing-found"]
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "How do submarines navigate under arctic ice?"}],
            max_tokens=1,
        )
        assert answer.model_extra is not None
        (document,) = answer.model_extra["documents"]
        assert document["id"] == "nothing-found"
        sent = [{"id": "1", "text": "Submarines use sonar."}]
        assert found(client, "How do submarines navigate?", documents=sent) == ["1"]


def test_neighbours_are_passages_of_their_own_which_are_reused(start_server: StartServer, docs_dir: Path) -> None:
    with start_server(ServerSettings(top_k=1, context_tokens=200)) as server:
        path = docs_dir / "book.md"
        try:
            path.write_text(
                "# Book\n\n" + "\n\n".join(f"{word} is a word of the book. " * 9 for word in ("Red", "Blue"))
            )
            server.retriever.refresh()
            with server.client() as client:
                assert set(found(client, "Which word is red?")) == {"book.md"}
                again = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "Is any word red?"}], max_tokens=1
                )
            assert again.model_extra is not None
            numbers = [int(document["id"].split("#")[1]) for document in again.model_extra["documents"]]
            assert len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            parts = again.model_extra["reuse"]["per_document"]
            assert all(part["reused_tokens"] for part in parts if part["document_id"])
        finally:
            path.unlink()
            server.retriever.refresh()


def test_a_server_answers_by_words_while_vectors_are_computed(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retriever, "_MOST_EMBEDDED_FIRST", 0)
    with start_server(prepares=True, embedder=(held := HeldEmbedder())) as server, server.client() as client:
        told = patience.get(f"{server.url}/ready").json()["documents"]
        assert told["num_vectors_pending"] == told["num_passages"] == 5
        assert "ccjax_vectors_pending 5.0" in patience.get(f"{server.url}/metrics").text
        assert found(client, "Who teaches chess on Tuesdays?") == ["emma.md"]
        assert found(client, "Which car ?") == ["nothing-found"]
        line = final_line(ServeOptions(model="tiny", docs="docs"), server.service, server.url)
        assert "tiny over 5 passages of 5 documents, 5 of them found by words alone until their vectors" in line
        held.go()
        wait_until(lambda: not patience.get(f"{server.url}/ready").json()["documents"]["num_vectors_pending"])
        assert found(client, "Which car ?") == ["bob.md"]
        line = final_line(ServeOptions(model="tiny", docs="docs"), server.service, server.url)
        assert "tiny over 5 passages of 5 documents on" in line
        wait_until(lambda: "ccjax_documents_to_prepare 0.0" in patience.get(f"{server.url}/metrics").text)


def test_passages_are_prepared_after_vectors(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the same cores."""
    monkeypatch.setattr(retriever, "_MOST_EMBEDDED_FIRST", 0)
    steps = 0
    step = DocumentPreparation.step

    def counted(self: DocumentPreparation, is_wanted: Callable[[], bool]) -> bool:
        nonlocal steps
        is_left = step(self, is_wanted)
        steps += 1
        return is_left

    monkeypatch.setattr(DocumentPreparation, "step", counted)
    with start_server(prepares=True, embedder=(held := HeldEmbedder())) as server:
        preparation = server.service.backend.preparation
        assert preparation is not None
        wait_until(lambda: steps > 3)
        assert preparation.num_documents_left == 5
        # Requests are answered first.
        assert server.retriever._background.is_wanted == server.service.backend.worker.thread.is_wanted
        held.go()
        wait_until(lambda: not preparation.num_documents_left)
