"""vLLM's sampling parameters over the socket, with OpenAI's client."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import openai
import pytest

import ccjax.runner.sampling
from tests.server import patience
from tests.server.conftest import Server
from tests.server.test_bad_requests import assert_refused

QUESTION: Any = [{"role": "user", "content": "Who lives in Paris?"}]


def chat(client: openai.OpenAI, max_tokens: int = 12, **more: Any) -> Any:
    """An answer without passages and with all of its tokens; further fields are those of the body."""
    own = {name: more.pop(name) for name in list(more) if name in ("stop", "stream", "temperature", "n", "logit_bias")}
    body = {"retrieval": False, "ignore_eos": True, "reuse": "off"} | more
    return client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=max_tokens, logprobs=True, seed=5, extra_body=body, **own
    )


def ids_of(server: Server, answer: Any) -> list[int]:
    """The token ids of the first choice: those of the same names, which are unique in this vocabulary."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    ids: dict[bytes, int] = {}
    for token in range(tokenizer.vocab_size):
        ids.setdefault(tokenizer.token_bytes(token), token)
    return [ids[bytes(token.bytes)] for token in answer.choices[0].logprobs.content]


@pytest.fixture
def greedy(server: Server, client: openai.OpenAI) -> list[int]:
    return ids_of(server, chat(client))


def test_logit_bias_and_allowed_tokens_choose_the_tokens(server, client, greedy) -> None:
    assert ids_of(server, chat(client, 3, logit_bias={"65": 100})) == [65] * 3
    assert ids_of(server, chat(client, 3, allowed_token_ids=[70])) == [70] * 3
    answer = ids_of(server, chat(client, 8, temperature=2.0, allowed_token_ids=[70, 71, 72]))
    assert set(answer) <= {70, 71, 72} and len(set(answer)) > 1
    assert greedy[0] not in ids_of(server, chat(client, 6, logit_bias={str(greedy[0]): -100}))
    assert ids_of(server, chat(client)) == greedy


def test_allowed_tokens_beside_a_grammar_are_those_of_both(server, client) -> None:
    digits = {"guided_regex": "[0-9]{6}", "temperature": 2.0, "ignore_eos": False}
    three = [token for token in range(300) if server.engine.tokenizer.token_bytes(token) in (b"3", b"5", b"7")]
    seen = {char for char in chat(client, **digits).choices[0].message.content}
    assert not seen <= set("357"), "else the grammar alone would do"
    answer = chat(client, **digits, allowed_token_ids=[*three, *range(70, 75)]).choices[0].message.content
    assert len(answer) == 6 and set(answer) <= set("357") and len(set(answer)) > 1
    # Nothing that both allow: what rules out every token has no effect.
    assert set(chat(client, **digits, allowed_token_ids=[70]).choices[0].message.content) == seen


def test_the_stop_reason_is_vllms(server, client, greedy) -> None:
    def reasons(**more: Any) -> tuple[Any, Any]:
        (choice,) = chat(client, **more).choices
        last = [chunk.choices[0] for chunk in chat(client, stream=True, **more)][-1]
        assert (choice.finish_reason, choice.stop_reason) == (last.finish_reason, last.stop_reason)
        return choice.finish_reason, choice.stop_reason

    assert reasons() == ("length", None)
    assert reasons(stop_token_ids=[greedy[2]]) == ("stop", greedy[2])
    (end,) = server.engine.tokenizer.encode("<|end|>", allow_special=True)
    bias = {str(end): 100}
    assert reasons(logit_bias=bias, ignore_eos=False) == ("stop", None)
    assert reasons(logit_bias=bias, ignore_eos=False, stop_token_ids=[end]) == ("stop", None)
    assert reasons(logit_bias=bias, stop_token_ids=[end]) == ("stop", end)
    text = chat(client).choices[0].message.content
    assert reasons(stop=["never", text[3:5]]) == ("stop", text[3:5])
    found = client.completions.create(
        model="tiny", prompt="Who", max_tokens=3, stop=["x"], extra_body={"retrieval": False}
    )
    assert found.choices[0].stop_reason is None


def test_penalties_leave_no_token_twice(server, client) -> None:
    biased = {"logit_bias": {str(token): 30 for token in range(70, 80)}}
    once = ids_of(server, chat(client, 4, **biased))
    assert len(set(ids_of(server, chat(client, 9, **biased, presence_penalty=2.0, frequency_penalty=2.0)))) >= len(
        set(once)
    )
    answer = ids_of(server, chat(client, 9, **biased, repetition_penalty=50.0))
    assert len(set(answer)) == 9


def test_top_k_one_and_tiny_top_p_are_greedy(server, client, greedy) -> None:
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-30}, {"top_p": 1e-300}):
        assert ids_of(server, chat(client, temperature=2.0, **fields)) == greedy, fields
    assert ids_of(server, chat(client, temperature=2.0, top_k=-1)) != greedy


