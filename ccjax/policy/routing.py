"""Which of several replicas a request should go to: where most of its chunks are at hand, balanced against who waits
there. Pure: whoever calls draws the random numbers and keeps the books.

A replica publishes a `ChunkFilter` of what its fast tiers hold. What is wrong or late in it costs a detour, nothing
else: the replica loads the chunk from the shared store or computes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence

from ccjax.types import ChunkId

BITS_PER_CHUNK = 12
NUM_PROBES = 8
"""Together they let 0.3 % of foreign chunks pass (Bloom 1970)."""

LARGEST_FILTER_BYTES = 1 << 17
"""87,000 chunks at full precision; beyond it more foreign ones pass."""

OLDEST_SUMMARY_S = 10.0
"""A summary that came longer ago says nothing any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkFilter:
    """A set of chunk ids in few bytes, which may seem to hold some that it does not (a Bloom filter).

    Attributes:
      bits: the filter, bit i in byte i // 8; empty for no chunks.
    """

    bits: bytes

    @staticmethod
    def of(chunk_ids: Iterable[ChunkId]) -> ChunkFilter:
        """The filter of these."""
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
    """What a replica publishes of itself.

    Attributes:
      held: chunks of which its memory, device's or host's, has a variant.
      waiting_tokens: prompt tokens that requests which have no first token yet are still to compute there.
      load_cost: what loading a token from the store takes, in tokens computed, 0 to 1; 1 where that is not known, or
        there is no store.
    """

    held: ChunkFilter
    waiting_tokens: int
    load_cost: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a router knows of a replica.

    Attributes:
      replica_id: its name.
      summary: the last that it published; None where it did not yet, or so long ago that it says nothing.
      sent_tokens: prompt tokens of what was sent there since.
      num_under_way: requests that were sent there and are not answered.
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
      other_tokens: of the rest of the prompt, which every replica computes.
    """

    chunks: tuple[tuple[ChunkId, int], ...] = ()
    other_tokens: int = 0


def missing_tokens(replica: ReplicaState, prompt: PromptSummary) -> float:
    """Tokens that the replica would compute for the prompt, those it would load counted by `load_cost`."""
    summary = replica.summary
    if summary is None:
        return prompt.other_tokens + sum(length for _, length in prompt.chunks)
    absent = sum(length for chunk_id, length in prompt.chunks if chunk_id not in summary.held)
    return prompt.other_tokens + summary.load_cost * absent


def rank(replicas: Sequence[ReplicaState], prompt: PromptSummary, draw: float) -> list[str]:
    """The replicas' ids, best first.

    By the tokens that are computed before the request's first one: those in line there and those that its prompt lacks
    there. Where that is equal, a hash of its first chunk decides, so that like prompts meet, and `draw` where there is
    none. Where no chunk or no summary is known, the one of two drawn replicas that has less under way goes first
    (Mitzenmacher 2001, the power of two choices).

    Args:
      draw: a random number, 0 <= draw < 1.

    Raises:
      ValueError: `draw` is outside of that.
    """
    if not 0.0 <= draw < 1.0:
        raise ValueError(f"draw: wanted a number from 0 to below 1, got {draw}")
    if not replicas:
        return []
    if not prompt.chunks or not any(replica.summary for replica in replicas):
        return _two_choices(replicas, draw)
    cost = {replica.replica_id: _line(replica, replicas) + missing_tokens(replica, prompt) for replica in replicas}
    first = prompt.chunks[0][0]
    return sorted(cost, key=lambda name: (cost[name], _rendezvous(first, name)))


def _line(replica: ReplicaState, replicas: Sequence[ReplicaState]) -> float:
    """Tokens in line there; of a replica that has not said it for long, what the fullest of the others has: a replica
    that hangs must not look idle."""
    if replica.summary is not None:
        return replica.summary.waiting_tokens + replica.sent_tokens
    known = (other.summary.waiting_tokens + other.sent_tokens for other in replicas if other.summary is not None)
    return max(known) + replica.sent_tokens


def _two_choices(replicas: Sequence[ReplicaState], draw: float) -> list[str]:
    ordered = sorted(replicas, key=lambda replica: replica.replica_id)
    start = draw * len(ordered)
    first = int(start)
    rest = [*ordered[first + 1 :], *ordered[:first]]
    # The fraction that choosing the first left over chooses the second among the others.
    second = [rest[int((start - first) * len(rest))]] if rest else []
    two = sorted([ordered[first], *second], key=lambda replica: replica.num_under_way)
    others = sorted((one for one in rest if one not in two), key=lambda replica: replica.num_under_way)
    return [replica.replica_id for replica in (*two, *others)]


def _places(chunk_id: ChunkId, num_bits: int) -> list[int]:
    """Where the filter keeps a chunk: double hashing of the id's own digits, sha256 already (Kirsch, Mitzenmacher)."""
    number = int(chunk_id[:32], 16)
    one, step = number >> 64, number & (2**64 - 1) | 1
    return [(one + probe * step) % num_bits for probe in range(NUM_PROBES)]


def _rendezvous(chunk_id: ChunkId, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{chunk_id} {replica_id}".encode(), digest_size=8).digest()


def load_cost(load_s: float | None, compute_s: float | None) -> float:
    """`Summary.load_cost` from what a token takes to load and to compute, in seconds; 1 where that is unknown.

    Raises:
      ValueError: a time is negative or not finite.
    """
    for name, value in (("load_s", load_s), ("compute_s", compute_s)):
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name}: wanted seconds of at least 0, got {value}")
    if load_s is None or not compute_s:
        return 1.0
    return min(1.0, load_s / compute_s)
