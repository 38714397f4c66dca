"""Formats answers like OpenAI, complete or in chunks.

In addition to OpenAI's fields there are `reuse` (the reuse report), `ttft_s` (without queueing), `documents` (the
passages of the prompt) and, if requested, `trace`: on the answer, or on the last chunk of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ccjax.engine import Choice, Delta, Response, TokenLogprob
from ccjax.types import Document

Kind = Literal["chat", "completion"]
DONE = "data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot represent


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


class Formatter:
    """Formats the answers to one request; `kind` selects chat or plain completion."""

    def __init__(
        self,
        kind: Kind,
        *,
        id: str,
        model: str,
        created: int,
        documents: Sequence[Document],
    ) -> None:
        self._kind: Kind = kind
        self._documents = documents
        self._base = {"id": id, "created": created, "model": model}
        self._text_offsets: dict[int, int] = {}
        self._trace: dict[str, Any] = {}

    def add_trace(self, trace: dict[str, Any]) -> None:
        """Sets extra fields for the response; call it before the response is formatted."""
        self._trace = {"trace": trace}

    def answer(self, response: Response) -> dict[str, Any]:
        """The body with all answers."""
        choices = [self._choice(index, choice) for index, choice in enumerate(response.choices)]
        return self._object("chat.completion", choices) | {"usage": usage(response)} | self._extra(response)

    def chunks(self, delta: Delta, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks of one delta: text, then the finish reason, then usage if requested."""
        index = delta.index
        null_usage: dict[str, Any] = {"usage": None} if include_usage else {}
        if index not in self._text_offsets:
            self._text_offsets[index] = 0
            if self._kind == "chat":
                yield self._chunk(index, {"role": "assistant", "content": ""}, None, None) | null_usage
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
            yield self._chunk(index, {"content": delta.text}, logprobs, None) | null_usage
        if delta.finish_reason is None:
            return
        last, response = self._chunk(index, {}, None, delta.finish_reason), delta.response
        if response is not None and include_usage:
            yield last | null_usage
            last = self._object("chat.completion.chunk", []) | {"usage": usage(response)}
        elif response is None:
            last |= null_usage
        yield last if response is None else last | self._extra(response)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shaped: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        if self._kind == "chat":
            shaped["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            shaped["text"] = choice.text
        shaped["logprobs"] = None if choice.logprobs is None else self._logprobs(index, choice.logprobs)
        return shaped

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._kind == "chat":
            choice["delta"] = content
        else:
            choice["text"] = content.get("content", "")
        return self._object("chat.completion.chunk", [choice])

    def _object(self, chat_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = chat_name if self._kind == "chat" else "text_completion"
        return {**self._base, "object": name, "choices": choices}

    def _extra(self, response: Response) -> dict[str, Any]:
        passages = [
            {"id": passage.id, "title": passage.title, "version": passage.version, "score": passage.score}
            for passage in self._documents
        ]
        return {"reuse": response.reuse.to_json(), "ttft_s": response.ttft_s, "documents": passages} | self._trace

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._kind == "chat":
            return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}
        offsets, offset = [], self._text_offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._text_offsets[index] = offset
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            # Two tokens may have the same text (half a character each, say); the likelier one comes first and is kept.
            "top_logprobs": [
                {text: _finite(logprob) for _, text, logprob in reversed(token.top)} or None for token in tokens
            ],
            "text_offset": offsets,
        }


def usage(response: Response) -> dict[str, Any]:
    """OpenAI's usage over all answers; tokens whose stored KV was reused unchanged count as cached. Besides, SGLang's
    `cached_tokens_details`: the same tokens by tier."""
    num_answer_tokens = response.num_answer_tokens
    tiers = dict.fromkeys(("device", "host", "storage"), 0)
    for part in response.reuse.per_document:
        if part.tier is not None:
            tiers[part.tier if part.tier in tiers else "storage"] += part.reused_tokens
    return {
        "prompt_tokens": response.num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": response.num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": response.reuse.reused_tokens, "cached_tokens_details": tiers},
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [_text_logprob(text, logprob) for _, text, logprob in token.top]
    return {**_text_logprob(token.text, token.logprob), "top_logprobs": top}


def _text_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