def test_fields_without_effect_cost_nothing(server, client, monkeypatch) -> None:
    """The program of a batch in which no request has a field with an effect has no argument for any."""
    states, step = [], ccjax.runner.sampling.sample_step
    noted = lambda logits, state, **more: states.append(state) or step(logits, state, **more)  # noqa: E731
    monkeypatch.setattr(ccjax.runner.sampling, "sample_step", noted)
    neutral: dict[str, Any] = {
        **{"top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
        **{"logit_bias": {}, "min_tokens": 0, "bad_words": [], "stop_token_ids": [70], "skip_special_tokens": False},
    }
    for temperature, fields in ((0, {}), (1, neutral), (0, neutral | {"top_k": 5, "min_p": 0.5})):
        chat(client, temperature=temperature, **fields)
    assert len(states) >= 3 and all(state.allowed is None and state.adjustments is None for state in states)
    chat(client, temperature=1, top_k=5)
    assert states[-1].adjustments is not None


def test_stop_tokens_end_the_answer(server, client, greedy) -> None:
    wanted = greedy.index(greedy[3])
    answer = chat(client, stop_token_ids=[greedy[3]])
    assert ids_of(server, answer) == greedy[:wanted] and answer.choices[0].finish_reason == "stop"
    kept = chat(client, stop_token_ids=[greedy[3]], include_stop_str_in_output=True)
    assert ids_of(server, kept) == greedy[: wanted + 1] and kept.choices[0].finish_reason == "stop"
    later = chat(client, stop_token_ids=[greedy[3]], min_tokens=10)
    ids = ids_of(server, later)
    assert greedy[3] not in ids and len(ids) >= 10


def test_stop_strings_are_kept_and_wait_for_min_tokens(client) -> None:
    text = chat(client).choices[0].message.content
    stop = text[4:6]
    cut = chat(client, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    kept = chat(client, stop=[stop], include_stop_str_in_output=True)
    assert kept.choices[0].message.content == text[: text.index(stop) + len(stop)]
    assert kept.choices[0].finish_reason == "stop"
    streamed = chat(client, stop=[stop], include_stop_str_in_output=True, stream=True)
    parts = [chunk.choices[0].delta.content for chunk in streamed if chunk.choices]
    assert "".join(part or "" for part in parts) == kept.choices[0].message.content
    assert chat(client, stop=[stop], min_tokens=12).choices[0].message.content == text


def test_bad_words_are_not_in_the_answer(client) -> None:
    text = chat(client, allowed_token_ids=[70, 71, 72], temperature=2.0).choices[0].message.content
    for length in (1, 2):
        word = text[3 : 3 + length]
        other = chat(client, allowed_token_ids=[70, 71, 72], temperature=2.0, bad_words=[word])
        assert word not in other.choices[0].message.content and len(other.choices[0].message.content) == 12


def test_special_tokens_are_shown_on_request(server, client) -> None:
    begin = server.engine.tokenizer.special_names["<|begin|>"]
    assert chat(client, 2, allowed_token_ids=[begin]).choices[0].message.content == ""
    shown = chat(client, 2, allowed_token_ids=[begin], skip_special_tokens=False)
    assert shown.choices[0].message.content == "<|begin|>" * 2


def test_only_the_request_with_a_damaged_weight_fails(server, monkeypatch) -> None:
    model = server.engine._loop._model
    (token,) = server.engine.tokenizer.encode("~", allow_special=False)
    damaged = model.top.replace(embedding=model.top.embedding.at[token].set(np.nan))
    url = f"{server.url}/v1/completions"
    bodies = [{"prompt": text, "max_tokens": 5, "retrieval": False} for text in ("Anna lives", "Anna ~ lives", "Bob")]
    wanted = [patience.post(url, json=body).json()["choices"][0]["text"] for body in bodies]
    monkeypatch.setattr(model, "top", damaged)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        first, failed, last = threads.map(lambda body: patience.post(url, json=body), bodies)
    assert [answer.json()["choices"][0]["text"] for answer in (first, last)] == [wanted[0], wanted[2]]
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "logits_not_finite"
    monkeypatch.undo()
    assert patience.post(url, json=bodies[1]).json()["choices"][0]["text"] == wanted[1]


BAD = [
    ({"top_k": -2}, "top_k", ["positive", "-2"]),
    ({"top_k": 1.5}, "top_k", ["integer", "1.5"]),
    ({"min_p": 1.5}, "min_p", ["0 to 1", "1.5"]),
    ({"presence_penalty": 3}, "presence_penalty", ["-2 to 2", "3"]),
    ({"frequency_penalty": "x"}, "frequency_penalty", ["number", "x"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["above 0", "0"]),
    ({"logit_bias": {"5": 101}}, "logit_bias", ["-100 to 100", "101"]),
    ({"logit_bias": {"a": 1}}, "logit_bias", ["token ids", "'a'"]),
    ({"logit_bias": {"99999": 1}}, "logit_bias", ["token ids from 0", "99999"]),
    ({"logit_bias": [5]}, "logit_bias", ["object"]),
    ({"min_tokens": 3}, "min_tokens", ["at most 2", "3"]),
    ({"min_tokens": -1}, "min_tokens", ["non-negative", "-1"]),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", ["token ids from 0", "1000000"]),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]", ["integer", "5"]),
    ({"stop_token_ids": [-5]}, "stop_token_ids", ["token ids", "-5"]),
    ({"bad_words": [""]}, "bad_words", ["non-empty"]),
    ({"bad_words": "word"}, "bad_words", ["array"]),
    ({"allowed_token_ids": []}, "allowed_token_ids", ["at least one"]),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", ["boolean", "yes"]),
    ({"skip_special_tokens": 0}, "skip_special_tokens", ["boolean", "0"]),
]


def test_bad_values_are_refused(server: Server) -> None:
    for fields, param, words in BAD:
        body = {"messages": QUESTION, "max_tokens": 2} | fields
        assert_refused(patience.post(f"{server.url}/v1/chat/completions", json=body), 400, param, *words)
