"""Ranks replicas for a request: by the chunks they hold, balanced against their load. Pure: the caller provides random
numbers and keeps the state.

A replica publishes a `ChunkFilter` of what its fast tiers hold. If that is wrong or late, the request only takes a
detour: the replica loads the chunk from the shared store or computes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence

from ccjax.types import ChunkId

BITS_PER_CHUNK = 12
NUM_PROBES = 8
"""Together they give 0.3 % false positives (Bloom 1970)."""

LARGEST_FILTER_BYTES = 1 << 17
"""87,000 chunks at full precision; more chunks give more false positives."""

OLDEST_SUMMARY_S = 10.0
"""Summaries older than this are ignored."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkFilter:
    """A compact set of chunk ids with false positives (a Bloom filter).

    Attributes:
      bits: the filter, bit i in byte i // 8; empty for no chunks.
    """

    bits: bytes

    @staticmethod
    def of(chunk_ids: Iterable[ChunkId]) -> ChunkFilter:
        """The filter of these chunks."""
        ids = list(chunk_ids)
        num_bytes = min(-(-len(ids) * BITS_PER_CHUNK // 8), LARGEST_FILTER_BYTES)
        bits = bytearray(num_bytes)
        for chunk_id in ids:
            for place in _places(chunk_id, 8 * num_bytes):
                bits[place >> 3] |= 1 << (place & 7)
        return ChunkFilter(bytes(bits))

    def __contains__(self, chunk_id: ChunkId) -> bool:
        return bool(self.bits) and all(
            self.bits[place >> 3] >> (place & 7) & 1 for place in _places(chunk_id, 8 * len(self.bits))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a replica publishes about itself.

    Attributes:
      held: chunks with a variant in its device or host memory.
      waiting_tokens: prompt tokens still to be computed there, over all requests without a first token.
      load_cost: cost of loading a token from the store, in units of computing one, 0 to 1; 1 if unknown or without a
        store.
    """

    held: ChunkFilter
    waiting_tokens: int
    load_cost: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a router knows of a replica.

    Attributes:
      replica_id: its name.
      summary: the last one it published; None if there is none or it is too old.
      sent_tokens: prompt tokens sent there since.
      num_under_way: requests sent there and not answered yet.
    """

    replica_id: str
    summary: Summary | None
    sent_tokens: float
    num_under_way: int


@dataclasses.dataclass(frozen=True, slots=True)
class PromptSummary:
    """What a router knows of a request.

    Attributes:
      chunks: its passages, in prompt order, with their lengths in tokens.
      other_tokens: tokens of the rest of the prompt, which every replica computes.
      conversation: identifies the chat that the prompt belongs to, the same in each turn; "" for none.
      earlier_tokens: tokens of its earlier turns, which only the replica that had these need not compute.
    """

    chunks: tuple[tuple[ChunkId, int], ...] = ()
    other_tokens: int = 0
    conversation: str = ""
    earlier_tokens: int = 0


def missing_tokens(replica: ReplicaState, prompt: PromptSummary) -> float:
    """Tokens that the replica would compute for the prompt if it had the earlier turns; loaded ones are weighted by
    `load_cost`."""
    summary = replica.summary
    if summary is None:
        return prompt.other_tokens + sum(length for _, length in prompt.chunks)
    absent = sum(length for chunk_id, length in prompt.chunks if chunk_id not in summary.held)
    return prompt.other_tokens + summary.load_cost * absent


def rank(replicas: Sequence[ReplicaState], prompt: PromptSummary, draw: float) -> list[str]:
    """The replicas' ids, best first.

    Ranks by the tokens to compute before the request's first one: those queued at the replica plus those of the prompt
    that it does not hold. Each conversation has a home, the same replica in every turn unless replicas come or go; the
    others are assumed to lack its earlier turns. Ties are broken by a hash of the conversation or of the first chunk,
    so that similar prompts meet. Without these, or without summaries, the less loaded of two random replicas goes first
    (Mitzenmacher 2001, the power of two choices).

    Args:
      draw: a random number, 0 <= draw < 1.

    Raises:
      ValueError: `draw` is out of range.
    """
    if not 0.0 <= draw < 1.0:
        raise ValueError(f"draw: wanted a number from 0 to below 1, got {draw}")
    if not replicas:
        return []
    key = prompt.chunks[0][0] if prompt.chunks else prompt.conversation
    if not key or not any(replica.summary for replica in replicas):
        return _two_choices(replicas, draw)
    cost = {replica.replica_id: _line(replica, replicas) + missing_tokens(replica, prompt) for replica in replicas}
    home = min(cost, key=lambda name: _rendezvous(prompt.conversation, name))
    for replica in replicas:
        if replica.replica_id != home:
            load_cost = 1.0 if replica.summary is None else replica.summary.load_cost
            cost[replica.replica_id] += load_cost * prompt.earlier_tokens
    return sorted(cost, key=lambda name: (cost[name], _rendezvous(key, name)))


def _line(replica: ReplicaState, replicas: Sequence[ReplicaState]) -> float:
    """Tokens queued at a replica; without a recent summary, as many as at the most loaded other replica: a replica that
    hangs must not look idle."""
    if replica.summary is not None:
        return replica.summary.waiting_tokens + replica.sent_tokens
    known = (other.summary.waiting_tokens + other.sent_tokens for other in replicas if other.summary is not None)
    return max(known) + replica.sent_tokens


def _two_choices(replicas: Sequence[ReplicaState], draw: float) -> list[str]:
    ordered = sorted(replicas, key=lambda replica: replica.replica_id)
    start = draw * len(ordered)
    first = int(start)
    rest = [*ordered[first + 1 :], *ordered[:first]]
    # The fraction left over by the first choice selects the second among the others.
    second = [rest[int((start - first) * len(rest))]] if rest else []
    two = sorted([ordered[first], *second], key=lambda replica: replica.num_under_way)
    others = sorted((replica for replica in rest if replica not in two), key=lambda replica: replica.num_under_way)
    return [replica.replica_id for replica in (*two, *others)]


def _places(chunk_id: ChunkId, num_bits: int) -> list[int]:
    """Bit positions of a chunk: double hashing of the id's own digits, which are a sha256 already (Kirsch,
    Mitzenmacher)."""
    number = int(chunk_id[:32], 16)
    start, step = number >> 64, number & (2**64 - 1) | 1
    return [(start + probe * step) % num_bits for probe in range(NUM_PROBES)]


def _rendezvous(key: str, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{key} {replica_id}".encode(), digest_size=8).digest()


def load_cost(load_s: float | None, compute_s: float | None) -> float:
    """`Summary.load_cost` from the seconds to load and to compute a token; 1 if unknown.

    Raises:
      ValueError: a time is negative or not finite.
    """
    for name, value in (("load_s", load_s), ("compute_s", compute_s)):
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name}: wanted seconds of at least 0, got {value}")
    if load_s is None or not compute_s:
        return 1.0
    return min(1.0, load_s / compute_s)
