"""Several answers to one prompt (`n`), requested by OpenAI's own client, whole and streamed."""

from __future__ import annotations

import ast
import asyncio
import codecs
import collections
from typing import TYPE_CHECKING, Any

import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.runner.sampling import seed_of
from tests.polling import wait_until
from tests.server.conftest import Server
from tests.server.test_nearly import nearly_equal
from tests.server.test_traffic import metrics

if TYPE_CHECKING:
    import openai

QUESTION: list[Any] = [{"role": "user", "content": "Who lives in Paris?"}]
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 11, "extra_body": {"retrieval": False, "reuse": "off"}}


def chat(client: openai.OpenAI, n: int | None, **more: Any) -> Any:
    fields = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, **DRAWN, **more}
    return client.chat.completions.create(model="tiny", messages=QUESTION, n=n, **fields)


def complete(client: openai.OpenAI, n: int, **more: Any) -> Any:
    fields = {"max_tokens": 12, "logprobs": 2, **DRAWN, **more}
    return client.completions.create(model="tiny", prompt="Bob works", n=n, **fields)


def test_a_chat_has_the_requested_number_of_choices(server: Server, client: openai.OpenAI) -> None:
    answer = chat(client, 3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        sampling = SamplingParams(max_new_tokens=12, temperature=1.5, seed=seed_of(11, choice.index), logprobs=2)
        wanted = server.engine.run(Request(messages=QUESTION, sampling=sampling, reuse="off"))
        assert (choice.message.content, choice.finish_reason) == (wanted.text, wanted.finish_reason)
        assert [bytes(token.bytes) for token in choice.logprobs.content] == [token.token for token in wanted.logprobs]
    assert len({choice.message.content for choice in answer.choices}) == 3
    alone = chat(client, 1)
    assert alone.choices[0].message.content == answer.choices[0].message.content
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_greedy_choices_are_equal_and_null_n_means_one(client: openai.OpenAI) -> None:
    answer = chat(client, 4, temperature=0)
    assert len(answer.choices) == 4
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert len(chat(client, None).choices) == 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream_pieces_join_to_all_choices(client: openai.OpenAI, include_usage: bool) -> None:
    whole = chat(client, 3)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(chat(client, 3, stream=True, **options))
    texts, reasons = collections.defaultdict(str), {}
    logprobs, roles = collections.defaultdict(list), collections.Counter()
    order = []
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in reasons, "a chunk behind the last one of its choice"
            order.append(choice.index)
            roles[choice.index] += choice.delta.role == "assistant"
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert nearly_equal(logprobs[choice.index], choice.logprobs.content)
    assert roles == {0: 1, 1: 1, 2: 1}
    assert order != sorted(order), "the choices are streamed side by side, not one after the other"
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks[-1]
    assert last.ttft_s > 0 and last.reuse["prompt_tokens"] == whole.usage.prompt_tokens
    assert not any(hasattr(chunk, "reuse") for chunk in chunks[:-1])
    if include_usage:
        assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        assert last.usage.prompt_tokens_details.cached_tokens == 0
    else:
        assert last.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks[: -1 if include_usage else None])


def bytes_of(token: str) -> bytes:
    """The bytes of a token, which OpenAI writes as `bytes:\\xe2` where they are a part of a character."""
    return ast.literal_eval(f"b'{token[6:]}'") if token.startswith("bytes:") else token.encode()


def whole_characters(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def test_each_completion_choice_has_its_own_text_offsets(server: Server, client: openai.OpenAI) -> None:
    whole = complete(client, 3)
    sampling = SamplingParams(max_new_tokens=12, temperature=1.5, seed=seed_of(11, 0))
    request = Request(prompt="Bob works", sampling=sampling, reuse="off")
    assert whole.choices[0].text == server.engine.run(request).text and whole.documents == []
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.text for choice in whole.choices}) == 3
    for choice in whole.choices:
        tokens = [bytes_of(token) for token in choice.logprobs.tokens]
        before = [b"".join(tokens[:number]) for number in range(len(tokens))]
        assert choice.logprobs.text_offset == [len(whole_characters(data)) for data in before]
        assert b"".join(tokens).decode(errors="replace") == choice.text
        for found in choice.logprobs.top_logprobs:
            assert len(found) == 2  # none hides another
    parts = collections.defaultdict(list)
    for chunk in complete(client, 3, stream=True):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    for choice in whole.choices:
        assert "".join(part.text for part in parts[choice.index]) == choice.text
        told = [part.logprobs for part in parts[choice.index] if part.logprobs]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in told for value in getattr(part, field)]
            assert nearly_equal(joined, getattr(choice.logprobs, field))
        assert [part.finish_reason for part in parts[choice.index]][-1] == choice.finish_reason


def test_metrics_count_every_answer_and_the_prompt_once(server: Server, client: openai.OpenAI) -> None:
    before = metrics(server)
    answer = chat(client, 3, temperature=0, extra_body=DRAWN["extra_body"] | {"ignore_eos": True})
    after = metrics(server)

    def moved(*key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert moved("ccjax_request_success_total", "length") == 3
    assert moved("ccjax_generation_tokens_total") == 36 == answer.usage.completion_tokens
    assert moved("ccjax_prompt_tokens_total") == answer.usage.prompt_tokens


def test_client_disconnect_cancels_all_choices(server: Server) -> None:
    async def ask() -> None:
        import openai

        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            body = {"retrieval": False, "ignore_eos": True}
            stream = await client.chat.completions.create(
                model="tiny", messages=QUESTION, n=5, max_tokens=300, stream=True, extra_body=body
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].index == 4:
                    break
            await stream.close()

    asyncio.run(ask())
    with server.engine._loop.exclusive():
        pass
    wait_until(lambda: not len(server.engine._loop._sequences), timeout_s=60)
    assert not server.engine._loop._sequences.pages.shared
