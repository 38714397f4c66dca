"""Tells why parts of a prompt were computed and not reused."""

from __future__ import annotations

import dataclasses
from collections.abc import KeysView

from ccjax.policy.capture import LEAST_TEXT
from ccjax.types import REUSED_ANYWHERE, ChunkId, ComputeCause, PlannedSegment, PrefillPlan, ReuseMode

_MOST_EVICTED = 10_000


class EvictedChunks:
    """The chunks of which a variant was evicted lately, or refused for want of space, whether or not they have others:
    at most some 2 MB."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkId, None] = {}

    @property
    def ids(self) -> KeysView[ChunkId]:
        """Their ids, the latest last."""
        return self._chunks.keys()

    def note(self, chunk_id: ChunkId) -> None:
        """Adds a chunk, and forgets the earliest one if there are too many."""
        self._chunks.pop(chunk_id, None)
        self._chunks[chunk_id] = None
        if len(self._chunks) > _MOST_EVICTED:
            del self._chunks[next(iter(self._chunks))]


@dataclasses.dataclass(frozen=True)
class KnownChunks:
    """The chunks of a prompt when it was planned, by what was known of their KV.

    Attributes:
      stored: those that have KV behind some text.
      usable: those with KV that the prompt may use, `given_up` included.
      evicted: those whose KV was evicted, or not stored, for want of space.
      given_up: those with KV whose loading would have taken longer than computing.
      failed: those with KV that was planned and could not be read.
      edited: those behind a slice of a stored chunk that goes on otherwise.
    """

    stored: frozenset[ChunkId] = frozenset()
    usable: frozenset[ChunkId] = frozenset()
    evicted: frozenset[ChunkId] = frozenset()
    given_up: frozenset[ChunkId] = frozenset()
    failed: frozenset[ChunkId] = frozenset()
    edited: frozenset[ChunkId] = frozenset()


def causes_of(plan: PrefillPlan, mode: ReuseMode, known: KnownChunks) -> tuple[ComputeCause | None, ...]:
    """Why each segment is computed; None for those that are reused. The last one always is."""
    return (*(_cause(segment, mode, known) for segment in plan.segments[:-1]), "question")


def _cause(segment: PlannedSegment, mode: ReuseMode, known: KnownChunks) -> ComputeCause | None:
    chunk = segment.chunk_id
    if segment.action == "reuse":
        return None
    assert chunk is not None
    if mode == "off":
        return "mode"
    is_edited = chunk in known.edited and chunk not in known.stored | known.evicted
    if segment.role == "text" and not is_edited and segment.num_tokens < LEAST_TEXT:
        return "short"
    if chunk in known.failed:
        return "failed"
    if chunk in known.given_up:
        return "load"
    if chunk in known.usable and segment.role in REUSED_ANYWHERE:
        return "mode"
    if chunk in known.stored:
        return "prefix"
    if is_edited:
        return "edited"
    return "evicted" if chunk in known.evicted else "new"
