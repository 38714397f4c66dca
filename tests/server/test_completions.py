"""Prompts of /v1/completions: several, of token ids, echoed, with log-probabilities; and how chats are rendered."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import openai
import pytest

from ccjax import Request, SamplingParams
from tests.server import patience
from tests.server.conftest import Server
from tests.server.test_bad_requests import COMPLETIONS, QUESTION, assert_refused, assert_serves
from tests.server.test_choices import bytes_of, whole_characters
from tests.server.test_nearly import nearly_equal

PROMPTS = ["Bob works in Oslo.", "Anna lives in Paris, they say.", "Who works"]
PLAIN = {"retrieval": False, "ignore_eos": True, "reuse": "off"}


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    body = PLAIN | more.pop("extra_body", {})
    fields = {"max_tokens": 6, "seed": 3} | more
    return client.completions.create(model="tiny", prompt=prompt, extra_body=body, **fields)


def ids_of(server: Server, text: str) -> list[int]:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None and tokenizer.bos_id is not None
    return [tokenizer.bos_id, *tokenizer.encode(text, allow_special=False)]


def prompt_logprobs(server: Server, ids: list[int]) -> np.ndarray:
    """[n - 1, V], float64: log-softmax of a plain prefill's logits after each token but the last."""
    sampling = SamplingParams(1, prompt_logits=len(ids))
    logits = server.engine.run(Request(segments=[(), ids], sampling=sampling, reuse="off")).prompt_logits
    assert logits is not None
    return np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))[:-1]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts_are_answered_as_each_alone(server: Server, client: openai.OpenAI, as_ids, n) -> None:
    prompts = [ids_of(server, text) for text in PROMPTS] if as_ids else PROMPTS
    fields = {"n": n, "temperature": 1.2, "logprobs": 1}
    whole = complete(client, prompts, **fields)
    assert [choice.index for choice in whole.choices] == list(range(3 * n))
    wanted = [choice for prompt in prompts for choice in complete(client, prompt, **fields).choices]
    assert [choice.text for choice in whole.choices] == [choice.text for choice in wanted]
    assert [choice.logprobs.tokens for choice in whole.choices] == [choice.logprobs.tokens for choice in wanted]
    num_tokens = sum(len(ids_of(server, text)) for text in PROMPTS)
    assert whole.usage.prompt_tokens == whole.reuse["prompt_tokens"] == num_tokens
    assert whole.usage.completion_tokens == 6 * 3 * n
    chunks = list(complete(client, prompts, stream=True, stream_options={"include_usage": True}, **fields))
    texts = ["" for _ in wanted]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in wanted]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == whole.usage


def test_echo_has_the_prompt_and_its_log_probabilities(server: Server, client: openai.OpenAI) -> None:
    for text in PROMPTS:
        ids = ids_of(server, text)
        alone = complete(client, ids, logprobs=2)
        for prompt in (text, ids):
            found = complete(client, prompt, logprobs=2, echo=True)
            (choice,) = found.choices
            assert choice.text == text + alone.choices[0].text
            told, wanted = choice.logprobs, prompt_logprobs(server, ids)
            assert len(told.tokens) == len(ids) + 6
            assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
            np.testing.assert_allclose(
                told.token_logprobs[1 : len(ids)], wanted[np.arange(len(ids) - 1), ids[1:]], atol=1e-5
            )
            for row, top in zip(wanted, told.top_logprobs[1 : len(ids)], strict=True):
                np.testing.assert_allclose(sorted(top.values()), np.sort(row)[-2:], atol=1e-5)
            shown = [b"" if token == "<|begin|>" else bytes_of(token) for token in told.tokens]
            before = [b"".join(shown[:number]) for number in range(len(shown))]
            assert told.text_offset == [len(whole_characters(data)) for data in before]
            assert b"".join(shown).decode(errors="replace") == choice.text
            assert told.tokens[len(ids) :] == alone.choices[0].logprobs.tokens
            assert found.reuse["mode"] == "off" and found.reuse["computed_tokens"] == len(ids)


