"""Many users at once, over the socket and with OpenAI's own client: every answer is that of the same request on an idle
server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.server import patience
from tests.server.conftest import DOCUMENTS, Server

if TYPE_CHECKING:
    import openai

NUM_CHATS = 32
NAMES = tuple(name.removesuffix(".md").capitalize() for name in DOCUMENTS)


def chat(number: int) -> dict[str, Any]:
    """A chat of its own: question, order and number of passages, reuse, length, greedy or sampled with a seed."""
    name = NAMES[number % len(NAMES)]
    texts = list(DOCUMENTS.values())
    texts = texts[number % 5 :] + texts[: number % 5]
    passages = [{"id": f"p{number % 3}", "text": f"Page {number % 3}. {text}"} for text in texts[: 1 + number % 3]]
    drawing = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    return {
        "messages": [{"role": "user", "content": f"What does {name} do on day {number}?"}],
        "max_tokens": 6 + number % 7,
        "extra_body": {"documents": passages, "reuse": ("off", "exact")[number // 2 % 2], "ignore_eos": True},
        **drawing,
    }


async def answered(
    client: openai.AsyncOpenAI, request: dict[str, Any], *, stream: bool = True
) -> tuple[str, str | None, int, int]:
    """Text, finish reason, prompt tokens and answer tokens of a chat."""
    if not stream:
        whole = await client.chat.completions.create(model="tiny", **request)
        (choice,) = whole.choices
        return choice.message.content, choice.finish_reason, whole.usage.prompt_tokens, whole.usage.completion_tokens
    text, reason, usage = "", None, None
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(model="tiny", **request, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    assert usage is not None
    return text, reason, usage.prompt_tokens, usage.completion_tokens


def test_32_concurrent_chats_get_the_same_answers_as_alone(server: Server) -> None:
    """Alone all are streamed, together every third is not."""
    requests = [chat(number) for number in range(NUM_CHATS)]

    async def ask() -> tuple[list[Any], list[Any]]:
        import openai

        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            alone = [await answered(client, request) for request in requests]
            asked = [answered(client, request, stream=bool(number % 3)) for number, request in enumerate(requests)]
            together = await asyncio.gather(*reversed(asked))
        return alone, together[::-1]

    alone, together = asyncio.run(ask())
    assert together == alone
    assert len({answer[0] for answer in alone}) > NUM_CHATS - 4, "answers must differ, or a mix-up would not show"
    for request, (_, reason, _, num_tokens) in zip(requests, together, strict=True):
        assert (reason, num_tokens) == ("length", request["max_tokens"])
    assert patience.get(f"{server.url}/ready").status_code == 200
