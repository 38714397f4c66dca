"""Which of the passages found go into a prompt: near-duplicates once, and neighbours as far as there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import regex

from ccjax.retrieval.catalog import PassageRow

Hits = list[tuple[float, PassageRow]]
_NEAR = 0.9
"""Jaccard similarity of the sets of three consecutive words."""
_SHINGLE = 3


def distinct(hits: Hits, top_k: int) -> Hits:
    """The first `top_k` of the hits without near-duplicates of earlier ones: passages of the same words, up to case,
    blanks and punctuation, or of nearly the same ones with the same numbers and single letters ("Pump A")."""
    chosen: Hits = []
    known: list[tuple[list[str], frozenset[str], frozenset[tuple[str, ...]]]] = []
    for hit in hits:
        words = regex.findall(r"[\p{L}\p{M}\p{N}]+", hit[1].text.casefold())
        telling = frozenset(word for word in words if len(word) == 1 or not word.isalpha())
        shingles = frozenset(tuple(words[at : at + _SHINGLE]) for at in range(len(words) - _SHINGLE + 1))
        if any(
            words == others or telling == theirs and len(shingles & parts) >= _NEAR * len(shingles | parts) > 0
            for others, theirs, parts in known
        ):
            continue
        known.append((words, telling, shingles))
        chosen.append(hit)
        if len(chosen) == top_k:
            break
    return chosen


def with_neighbours(
    hits: Hits,
    room: int,
    count_tokens: Callable[[str], int],
    beside: Callable[[str, Sequence[int]], Sequence[PassageRow]],
) -> Hits:
    """The hits and the passages after and before them, those of the best hits first, each where it is read; they have
    the score of their hit.

    Args:
      room: tokens of all together; hits stay even if they are more.
      beside: the passages of a document with these numbers.
    """
    found, room = list(hits), room - sum(count_tokens(row.text) for _, row in hits)
    present = {(row.document_id, row.number) for _, row in hits}
    for score, row in hits:
        near = {other.number: other for other in beside(row.document_id, (row.number + 1, row.number - 1))}
        for number in (row.number + 1, row.number - 1):
            if (other := near.get(number)) is None or (row.document_id, number) in present:
                continue
            if (size := count_tokens(other.text)) <= room:
                room -= size
                present.add((row.document_id, number))
                found.insert(found.index((score, row)) + (number > row.number), (score, other))
    return found
