"""Which variants a collection of documents should have, and which of them are missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ccjax.policy.capture import make_variant_id
from ccjax.types import Chunk, ChunkId, VariantId

SPARE_NEIGHBOURS = 4
"""Extra neighbours to search for, since some may have the same text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One variant that should exist.

    Attributes:
      passage: number of the passage, in corpus order.
      behind: numbers of the passages between the system prompt and it, in prompt order.
      is_framed: the passages of the frame take that place instead.
      num_tokens: of the passage.
      computed_tokens: that will run through the model for it.
      object_bytes, record_bytes: of its two objects in the store, 0 if it exists already.
      is_missing: it is not in the store. Of units with the same variant only the first is ever missing.
    """

    passage: int
    behind: tuple[int, ...]
    variant_id: VariantId
    num_tokens: int
    computed_tokens: int
    object_bytes: int = 0
    record_bytes: int = 0
    is_missing: bool = False
    is_framed: bool = False


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The fixed parts of prompts around passages.

    Attributes:
      system: chunk of the system prompt; None for none.
      num_tokens: of a prompt without its passages.
      max_tokens: of a whole prompt.
      frame: chunks behind which passages are prepared (`ccjax.cache.documents.frame`).
    """

    system: Chunk | None
    num_tokens: int
    max_tokens: int
    frame: tuple[Chunk, ...] = ()

    @property
    def room(self) -> int:
        """Tokens available for passages."""
        return self.max_tokens - self.num_tokens

    @property
    def prefix_ids(self) -> tuple[ChunkId, ...]:
        """Chunks before the first passage."""
        return () if self.system is None else (self.system.chunk_id,)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The units of a collection: each passage alone, behind the frame, and behind its neighbours.

    Attributes:
      too_long: numbers of the passages that fit into no prompt.
    """

    alone: tuple[Unit, ...]
    framed: tuple[Unit, ...]
    conditioned: tuple[Unit, ...]
    too_long: tuple[int, ...]

    @property
    def missing(self) -> tuple[Unit, ...]:
        """The missing units in order: a passage behind the frame comes directly after the same passage alone, with
        which it is compared."""
        prepared = sorted((*self.alone, *self.framed), key=lambda unit: (unit.passage, unit.is_framed))
        return tuple(unit for unit in (*prepared, *self.conditioned) if unit.is_missing)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units, missing or not."""
        return (*self.alone, *self.framed, *self.conditioned)


def choose_neighbours(
    own: int, found: Iterable[int], chunks: Sequence[Chunk], count: int, room: int
) -> tuple[int, ...]:
    """Chooses at most `count` of the passages `found` to precede the passage `own`, in prompt order: the most similar
    first.

    FusionRAG (arXiv:2601.12904) encodes a passage together with its most similar ones. The order here is that of
    `found`, in which a search for the passage itself returns them. A question that finds a passage mostly finds its
    neighbours in a similar order, so they have this order in its prompt, and Cache-Craft's order penalty (eq. 7) is
    least. Also, the prefix of fewer neighbours is the beginning of that of more.

    Texts that occurred already, including the passage's own, are skipped: a passage behind itself is useless. The list
    ends at the first one that does not fit into `room` tokens together with the passage.
    """
    chosen: list[int] = []
    seen = {chunks[own].chunk_id}
    left = room - len(chunks[own].token_ids)
    for number in found:
        if len(chosen) == count:
            break
        chunk = chunks[number]
        if chunk.chunk_id in seen:
            continue
        left -= len(chunk.token_ids)
        if left < 0:
            break
        seen.add(chunk.chunk_id)
        chosen.append(number)
    return tuple(chosen)


def make_plan(
    chunks: Sequence[Chunk],
    around: Surroundings,
    stored: Collection[str],
    *,
    neighbours: Mapping[int, Sequence[int]],
    num_neighbours: int,
    compares: bool,
    sizes: Callable[[Chunk, tuple[ChunkId, ...], bool], tuple[int, int]],
) -> Plan:
    """Plans all units of a collection.

    For a prompt with neighbours, only the passage's own variant is a unit. Variants of its neighbours behind each other
    are computed, too, but not kept: no question asks for exactly these, and with `n` neighbours they would take `n - 1`
    times the space of the collection. The first neighbour is reused as computed alone, so that with one neighbour there
    are none.

    Args:
      chunks: of the passages, in corpus order.
      stored: ids of the variants in the store.
      neighbours: passage -> similar passages, the most similar first.
      compares: variants behind others are compared with the passage alone, and their deviations are stored.
      sizes: bytes of object and record of a chunk's variant behind that prefix, with or without deviations.
    """
    done = set(stored)

    def unit(number: int, before: Sequence[Chunk], others: int = 0, **fields: Any) -> Unit:
        chunk = chunks[number]
        prefix_ids = (*around.prefix_ids, *(earlier.chunk_id for earlier in before))
        variant_id = make_variant_id(chunk.chunk_id, prefix_ids, "exact")
        num_tokens = len(chunk.token_ids)
        fields = {"behind": (), **fields, "variant_id": variant_id, "num_tokens": num_tokens}
        fields["computed_tokens"] = num_tokens + 1 + others
        if variant_id in done:
            return Unit(number, **fields)
        done.add(variant_id)
        object_bytes, record_bytes = sizes(chunk, prefix_ids, compares and bool(before))
        return Unit(number, **fields, object_bytes=object_bytes, record_bytes=record_bytes, is_missing=True)

    lengths = [len(chunk.token_ids) for chunk in chunks]
    fitting = [number for number, length in enumerate(lengths) if length <= around.room]
    alone = [unit(number, ()) for number in fitting]
    room = around.room - sum(len(chunk.token_ids) for chunk in around.frame)
    framed_ids = {chunk.chunk_id for chunk in around.frame}
    framed = [
        unit(number, around.frame, is_framed=True)
        for number in (fitting if around.frame else ())
        if lengths[number] <= room and chunks[number].chunk_id not in framed_ids
    ]
    conditioned = []
    for number in fitting if num_neighbours else ():
        behind = choose_neighbours(number, neighbours.get(number, ()), chunks, num_neighbours, around.room)
        if behind:
            others = sum(lengths[neighbour] for neighbour in behind[1:])
            conditioned.append(unit(number, [chunks[neighbour] for neighbour in behind], others, behind=behind))
    too_long = tuple(number for number, length in enumerate(lengths) if length > around.room)
    return Plan(tuple(alone), tuple(framed), tuple(conditioned), too_long)


def batches(units: Sequence[Unit], num_tokens: int, most: int) -> list[tuple[Unit, ...]]:
    """The units in order, cut into batches of at most `most` units and about `num_tokens` computed tokens."""
    cut: list[tuple[Unit, ...]] = []
    batch: list[Unit] = []
    for unit in units:
        if batch and (len(batch) == most or sum(batched.computed_tokens for batched in batch) >= num_tokens):
            cut.append(tuple(batch))
            batch = []
        batch.append(unit)
    return [*cut, tuple(batch)] if batch else cut