def test_without_an_answer_only_the_prompt_is_told(server: Server, client: openai.OpenAI) -> None:
    prompts = [ids_of(server, text) for text in PROMPTS]
    found = complete(client, prompts, logprobs=0, echo=True, max_tokens=0)
    assert found.usage.completion_tokens == 0 and found.usage.total_tokens == found.usage.prompt_tokens
    for choice, text, ids in zip(found.choices, PROMPTS, prompts, strict=True):
        assert choice.text == text and choice.finish_reason == "length"
        assert len(choice.logprobs.tokens) == len(ids)
    chunks = list(complete(client, PROMPTS, echo=True, max_tokens=0, stream=True))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == PROMPTS
    for body in ({"prompt": "x", "max_tokens": 0}, {"prompt": "x", "max_tokens": 0, "logprobs": 1}):
        assert_refused(patience.post(f"{server.url}{COMPLETIONS}", json=body), 400, "max_tokens", "positive", "0")


def test_prompt_logprobs_are_vllms(server: Server, client: openai.OpenAI) -> None:
    text = PROMPTS[1]
    ids = ids_of(server, text)
    wanted = prompt_logprobs(server, ids)
    found = complete(client, text, extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    assert found[0] is None and len(found) == len(ids)
    for row, token, told in zip(wanted, ids[1:], found[1:], strict=True):
        own = told[str(token)]
        assert math.isclose(own["logprob"], row[token], abs_tol=1e-5)
        assert own["rank"] == 1 + int((row > row[token]).sum())
        likeliest = np.argsort(-row)[:3]
        assert set(told) == {str(one) for one in (token, *likeliest)}
        assert [told[str(one)]["rank"] for one in likeliest] == [1, 2, 3]
    body = {"messages": QUESTION, "max_tokens": 2, "prompt_logprobs": 1, "retrieval": False}
    answer = patience.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] and answer["reuse"]["mode"] == "off"


@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 3, "temperature": 1.0}, {"max_tokens": 0}])
def test_a_stream_tells_log_probabilities_of_the_prompt_first(server, client: openai.OpenAI, fields: Any) -> None:
    body = {"logprobs": 2, "echo": True, **fields, "extra_body": {"prompt_logprobs": 3}}
    whole = complete(client, PROMPTS, **body)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    joined: list[Any] = [{"text": "", "prompt": None, **{name: [] for name in names}} for _ in whole.choices]
    for chunk in complete(client, PROMPTS, stream=True, **body):
        for choice in chunk.choices:
            found = joined[choice.index]
            if getattr(choice, "prompt_logprobs", None) is not None:
                assert not found["text"] and found["prompt"] is None
                found["prompt"] = choice.prompt_logprobs
            found["text"] += choice.text
            for name in names if choice.logprobs else ():
                found[name] += getattr(choice.logprobs, name)
    for choice, found in zip(whole.choices, joined, strict=True):
        assert found["text"] == choice.text and nearly_equal(found["prompt"], choice.prompt_logprobs)
        assert all(nearly_equal(found[name], getattr(choice.logprobs, name)) for name in names)


def test_streams_of_chats_and_responses_tell_log_probabilities_of_the_prompt(server: Server, client) -> None:
    more = {"max_tokens": 2, "extra_body": PLAIN | {"prompt_logprobs": 1}}
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, **more)
    first, *others = client.chat.completions.create(model="tiny", messages=QUESTION, stream=True, **more)
    assert nearly_equal(first.prompt_logprobs, whole.prompt_logprobs) and first.choices[0].delta.role == "assistant"
    assert not any(hasattr(chunk, "prompt_logprobs") for chunk in others)
    more = {"input": "Who?", "max_output_tokens": 2, "extra_body": {"retrieval": False, "prompt_logprobs": 1}}
    wanted = client.responses.create(model="tiny", **more)
    *_, last = client.responses.create(model="tiny", stream=True, **more)
    assert nearly_equal(last.response.prompt_logprobs, wanted.prompt_logprobs)
    assert len(wanted.prompt_logprobs) == wanted.usage.input_tokens


def test_long_prompts_have_log_probabilities_over_several_packs(server: Server, client: openai.OpenAI) -> None:
    ids = np.random.default_rng(1).integers(0, 256, 450).tolist()
    told = complete(client, ids, echo=True, max_tokens=0, logprobs=0).choices[0].logprobs.token_logprobs
    wanted = prompt_logprobs(server, ids)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(told[1:], wanted, atol=1e-4)


