"""Splits a request into segments: token ids of instructions, passages, other text and the question, cut to the context
length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from ccjax.errors import ContextLengthError, RequestError
from ccjax.prompts import Prompt, as_chunk, tenant_of, tenant_tag
from ccjax.requests import Request
from ccjax.text import PromptBuilder, PromptParts
from ccjax.text.prompt import LEAST_BLOCK
from ccjax.types import ChunkSlice, KnownSlice, Segment, SegmentRole

_SHORT_ANSWER = 128
_ROLES = tuple(role for role in get_args(SegmentRole) if role != "answer")
"""Roles of the segments of a request."""

FindKnown = Callable[[Sequence[int], str], Sequence[KnownSlice]]
"""From token ids and a tenant's tag: the runs of them that stored passages of the tenant have, ascending."""
_Passage = tuple[int, int, ChunkSlice | None]
"""First and last token (exclusive), and where they are stored; None if only as a chunk of their own, if at all."""


def assemble(
    request: Request,
    builder: PromptBuilder | None,
    *,
    max_model_len: int,
    vocab_size: int,
    answer: bool = True,
    find_known: FindKnown | None = None,
) -> Prompt:
    """The prompt of a request; passages are dropped to make it fit only if the request allows it.

    Without `max_new_tokens` the answer may use the rest of the context, at least one token; if passages may be dropped,
    room for a short answer is kept. Without `answer` the prompt may fill the whole context.

    Args:
      find_known: finds text of stored passages in messages or a plain prompt, where no border need be around it. Not
        asked in mode `exact`, where only the very same prompt is reused, however much is stored by then.

    Raises:
      RequestError: a part of the request is empty, of the wrong type or outside the vocabulary.
      ContextLengthError: prompt and answer exceed `max_model_len`.
    """
    early_question = (0, 0)
    if request.segments is not None:
        segments = _from_segments(request.segments, vocab_size, tenant_tag(request.cache_salt))
        droppable = range(len(segments))
    else:
        find = find_known if request.reuse in ("bounded", "fast") else None
        if builder is not None and request.truncate_prompt_tokens is None:
            _check_length(request, builder, max_model_len)
        segments, droppable, early_question = _from_text(request, builder, tenant_tag(request.cache_salt), find)
    wanted = request.sampling.max_new_tokens if answer else 0
    if wanted is not None and wanted >= max_model_len:  # whatever the prompt is
        message = f"wanted fewer than {max_model_len} tokens (max_model_len), prompt included, got {wanted}"
        raise ContextLengthError("max_new_tokens", message)
    reserve = 1 if wanted is None else wanted
    if request.truncate_prompt_tokens is not None:
        kept = request.truncate_prompt_tokens if request.truncate_prompt_tokens > 0 else max_model_len - reserve
        cut = sum(len(segment.chunk.token_ids) for segment in segments) - kept
        if cut > 0:
            segments, droppable, early_question = _without_first(segments, cut), range(0), (0, 0)
    total = sum(len(segment.chunk.token_ids) for segment in segments)
    if request.truncate:
        room, first = wanted if wanted is not None else min(_SHORT_ANSWER, max_model_len // 4), 0
        for number in reversed(droppable):
            if total + room > max_model_len and segments[number].role == "passage":
                first = len(segments.pop(number).chunk.token_ids)
                total -= first
                droppable = droppable[:-1]
        # Passages that were found (with a score) may all be left out, but not all those that a client sent.
        is_sent = all(document.score is None for document in request.documents)
        if request.documents and not droppable and is_sent and total + room <= max_model_len:
            raise ContextLengthError(
                "documents",
                f"wanted at least one that fits into {max_model_len} tokens (max_model_len) with the other "
                f"{total} and {room} for the answer, got {len(request.documents)}, the first of {first} tokens",
            )
    if total + reserve > max_model_len:
        kept = (segments[number] for number in droppable)
        lengths = [len(segment.chunk.token_ids) for segment in kept if segment.role == "passage"]
        if total - sum(lengths) + reserve > max_model_len:  # nor would it fit without them
            lengths = []
        passages = (
            f"; {len(lengths)} documents, the longest of {max(lengths, default=0)} tokens: send less or set truncate"
        )
        raise ContextLengthError(
            "prompt",
            f"wanted at most {max_model_len} tokens (max_model_len) with the answer, got {total} prompt tokens and "
            f"{reserve} for the answer{passages if lengths else ''}",
        )
    return Prompt(tuple(segments), wanted if wanted is not None else max_model_len - total, early_question)


def _without_first(segments: Sequence[Segment], num_tokens: int) -> list[Segment]:
    """The segments without the first tokens; what is left of one that is cut is text, unless it is the question."""
    found: list[Segment] = []
    for segment in segments:
        ids, cut = segment.chunk.token_ids, min(num_tokens, len(segment.chunk.token_ids))
        num_tokens -= cut
        if cut == 0:
            found.append(segment)
        elif cut < len(ids):
            role: SegmentRole = "question" if segment.role == "question" else "text"
            found.append(Segment(role, as_chunk(ids[cut:], None, tenant_of(segment.chunk.chunk_id))))
    return found


def _check_length(request: Request, builder: PromptBuilder, max_model_len: int) -> None:
    """Raises ContextLengthError if the texts are too long however they are tokenized, which may take long."""
    contents: list[Any] = [request.prompt]
    for message in request.messages if isinstance(request.messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        contents += content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in contents]
    documents = [] if request.truncate else [document.text for document in request.documents]
    argument = "prompt" if request.messages is None else "messages"
    for name, given in ((argument, texts), ("documents", documents), ("tools", list(request.tools))):
        least = builder.least_tokens(given)
        if least > max_model_len:
            message = f"wanted at most {max_model_len} tokens (max_model_len), got at least {least}"
            if name == "documents":
                message += f" in {len(documents)} documents: send less or set truncate"
            raise ContextLengthError(name, message)


def _from_text(
    request: Request, builder: PromptBuilder | None, tenant: str, find: FindKnown | None
) -> tuple[list[Segment], range, tuple[int, int]]:
    """The segments, the numbers of those that may be left out (the documents, nothing that a message says), and where
    the question is if it stands before passages."""
    if builder is None:
        raise RequestError("model", "wanted a model with tokenizer files for text; this one takes token ids only")
    try:
        if request.messages is not None:
            parts = builder.build_chat(request.messages, request.documents, request.tools, request.rendering)
        else:
            assert request.prompt is not None
            if not request.prompt.strip():
                raise RequestError("prompt", "wanted a non-empty text")
            parts = builder.build_completion(request.prompt, request.documents)
    except RequestError:
        raise
    except ValueError as error:
        argument, _, message = str(error).partition(": ")
        raise RequestError(argument, message) from error
    documents = [
        Segment("passage", as_chunk(ids, document, tenant))
        for ids, document in zip(parts.documents, request.documents, strict=True)
    ]
    # The last token is always computed. Before documents the system prompt is left as it is.
    first = len(parts.system) if documents else parts.num_opening
    runs = find((parts.system + parts.question)[first:-1], tenant) if find is not None else ()
    passages, early_question = _asking(builder, parts, _passages(runs, first, parts.blocks))
    return *_cut(parts, passages, documents, tenant), early_question


def _passages(runs: Sequence[KnownSlice], first: int, blocks: Sequence[tuple[int, int]]) -> list[_Passage]:
    """The passages of a prompt, ascending: runs of known text, counted from token `first`, and what these leave of
    blocks."""
    found: list[_Passage] = [(first + run.start, first + run.end, run.source) for run in runs]
    ends = [0, *(end for _, end, _ in found)]
    starts = [*(start for start, _, _ in found), max((end for _, end in blocks), default=0)]
    for start, end in blocks:
        between = ((max(start, left), min(end, right)) for left, right in zip(ends, starts, strict=True))
        found += [(left, right, None) for left, right in between if right - left >= LEAST_BLOCK]
    return sorted(found, key=lambda passage: passage[:2])


def _asking(
    builder: PromptBuilder, parts: PromptParts, passages: list[_Passage]
) -> tuple[list[_Passage], tuple[int, int]]:
    """The passages, and where the question is if it stands before those of the last message; (0, 0) if it follows. A
    message that says nothing besides is the question as a whole."""
    ids, (start, end) = parts.system + parts.question, parts.asking
    own = [passage for passage in passages if start < passage[1] <= end]
    # Without its first and last word, which are no part of the passages.
    if not own or builder.says_more_than(1, ids[own[-1][1] : end]):
        return passages, (0, 0)
    before = start, max(start, own[0][0])
    if builder.says_more_than(2, ids[slice(*before)]):
        return passages, before
    return [passage for passage in passages if passage not in own], (0, 0)


def _cut(
    parts: PromptParts, passages: Sequence[_Passage], documents: Sequence[Segment], tenant: str
) -> tuple[list[Segment], range]:
    """The segments of a prompt, and the numbers of the documents. Where a content has passages before the documents, or
    any without documents, only what every prompt begins with are instructions, so that a date in the system prompt,
    say, does not decide what passages are prepared behind."""
    ids, num_system = parts.system + parts.question, len(parts.system)
    in_system = [passage for passage in passages if passage[0] < num_system] if documents else passages
    segments: list[Segment] = []

    def add(role: SegmentRole, start: int, end: int, source: ChunkSlice | None = None) -> int:
        if start < end:
            chunk = as_chunk(ids[start:end], None, tenant)
            is_whole = source is not None and source.chunk_id == chunk.chunk_id
            segments.append(Segment(role, chunk, source=None if is_whole else source))
        return end

    def add_all(last: int, passages: Sequence[_Passage]) -> int:
        for start, end, source in passages:
            add("text", last, start)
            last = add("passage", start, end, source)
        return last

    last = add_all(add("instructions", 0, parts.num_opening if in_system else num_system), in_system)
    if documents:
        last = add("text", last, num_system)
    numbers = range(len(segments), len(segments) + len(documents))
    segments += documents
    last = add_all(last, passages[len(in_system) :])
    borders = tuple(border - last + num_system for border in parts.borders if border >= last - num_system)
    return [*segments, Segment("question", as_chunk(ids[last:], None, tenant), borders)], numbers


def _from_segments(given: Sequence[Any], vocab_size: int, tenant: str) -> list[Segment]:
    """Segments of token ids, or of pairs of a role and token ids. Without roles the first are the instructions, which
    may be empty, the last the question, all others passages."""
    if len(given) < 2 and not (given and _has_role(given[0])):
        raise RequestError("segments", f"wanted at least a system and a question segment, got {len(given)}")
    segments: list[Segment] = []
    for number, segment in enumerate(given):
        name = f"segments[{number}]"
        is_last = number == len(given) - 1
        role: SegmentRole = "question" if is_last else "passage" if number else "instructions"
        if _has_role(segment):
            role, segment = segment
            if role not in _ROLES:
                raise RequestError(name, f"wanted one of {_ROLES} as role, got {role!r}")
            if is_last and role not in ("question", "text"):
                raise RequestError(name, f"wanted a question or text at the end, got role {role!r}")
            if role == "question" and not is_last:
                raise RequestError(name, f"wanted a question only at the end, got one before {len(given) - 1 - number}")
        elif number == 0 and not is_last and isinstance(segment, Sequence | np.ndarray) and len(segment) == 0:
            continue
        segments.append(Segment(role, as_chunk(_token_ids(segment, name, vocab_size), None, tenant)))
    return segments


def _has_role(segment: Any) -> bool:
    return isinstance(segment, Sequence) and len(segment) == 2 and isinstance(segment[0], str)


def _token_ids(segment: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(segment, Sequence | np.ndarray) or isinstance(segment, str | bytes):
        raise RequestError(name, f"wanted a list of token ids, got {segment!r}")
    if len(segment) == 0:
        raise RequestError(name, "wanted at least one token")
    bad = next((t for t in segment if isinstance(t, bool) or not isinstance(t, int | np.integer)), None)
    if bad is not None:
        raise RequestError(name, f"wanted integers, got {bad!r}")
    outside = next((token for token in segment if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(name, f"wanted token ids from 0 to {vocab_size - 1}, got {outside}")
    return tuple(int(token) for token in segment)
