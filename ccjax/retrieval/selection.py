"""Which of the passages found go into a prompt: near-duplicates once, and neighbours as far as there is room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import regex

from ccjax.retrieval.catalog import Passage

_NEAR = 0.9
"""Jaccard similarity of the sets of three consecutive words."""
_SHINGLE = 3


def distinct(passages: Sequence[Passage], top_k: int) -> list[Passage]:
    """The first `top_k` of the passages without near-duplicates of earlier ones: those of the same words, up to case,
    blanks and punctuation, or of nearly the same ones with the same numbers and single letters ("Pump A")."""
    chosen: list[Passage] = []
    known: list[tuple[list[str], frozenset[str], frozenset[tuple[str, ...]]]] = []
    for passage in passages:
        words = regex.findall(r"[\p{L}\p{M}\p{N}]+", passage.text.casefold())
        telling = frozenset(word for word in words if len(word) == 1 or not word.isalpha())
        shingles = frozenset(tuple(words[at : at + _SHINGLE]) for at in range(len(words) - _SHINGLE + 1))
        if any(
            words == others or telling == theirs and len(shingles & parts) >= _NEAR * len(shingles | parts) > 0
            for others, theirs, parts in known
        ):
            continue
        known.append((words, telling, shingles))
        chosen.append(passage)
        if len(chosen) == top_k:
            break
    return chosen


def with_neighbours(
    passages: Sequence[Passage],
    room: int,
    count_tokens: Callable[[str], int],
    some_of: Callable[[str, Sequence[int]], Sequence[Passage]],
) -> list[Passage]:
    """The passages and those after and before them, of the best ones first, each where it is read; they have the score
    of the passage that brings them.

    Args:
      room: tokens of all together; the passages themselves stay even if they have more.
      some_of: the passages of a document with some numbers.
    """
    found, room = list(passages), room - sum(count_tokens(passage.text) for passage in passages)
    present = {passage.passage_id for passage in passages}
    for passage in passages:
        near = {other.number: other for other in some_of(passage.document_id, (passage.number + 1, passage.number - 1))}
        for number in (passage.number + 1, passage.number - 1):
            if (other := near.get(number)) is None or other.passage_id in present:
                continue
            if (size := count_tokens(other.text)) <= room:
                room -= size
                present.add(other.passage_id)
                other = dataclasses.replace(other, score=passage.score)
                found.insert(found.index(passage) + (number > passage.number), other)
    return found
