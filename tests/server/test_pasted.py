"""Passages that a client pastes into a message, with no field of ours, are reused: over a socket, by OpenAI's client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.server.conftest import Server
from tests.text.wrappers import WRAPPERS

if TYPE_CHECKING:
    import openai

TEXTS = (
    "Anna lives in Paris. She repairs violins in a small shop by the river, and she plays in the park on Sundays.",
    "Bob works in Rome. He paints houses, drives an old green van, and sings while he paints the doors and windows.",
)
QUESTION = "Who lives in Paris?"


def ask(client: openai.OpenAI, content: str, *, role: str = "system", reuse: str = "bounded", **more):
    """A greedy answer; `extra_body` only switches reuse, and retrieval of the server's own documents, off."""
    messages = [{"role": role, "content": content}, {"role": "user", "content": QUESTION}]
    body = {"documents": [], "reuse": reuse, **more}
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, extra_body=body)


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("client_name", ["langchain", "openwebui", "openwebui tools", "llamaindex", "anythingllm"])
def test_pasted_passages_are_reused_in_another_order(server: Server, client: openai.OpenAI, client_name: str) -> None:
    write, salt = WRAPPERS[client_name], {"cache_salt": client_name}
    first = ask(client, write(TEXTS), **salt)
    assert cached(first) == 0
    swapped = ask(client, write(TEXTS[::-1]), **salt)
    assert cached(swapped) > 0.5 * swapped.usage.prompt_tokens
    roles = [part["role"] for part in swapped.reuse["per_document"]]
    assert roles.count("passage") >= 2 and roles[0] == "instructions"
    assert cached(ask(client, write(TEXTS), cache_salt="another tenant's")) == 0 or client_name != "langchain"


def test_exact_reuse_of_pasted_passages_gives_the_answer_of_full_prefill(server: Server, client: openai.OpenAI) -> None:
    """A longer conversation over them, with an edited turn: tokens as with `off`, and only what is new is computed."""
    turns = [
        {"role": "system", "content": WRAPPERS["langchain"](TEXTS)},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Anna does. " + TEXTS[0]},
        {"role": "user", "content": "And who works in Rome, and which colour has the van?"},
    ]
    edited = [*turns[:2], {"role": "assistant", "content": "Anna. " + TEXTS[0]}, turns[3]]
    for messages in (turns[:2], turns, edited, turns):

        def answered(reuse: str, messages=messages):
            body = {"documents": [], "reuse": reuse, "cache_salt": "a conversation"}
            return client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, extra_body=body)

        wanted, got = answered("off"), answered("exact")
        assert got.choices[0].message.content == wanted.choices[0].message.content
        assert got.reuse["exact"]
    assert cached(got) > 0.5 * got.usage.prompt_tokens
