"""The prompt of a request as the cache sees it: segments of token ids, each a chunk with an id of its own."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ccjax.policy.settings import PromptChunk
from ccjax.types import (
    REUSED_ANYWHERE,
    Chunk,
    ChunkId,
    ChunkSlice,
    Document,
    Segment,
    SegmentRole,
    leading_instructions,
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The segments of one prompt, in order: at least one, only the last of which may be a question.

    Attributes:
      early_question: first and last (exclusive) token of a question that stands before the passages of its message.
    """

    segments: tuple[Segment, ...]
    max_new_tokens: int
    early_question: tuple[int, int] = (0, 0)

    @classmethod
    def of_chunks(cls, segments: Sequence[Segment]) -> Prompt:
        """A prompt to compute the KV of these segments. One token stands for the question, which every prefill ends
        with."""
        last = segments[-1].chunk.token_ids[-1:]
        return cls((*segments, Segment("question", Chunk(chunk_id(last), last))), 1)

    @functools.cached_property
    def cached(self) -> tuple[Segment, ...]:
        """The segments that are stored and reused: all but a question."""
        return tuple(segment for segment in self.segments if segment.role != "question")

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of `cached`."""
        return tuple(segment.chunk for segment in self.cached)

    @property
    def passages(self) -> tuple[Chunk, ...]:
        """The chunks that are reused in any context."""
        return tuple(segment.chunk for segment in self.segments if segment.role in REUSED_ANYWHERE)

    @property
    def documents(self) -> tuple[Segment, ...]:
        """The passages that are documents of the request, not parts of its messages."""
        return tuple(segment for segment in self.segments if segment.chunk.text is not None)

    @property
    def instructions(self) -> tuple[Segment, ...]:
        """The instructions that the prompt begins with."""
        return self.segments[: leading_instructions(segment.role for segment in self.segments)]

    @property
    def question(self) -> tuple[int, ...]:
        """Token ids of the last segment, which is always computed."""
        return self.segments[-1].chunk.token_ids

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt in tokens."""
        return sum(len(segment.chunk.token_ids) for segment in self.segments)

    @property
    def token_ids(self) -> np.ndarray:
        """The whole prompt [n], int32."""
        return np.asarray([token for segment in self.segments for token in segment.chunk.token_ids], np.int32)

    def behind(self, slices: Iterable[tuple[SegmentRole, ChunkSlice, int]]) -> Prompt:
        """The prompt with its first tokens cut differently: role, stored chunk and number of tokens of each slice that
        it begins with. What the segment in which the last one ends has left is text, unless it is the question."""
        ids, tenant, start = self.token_ids, tenant_of(self.segments[0].chunk.chunk_id), 0
        segments: list[Segment] = []
        for role, source, num_tokens in slices:
            part = tuple(ids[start : start + num_tokens].tolist())
            segments.append(Segment(role, as_chunk(part, None, tenant), source=source))
            start += num_tokens
        begin = 0
        for segment in self.segments:
            num_left = begin + len(segment.chunk.token_ids) - start
            begin += len(segment.chunk.token_ids)
            if num_left >= len(segment.chunk.token_ids):
                segments.append(segment)
            elif num_left > 0:
                cut = len(segment.chunk.token_ids) - num_left
                role = "question" if segment.role == "question" else "text"
                borders = tuple(border - cut for border in segment.borders if border >= cut)
                segments.append(Segment(role, as_chunk(segment.chunk.token_ids[cut:], None, tenant), borders))
        return dataclasses.replace(self, segments=tuple(segments))

    def extended(self, token_ids: Sequence[int]) -> Prompt:
        """The prompt with these tokens at the end of its last segment, and an answer of one token."""
        *before, last = self.segments
        ids = (*last.chunk.token_ids, *token_ids)
        segments = (*before, Segment(last.role, Chunk(chunk_id(ids), ids)))
        return dataclasses.replace(self, segments=segments, max_new_tokens=1)

    @property
    def planned_chunks(self) -> list[PromptChunk]:
        """The segments as input of the policy."""
        return [
            PromptChunk(segment.chunk.chunk_id, len(segment.chunk.token_ids), segment.role, segment.source)
            for segment in self.segments
        ]

    @functools.cached_property
    def stored_ids(self) -> frozenset[ChunkId]:
        """The chunks whose stored KV the prompt can reuse: its own, and those that its segments are slices of."""
        sources = (segment.source.chunk_id for segment in self.cached if segment.source is not None)
        return frozenset((*(chunk.chunk_id for chunk in self.chunks), *sources))


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
