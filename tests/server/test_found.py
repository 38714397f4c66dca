"""What the server's own documents are searched for, through the socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.conftest import Server

if TYPE_CHECKING:
    import openai


def found(client: openai.OpenAI, *turns: str, top_k: int = 1) -> list[str]:
    """The documents in the prompt for the last of a user's turns."""
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "I see."}]
    body = {"retrieval": {"top_k": top_k}}
    answer = client.chat.completions.create(model="tiny", messages=messages[:-1], max_tokens=1, extra_body=body)
    assert answer.model_extra is not None
    parts = answer.model_extra["reuse"]["per_document"]
    return [part["document_id"].split("#")[0] for part in parts if part["document_id"]]


def test_a_follow_up_is_searched_for_with_the_question_before_it(client: openai.OpenAI) -> None:
    assert found(client, "Where does Carla sail with her boat?", "And what is its name?") == ["carla.md"]
    assert found(client, "Who bakes bread in Naples?", "What burns there?") == ["dino.md"]


def test_another_question_is_searched_for_alone(client: openai.OpenAI) -> None:
    last = "In which library does the chess club of Oslo meet on Tuesdays?"
    assert found(client, "Who bakes bread in Naples, with an oven that burns olive wood every morning?", last) == [
        "emma.md"
    ]


def test_a_pasted_log_does_not_hide_the_question(server: Server, client: openai.OpenAI) -> None:
    log = "\n".join(f"[{n:06}] violins=3 paris=0x{n:x} shop/river.py:{n} repairs=7" for n in range(5))
    assert found(client, f"{log}\n\nHow often does the chess club of the library in Oslo meet?") == ["emma.md"]
    assert found(client, log) == ["anna.md"]
