"""Formats answers like OpenAI, complete or in chunks.

In addition to OpenAI's fields there are `reuse` (the reuse report), `ttft_s` (without queueing), `documents` (the
passages of the prompt) and, if requested, `trace`: on the answer, or on the last chunk of a stream.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ccjax.engine import Choice, Delta, Response, TokenLogprob
from ccjax.server.errors import ApiError
from ccjax.server.tool_use import ToolUse
from ccjax.text import CallForm, CallParser, read_calls
from ccjax.types import Document

Kind = Literal["chat", "completion"]
DONE = "data: [DONE]\n\n"
COMMENT = ": no token yet\n\n"
"""What clients ignore and proxies see."""
_LOWEST_LOGPROB = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot represent


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


class Formatter:
    """Formats the answers to one request; `kind` selects chat or plain completion, `tool_use` and `call_form` say which
    calls of tools are looked for in a chat's."""

    done = DONE
    """The end of a stream."""

    def __init__(
        self,
        kind: Kind,
        *,
        id: str,
        model: str,
        created: int,
        documents: Sequence[Document],
        tool_use: ToolUse | None = None,
        call_form: CallForm = "hermes",
        echoes: Sequence[str] = ("",),
        echoes_logprobs: bool = False,
        has_answer: bool = True,
        num_answers: int = 1,
    ) -> None:
        """
        Args:
          echoes: the text before the answers to each prompt, each of which has `num_answers`.
          echoes_logprobs: log-probabilities of an answer follow those of its prompt.
          has_answer: false to leave out the answers.
        """
        self._kind: Kind = kind
        self._documents = documents
        self._echoes, self._num_answers = echoes, num_answers
        self._echoes_logprobs, self._has_answer = echoes_logprobs, has_answer
        self._base = {"id": id, "created": created, "model": model}
        self._tool_use = tool_use
        self._call_form: CallForm = call_form if tool_use is None else tool_use.form(call_form)
        self._parsers: dict[int, CallParser] = {}
        self._offsets: dict[int, _Offsets] = {}
        self._trace: dict[str, Any] = {}

    def add_trace(self, trace: dict[str, Any]) -> None:
        """Sets extra fields for the response; call it before the response is formatted."""
        self._trace = {"trace": trace}

    def answer(self, response: Response) -> dict[str, Any]:
        """The body with all answers."""
        response = self._told(response)
        choices = [self._choice(index, choice) for index, choice in enumerate(response.choices)]
        whole = self._object("chat.completion", choices) | {"usage": usage(response)} | self._extra(response)
        if self._kind == "chat" and response.prompt_logprobs is not None:
            whole["prompt_logprobs"] = _prompt_logprobs(response.prompt_logprobs)
        return whole

    def chunks(self, delta: Delta, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks of one delta: text, then the finish reason, then usage if requested."""
        if delta.response is not None:
            delta = dataclasses.replace(delta, response=self._told(delta.response))
        if not self._has_answer:
            reason = None if delta.finish_reason is None else "length"
            delta = dataclasses.replace(delta, text="", logprobs=(), finish_reason=reason, stop_reason=None)
        index = delta.index
        null_usage: dict[str, Any] = {"usage": None} if include_usage else {}
        if index not in self._offsets:
            self._offsets[index] = _Offsets()
            first = self._first_chunk(delta)
            if first is not None:
                yield first | null_usage
        contents, reason = self._divided(delta)
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        if logprobs is not None and "content" not in (contents or [{}])[0]:
            contents.insert(0, {"content": ""})
        for content in contents:
            yield self._chunk(index, content, logprobs, None) | null_usage
            logprobs = None
        if delta.finish_reason is None:
            return
        last, response = self._chunk(index, {}, None, reason, delta.stop_reason), delta.response
        if response is not None and include_usage:
            yield last | null_usage
            last = self._object("chat.completion.chunk", []) | {"usage": usage(response)}
        elif response is None:
            last |= null_usage
        yield last if response is None else last | self._extra(response)

    def event(self, value: dict[str, Any]) -> str:
        """One server-sent event."""
        return event(value)

    def failure(self, refusal: ApiError) -> dict[str, Any]:
        """The last event of a stream that ends with an error."""
        return refusal.body()

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shaped: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        shaped["stop_reason"] = choice.stop_reason
        if self._kind == "chat":
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            if self._tool_use is not None:
                use, form = self._tool_use, self._call_form
                text, calls = read_calls(choice.text, use.parser(form))
                message |= {"content": text or None} | use.message(calls, form) if calls else {}
                shaped["finish_reason"] = self._reason(choice.finish_reason, len(calls))
            shaped["message"] = message
        else:
            shaped["text"] = self._echo(index) + choice.text
        told = choice.logprobs
        if choice.prompt_logprobs is not None:
            if self._kind == "completion":
                shaped["prompt_logprobs"] = _prompt_logprobs(choice.prompt_logprobs)
            if self._echoes_logprobs:
                told = choice.prompt_logprobs + (told or ())
        shaped["logprobs"] = None if told is None else self._logprobs(index, told)
        return shaped

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._num_answers]

    def _told(self, response: Response) -> Response:
        """The response, without the answers if these are left out."""
        if self._has_answer:
            return response

        def without(choice: Choice) -> Choice:
            kept = None if choice.logprobs is None else ()
            ended = {"finish_reason": "length", "stop_reason": None}
            return dataclasses.replace(choice, text="", token_ids=(), logprobs=kept, **ended)

        first, *others = map(without, response.choices)
        names = ("text", "token_ids", "finish_reason", "logprobs", "stop_reason")
        told = {name: getattr(first, name) for name in names}
        return dataclasses.replace(response, **told, others=tuple(others))

    def _divided(self, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """Text and calls of a delta in their order, and its finish reason."""
        use = self._tool_use
        if use is None:
            return [{"content": delta.text}] if delta.text else [], delta.finish_reason
        if delta.index not in self._parsers:
            self._parsers[delta.index] = use.parser(self._call_form)
        parser, contents = self._parsers[delta.index], list[dict[str, Any]]()
        pieces = parser.in_order(delta.text, is_last=delta.finish_reason is not None)
        for _, group in itertools.groupby(pieces, lambda piece: isinstance(piece, str)):
            some = list(group)
            if calls := [piece for piece in some if not isinstance(piece, str)]:
                contents += use.deltas(calls, self._call_form)
            elif text := "".join(piece for piece in some if isinstance(piece, str)):
                contents.append({"content": text})
        return contents, self._reason(delta.finish_reason, parser.num_calls)

    def _reason(self, reason: str | None, num_calls: int) -> str | None:
        if reason != "stop" or not num_calls or self._tool_use is None:
            return reason
        return "function_call" if self._tool_use.is_older else "tool_calls"

    def _first_chunk(self, delta: Delta) -> dict[str, Any] | None:
        """What stands before the first token: a role, the echo, log-probabilities of the prompt; None for nothing."""
        told = delta.prompt_logprobs
        shown = {} if told is None else {"prompt_logprobs": _prompt_logprobs(told)}
        if self._kind == "chat":
            return self._chunk(delta.index, {"role": "assistant", "content": ""}, None, None) | shown
        echo = self._echo(delta.index)
        if not echo and told is None:
            return None
        logprobs = self._logprobs(delta.index, told) if told is not None and self._echoes_logprobs else None
        chunk = self._chunk(delta.index, {"content": echo}, logprobs, None)
        chunk["choices"][0] |= shown
        return chunk

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: Any,
        finish_reason: str | None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        choice["stop_reason"] = stop_reason
        if self._kind == "chat":
            choice["delta"] = content
        else:
            choice["text"] = content.get("content", "")
        return self._object("chat.completion.chunk", [choice])

    def _object(self, chat_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = chat_name if self._kind == "chat" else "text_completion"
        return {**self._base, "object": name, "choices": choices}

    def _extra(self, response: Response) -> dict[str, Any]:
        told = {"reuse": response.reuse.to_json(), "ttft_s": response.ttft_s}
        return told | {"documents": [_source(document) for document in self._documents]} | self._trace

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._kind == "chat":
            return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}
        offsets = self._offsets.setdefault(index, _Offsets())
        return {
            "tokens": [_shown(token.token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_by_text(token.top) or None for token in tokens],
            "text_offset": [offsets.before(token) for token in tokens],
        }


def _source(document: Document) -> dict[str, Any]:
    """A passage of the prompt; `path` is its file below the documents directory, `heading` the headings that it stands
    below in its document. Passages from a request have neither."""
    title, heading = document.title, None
    if title and document.source_id is not None:  # the passage's first line is `title > heading > heading`
        first, _, _ = document.text.partition("\n")
        heading = first.removeprefix(f"{title} > ").strip() if first.startswith(f"{title} > ") else None
    return {
        "id": document.id,
        "path": document.source_id,
        "title": title,
        "heading": heading or None,
        "version": document.version,
        "score": document.score,
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


class _Offsets:
    """The place of each token in the text of an answer, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def before(self, token: TokenLogprob) -> int:
        """Number of whole characters before the next token."""
        offset = self._offset
        if token.is_shown:
            self._offset += len(self._decoder.decode(token.token))
        return offset


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [_token_logprob(data, logprob) for _, data, logprob in token.top]
    return {**_token_logprob(token.token, token.logprob), "top_logprobs": top}


def _token_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _shown(token), "logprob": _finite(logprob), "bytes": list(token)}


def _by_text(top: Sequence[tuple[int, bytes, float]]) -> dict[str, float | None]:
    """Log-probabilities by text; of two tokens with the same text, the less likely one is named by its id."""
    found: dict[str, float | None] = {}
    for token_id, token, logprob in top:
        text = _shown(token)
        found[f"token_id:{token_id}" if text in found else text] = _finite(logprob)
    return found


def _shown(token: bytes) -> str:
    """The text of a token; a part of a character is written as OpenAI does, `bytes:\\xe2\\x80`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _prompt_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, for each token; null for the first one."""
    found: list[dict[str, Any] | None] = [None]
    for token in tokens[1:]:
        top = [(token.rank, token.token_id, token.token, token.logprob)]
        top += [(rank + 1, *other) for rank, other in enumerate(token.top)]
        found.append(
            {
                str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _shown(data)}
                for rank, token_id, data, logprob in reversed(top)
            }
        )
    return found


def _finite(logprob: float) -> float | None:
    """As JSON can have it; null for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else max(logprob, _LOWEST_LOGPROB)
