"""Splits a request into segments: token ids of system prompt, passages and question, cut to the context length."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from ccjax.errors import ContextLengthError, RequestError
from ccjax.policy.settings import PromptChunk
from ccjax.requests import Request
from ccjax.text import PromptBuilder
from ccjax.types import Chunk, ChunkId, Document

_SHORT_ANSWER = 128


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Segments of one prompt; `chunks` holds the system prompt (unless it is empty), then the passages."""

    chunks: tuple[Chunk, ...]
    has_system: bool
    question: tuple[int, ...]
    max_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt in tokens."""
        return sum(len(chunk.token_ids) for chunk in self.chunks) + len(self.question)

    @property
    def token_ids(self) -> np.ndarray:
        """The whole prompt [n], int32."""
        ids = [token for chunk in self.chunks for token in chunk.token_ids]
        return np.asarray([*ids, *self.question], np.int32)

    @property
    def planned_chunks(self) -> list[PromptChunk]:
        """The chunks as input of the policy."""
        return [
            PromptChunk(
                chunk_id=chunk.chunk_id,
                num_tokens=len(chunk.token_ids),
                role="system" if self.has_system and number == 0 else "document",
            )
            for number, chunk in enumerate(self.chunks)
        ]


def chunk_id(token_ids: Sequence[int], tenant: str = "") -> ChunkId:
    """sha256 (hex) of the ids as little-endian int32. A tenant's tag is hashed first and appended after `-`."""
    digest = hashlib.sha256(tenant.encode() + np.asarray(token_ids, "<i4").tobytes()).hexdigest()
    return ChunkId(f"{digest}-{tenant}" if tenant else digest)


def tenant_tag(cache_salt: str) -> str:
    """32 hex digits that represent a salt in chunk ids; "" for the salt "". All stored data is keyed by chunk id, so
    requests with another salt cannot find it."""
    return hashlib.sha256(b"ccjax cache_salt\0" + cache_salt.encode()).hexdigest()[:32] if cache_salt else ""


def tenant_of(key: ChunkId) -> str:
    """The tenant tag in a chunk id; "" if it has none."""
    return key.partition("-")[2]


def assemble(
    request: Request, builder: PromptBuilder | None, *, max_model_len: int, vocab_size: int, answer: bool = True
) -> Prompt:
    """The prompt of a request; passages are dropped to make it fit only if the request allows it.

    Without `max_new_tokens` the answer may use the rest of the context, at least one token; if passages may be dropped,
    room for a short answer is kept. Without `answer` the prompt may fill the whole context.

    Raises:
      RequestError: a part of the request is empty, of the wrong type or outside the vocabulary.
      ContextLengthError: prompt and answer exceed `max_model_len`.
    """
    if request.segments is not None:
        system, passages, question = _from_segments(request.segments, vocab_size)
        documents: Sequence[Document | None] = [None] * len(passages)
    else:
        system, passages, question = _from_text(request, builder)
        documents = request.documents
    tenant = tenant_tag(request.cache_salt)
    chunks = [as_chunk(ids, document, tenant) for ids, document in zip(passages, documents, strict=True)]
    head = [as_chunk(system, None, tenant)] if system else []
    fixed = len(system) + len(question)
    wanted = request.sampling.max_new_tokens
    reserve = wanted if wanted is not None else int(answer)
    if request.truncate:
        room = wanted if wanted is not None else min(_SHORT_ANSWER, max_model_len // 4)
        while chunks and fixed + sum(len(chunk.token_ids) for chunk in chunks) + room > max_model_len:
            chunks.pop()
    total = fixed + sum(len(chunk.token_ids) for chunk in chunks)
    if total + reserve > max_model_len:
        longest = max((len(chunk.token_ids) for chunk in chunks), default=0)
        passages = f"; {len(chunks)} documents, the longest of {longest} tokens: send less or set truncate"
        raise ContextLengthError(
            "prompt",
            f"wanted at most {max_model_len} tokens (max_model_len) with the answer, got {total} prompt tokens and "
            f"{reserve} for the answer{passages if chunks else ''}",
        )
    return Prompt((*head, *chunks), bool(system), question, wanted if wanted is not None else max_model_len - total)


def as_chunk(token_ids: tuple[int, ...], document: Document | None, tenant: str = "") -> Chunk:
    """The chunk with these ids and tenant tag, with the fields of its document if that is known."""
    if document is None:
        return Chunk(chunk_id(token_ids, tenant), token_ids)
    return Chunk(
        chunk_id(token_ids, tenant),
        token_ids,
        document.text,
        document.id,
        document.version,
        document.title,
        document.source_id,
    )


_Parts = tuple[tuple[int, ...], Sequence[tuple[int, ...]], tuple[int, ...]]


def _from_text(request: Request, builder: PromptBuilder | None) -> _Parts:
    if builder is None:
        raise RequestError("model", "wanted a model with tokenizer files for text; this one takes token ids only")
    try:
        if request.messages is not None:
            parts = builder.build_chat(request.messages, request.documents)
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
    return parts.system, parts.documents, parts.question


def _from_segments(segments: Sequence[Sequence[int]], vocab_size: int) -> _Parts:
    if len(segments) < 2:
        raise RequestError("segments", f"wanted at least a system and a question segment, got {len(segments)}")
    for number, segment in enumerate(segments):
        if not isinstance(segment, Sequence | np.ndarray) or isinstance(segment, str | bytes):
            raise RequestError(f"segments[{number}]", f"wanted a list of token ids, got {segment!r}")
        if number > 0 and len(segment) == 0:
            raise RequestError(f"segments[{number}]", "wanted at least one token")
        bad = next((t for t in segment if isinstance(t, bool) or not isinstance(t, int | np.integer)), None)
        if bad is not None:
            raise RequestError(f"segments[{number}]", f"wanted integers, got {bad!r}")
        outside = next((token for token in segment if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise RequestError(f"segments[{number}]", f"wanted token ids from 0 to {vocab_size - 1}, got {outside}")
    system, *passages, question = (tuple(int(token) for token in segment) for segment in segments)
    return system, passages, question
