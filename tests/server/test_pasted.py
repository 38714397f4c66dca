"""Passages that OpenAI's own client pastes into a message, with no field of ours, are reused; over a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts.benchmarks.wrappers import WRAPPERS

if TYPE_CHECKING:
    import openai

QUESTION = "Who lives in Paris?"


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory: pytest.TempPathFactory):
    """One that prepares passages as the default does, behind a frame that is no longer than these."""
    frame = tmp_path_factory.mktemp("frame") / "frame.txt"
    frame.write_text("Emil is a baker and works by night.\n\nThe road to the lake is long and quiet.")
    with start_server(frame=str(frame)) as server:
        yield server


def texts(name: str) -> tuple[str, str]:
    """Two passages that no other test of this server uses."""
    return (
        f"Anna lives in Paris. She repairs {name} violins in a small shop by the river, and plays in it on Sundays.",
        f"Bob works in Rome. He paints {name} houses, drives an old green van, and sings while he paints the doors.",
    )


def ask(client: openai.OpenAI, content: str, reuse: str = "bounded"):
    """A greedy answer, without passages of the server's own documents."""
    messages = [{"role": "system", "content": content}, {"role": "user", "content": QUESTION}]
    body = {"documents": [], "reuse": reuse}
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, extra_body=body)


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("name", ["langchain", "openwebui", "openwebui tools", "llamaindex", "anythingllm"])
def test_pasted_passages_are_reused_in_another_order(client: openai.OpenAI, name: str) -> None:
    write, passages = WRAPPERS[name], texts(name)
    assert cached(ask(client, write(passages))) < 40, "the words of the wrapper, at most"
    swapped = ask(client, write(passages[::-1]))
    parts = [part for part in swapped.reuse["per_document"] if part["role"] == "passage"]
    longest = sorted(parts, key=lambda part: part["num_tokens"])[-2:]
    assert all(part["computed_tokens"] == 0 < part["recomputed_tokens"] for part in longest)
    assert cached(swapped) >= sum(part["reused_tokens"] for part in longest) > swapped.usage.prompt_tokens / 6
    assert swapped.reuse["per_document"][0]["role"] == "instructions"
    assert cached(ask(client, write(passages), "off")) == 0


def test_pasted_text_is_reused_where_no_border_is_around_it(client: openai.OpenAI) -> None:
    """As when a client joins its chunks and splits them again by tokens, and in a string of JSON."""
    first, second = texts("split")
    joined = f"{first} {second}"
    ask(client, f"{joined}\n\n{texts('other')[0]}")
    for content in (
        f"A part of it: {joined[30:150]}",
        "Earlier: " + joined[:120] + " Later: " + joined[60:],
        WRAPPERS["openwebui tools"]([joined]),
    ):
        got, exact = ask(client, content), ask(client, content, "exact")
        assert not any(part["reused_tokens"] for part in exact.reuse["per_document"] if part["role"] == "passage")
        part = max(got.reuse["per_document"], key=lambda part: part["reused_tokens"])
        assert part["role"] == "passage" and part["computed_tokens"] == 0 and not part["exact"]
        assert cached(got) >= part["reused_tokens"] >= 24


def test_own_documents_are_added_only_where_the_client_brings_no_context(client: openai.OpenAI) -> None:
    known = "Anna lives in Paris. She repairs violins in a small shop by the river. "

    def roles(content: str, role: str = "system", **extra) -> tuple[int, list[str]]:
        turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
        messages = [{"role": role, "content": content}, *turns, {"role": "user", "content": QUESTION}]
        if role == "assistant":
            messages.insert(0, turns[0])
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body=extra)
        return len(answer.documents), [part["role"] for part in answer.reuse["per_document"]]

    long = known * 15
    assert roles("Be kind.")[0] == roles(long[:990])[0] == roles(long, "assistant")[0] == 2
    assert roles(long)[0] == roles(long, "user")[0] == roles(long, retrieval=False)[0] == 0
    number, listed = roles(long, retrieval=True)
    assert number == 2 and listed[:5] == ["instructions", "text", "passage", "text", "passage"]


def test_answer_names_the_documents_and_not_what_was_pasted(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "\n\n".join([*texts("listed"), QUESTION])}]
    body = {"documents": [{"id": "own", "text": "Carla studies whales."}, {"id": "dropped", "text": "whale " * 600}]}
    body["truncate"] = True
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body=body)
    assert [document["id"] for document in answer.documents] == ["own"]
    assert [part["role"] for part in answer.reuse["per_document"]].count("passage") == 3


def test_exact_reuse_of_pasted_passages_gives_the_answer_of_full_prefill(client: openai.OpenAI) -> None:
    """A longer conversation over them, with an edited turn: tokens as with `off`, and only what is new is computed."""
    passages = texts("a conversation's")
    turns = [
        {"role": "system", "content": WRAPPERS["langchain"](passages)},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Anna does. " + passages[0]},
        {"role": "user", "content": "And who works in Rome, and which colour has the van?"},
    ]
    edited = [*turns[:2], {"role": "assistant", "content": "Anna. " + passages[0]}, turns[3]]
    for messages in (turns[:2], turns, edited, turns):

        def answered(reuse: str, messages=messages):
            body = {"documents": [], "reuse": reuse}
            return client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, extra_body=body)

        wanted, got = answered("off"), answered("exact")
        assert got.choices[0].message.content == wanted.choices[0].message.content
        assert got.reuse["exact"]
    assert cached(got) > 0.5 * got.usage.prompt_tokens