def test_prompts_are_cut_to_their_last_tokens(server: Server, client: openai.OpenAI) -> None:
    ids = ids_of(server, PROMPTS[1])
    wanted = complete(client, ids[-5:])
    cut = complete(client, PROMPTS[1], extra_body={"truncate_prompt_tokens": 5})
    assert cut.choices[0].text == wanted.choices[0].text and cut.usage.prompt_tokens == 5
    long = complete(client, "word " * 3000, extra_body={"truncate_prompt_tokens": -1})
    assert long.usage.total_tokens == server.engine.max_model_len
    chat = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=2, extra_body=PLAIN | {"truncate_prompt_tokens": 9}
    )
    assert chat.usage.prompt_tokens == 9


def tokens_of(server: Server, messages: Any, **more: Any) -> str:
    found = patience.post(f"{server.url}/tokenize", json={"messages": messages, **more}).json()["tokens"]
    text = patience.post(f"{server.url}/detokenize", json={"tokens": found}).json()["prompt"]
    assert isinstance(text, str)
    return text


def test_the_last_message_is_continued(server: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Anna, and"}]
    whole = tokens_of(server, messages)
    assert whole.endswith("assistant\nAnna, and<|end|><|turn|>assistant\n")
    assert tokens_of(server, messages, add_generation_prompt=False).endswith("assistant\nAnna, and<|end|>")
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert tokens_of(server, messages, **continued).endswith("assistant\nAnna, and")
    body = {"messages": messages, "max_tokens": 5, "retrieval": False, "reuse": "off", **continued}
    answer = patience.post(f"{server.url}/v1/chat/completions", json=body).json()
    plain = {"prompt": tokens_ids(server, messages, **continued), "max_tokens": 5, "reuse": "off"}
    wanted = patience.post(f"{server.url}{COMPLETIONS}", json=plain).json()
    assert answer["choices"][0]["message"]["content"] == wanted["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]


def tokens_ids(server: Server, messages: Any, **more: Any) -> list[int]:
    return patience.post(f"{server.url}/tokenize", json={"messages": messages, **more}).json()["tokens"]


def test_tokens_of_a_prompt_that_leaves_no_room_for_an_answer_are_told(server: Server) -> None:
    def counted(num_words: int) -> Any:
        messages = [{"role": "user", "content": "word " * num_words}]
        return patience.post(f"{server.url}/tokenize", json={"messages": messages})

    few, more = (counted(num).json()["count"] for num in (10, 20))
    longest = 10 + (server.engine.max_model_len - few) * 10 // (more - few)
    assert server.engine.max_model_len - 10 < counted(longest).json()["count"] <= server.engine.max_model_len


ASKED = {"messages": QUESTION, "max_tokens": 2}
BAD_CHATS = [
    ({"continue_final_message": True}, "continue_final_message", ["assistant", "user"]),
    (
        {
            "continue_final_message": True,
            "add_generation_prompt": True,
            "messages": [*QUESTION, {"role": "assistant", "content": "So"}],
        },
        "continue_final_message",
        ["add_generation_prompt"],
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["template"]),
    ({"chat_template_kwargs": {"mood": ["<|end|>"]}}, "chat_template_kwargs", ["control"]),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["positive", "0"]),
    ({"prompt_logprobs": 21}, "prompt_logprobs", ["20", "21"]),
]
BAD_COMPLETIONS = [
    ({"echo": True, "documents": [{"text": "x"}]}, "documents", ["echo"]),
    ({"echo": True, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", ["echo"]),
    ({"prompt": ["x", ""]}, "prompt", ["non-empty"]),
    ({"prompt": ["x", [5], [10**9]]}, "prompt", ["token ids", str(10**9)]),
    ({"prompt": ["x"] * 257}, "prompt", ["256"]),
]


def test_bad_values_are_refused(server: Server) -> None:
    for fields, param, words in BAD_CHATS:
        answer = patience.post(f"{server.url}/v1/chat/completions", json=ASKED | fields)
        assert_refused(answer, 400, param, *words)
    for fields, param, words in BAD_COMPLETIONS:
        answer = patience.post(f"{server.url}{COMPLETIONS}", json={"prompt": "x", "max_tokens": 2} | fields)
        assert_refused(answer, 400, param, *words)
    assert_serves(server)
