"""Which variants a collection of documents should have, and which of these are missing. Knows no index, no model and no
store: passages come as token counts and ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ccjax.policy.capture import make_variant_id
from ccjax.types import Chunk, ChunkId, VariantId

SPARE_NEIGHBOURS = 4
"""Neighbours to ask for beyond those that are wanted, since some may have the same text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One variant that is to be there.

    Attributes:
      passage: number of the passage, in corpus order.
      behind: numbers of the passages between the system prompt and it, in prompt order.
      num_tokens: of the passage.
      computed_tokens: that will run through the model for it, those of what it is compared with included.
      object_bytes, record_bytes: of its two objects in the store, 0 where it is there already.
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


@dataclasses.dataclass(frozen=True)
class Frame:
    """What stands around the passages of every prompt.

    Attributes:
      system: chunk of the system prompt; None for none.
      num_tokens: of a prompt without its passages.
      max_tokens: of a whole prompt.
    """

    system: Chunk | None
    num_tokens: int
    max_tokens: int

    @property
    def room(self) -> int:
        """Tokens for passages."""
        return self.max_tokens - self.num_tokens

    @property
    def prefix_ids(self) -> tuple[ChunkId, ...]:
        """What stands before the first passage."""
        return () if self.system is None else (self.system.chunk_id,)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The units of a collection: first each passage alone, then each behind its neighbours.

    Attributes:
      too_long: numbers of the passages that no prompt has room for.
    """

    alone: tuple[Unit, ...]
    conditioned: tuple[Unit, ...]
    too_long: tuple[int, ...]

    @property
    def missing(self) -> tuple[Unit, ...]:
        """What has to be computed, in order."""
        return tuple(unit for unit in (*self.alone, *self.conditioned) if unit.is_missing)


def choose_neighbours(
    own: int, found: Iterable[int], chunks: Sequence[Chunk], count: int, room: int
) -> tuple[int, ...]:
    """At most `count` of the passages `found` to stand before the passage `own`, in prompt order: the most similar
    first.

    FusionRAG (arXiv:2601.12904) encodes a passage together with its most similar ones. The order taken here is that of
    `found`, in which a search for the passage itself would return them. A question that finds a passage mostly finds
    its neighbours, ranked alike, so that they stand in this order in its prompt: Cache-Craft's order penalty (eq. 7)
    is least. And the prefix of fewer neighbours is the beginning of that of more.

    Texts that are there already, the passage's own among them, are passed over: a passage behind itself says nothing.
    The list ends at the first one that `room`, in tokens and with the passage itself, does not hold.
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
    frame: Frame,
    stored: Collection[str],
    *,
    neighbours: Mapping[int, Sequence[int]],
    num_neighbours: int,
    compare: bool,
    sizes: Callable[[Chunk, tuple[ChunkId, ...], bool], tuple[int, int]],
) -> Plan:
    """All units of a collection.

    Of a prompt with neighbours only the passage's own variant is a unit. Those of its neighbours behind each other come
    about as well, and are left: nobody asks for exactly these, and with `n` neighbours they would take `n - 1` times
    the collection's room. The first neighbour is reused as it is alone, so that with one neighbour there are none.

    Args:
      chunks: of the passages, in corpus order.
      stored: ids of the variants that the store has.
      neighbours: passage -> the passages similar to it, the most similar first.
      compare: passages alone are computed a second time, behind another one, to compare their KV.
      sizes: bytes of object and record of a chunk's variant behind that prefix, with deviations or not.
    """
    done = set(stored)

    def unit(number: int, behind: tuple[int, ...], computed_tokens: int, has_deviations: bool) -> Unit:
        chunk = chunks[number]
        prefix_ids = (*frame.prefix_ids, *(chunks[one].chunk_id for one in behind))
        variant_id = make_variant_id(chunk.chunk_id, prefix_ids, "exact")
        num_tokens = len(chunk.token_ids)
        if variant_id in done:
            return Unit(number, behind, variant_id, num_tokens, computed_tokens)
        done.add(variant_id)
        object_bytes, record_bytes = sizes(chunk, prefix_ids, has_deviations)
        return Unit(number, behind, variant_id, num_tokens, computed_tokens, object_bytes, record_bytes, True)

    lengths = [len(chunk.token_ids) for chunk in chunks]
    fitting = [number for number, length in enumerate(lengths) if length <= frame.room]
    alone = [unit(number, (), (lengths[number] + 1) * (2 if compare else 1), compare) for number in fitting]
    conditioned = []
    for number in fitting if num_neighbours else ():
        behind = choose_neighbours(number, neighbours.get(number, ()), chunks, num_neighbours, frame.room)
        if behind:
            others = sum(lengths[one] for one in behind[1:])
            conditioned.append(unit(number, behind, lengths[number] + 1 + others, compare))
    too_long = tuple(number for number, length in enumerate(lengths) if length > frame.room)
    return Plan(tuple(alone), tuple(conditioned), too_long)


def companions(chunks: Sequence[Chunk]) -> tuple[int | None, ...]:
    """For each passage the one before it with another text, or else the one behind it; None where all are alike. It is
    what a passage is compared behind where nothing was computed just before it."""
    before: list[int | None] = []
    for number, chunk in enumerate(chunks):
        previous = number - 1 if number else None
        if previous is not None and chunks[previous].chunk_id == chunk.chunk_id:
            previous = before[previous]
        before.append(previous)
    first_other = next((n for n, chunk in enumerate(chunks) if chunk.chunk_id != chunks[0].chunk_id), None)
    return tuple(first_other if number is None else number for number in before)


def batches(units: Sequence[Unit], num_tokens: int, most: int) -> list[tuple[Unit, ...]]:
    """The units in order, cut into batches of at most `most` units and about `num_tokens` computed tokens."""
    cut: list[tuple[Unit, ...]] = []
    batch: list[Unit] = []
    for unit in units:
        if batch and (len(batch) == most or sum(one.computed_tokens for one in batch) >= num_tokens):
            cut.append(tuple(batch))
            batch = []
        batch.append(unit)
    return [*cut, tuple(batch)] if batch else cut
