"""Lists the sizes that an engine's steps are compiled for: all of them, and a few that cover all others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from ccjax.runner.buckets import (
    batch_bucket,
    entry_bucket,
    question_bucket,
    segment_bucket,
    slot_bucket,
    token_bucket,
)
from ccjax.runner.pool import num_pages

_ALL_ROWS, _ALL_ROWS_UP_TO = 1024, 4096
"""Rows of packs up to which, and slots up to which, all sizes are listed; beyond them only a few."""
_FEW_ROWS = (16, 64)
"""Rows of short questions, which larger contexts are compiled for besides those that cover all others."""
_PARTS = 16
"""Assumed number of segments of a prompt, each with a partly filled last page."""

_FEWEST_ROWS = 32
_MOST_PADDING = 1.5
"""The packs compiled before the first request have at least `_FEWEST_ROWS` rows, spaced so that each larger pack finds
a size of at most `_MOST_PADDING` times its own: a layer of SmolLM2 takes 6 ms with 32 rows, 58 ms with 640 (processor
time)."""

_MOST_PADDING_OF_LARGEST = 4
"""The same at the largest contexts, where prompts are rare: three or four sizes."""

_USUAL_QUESTION_ROWS, _MOST_QUESTION_ROWS = 64, 256
"""Tokens of a usual question, and of a long one, or of the questions of a few requests."""

_MOST_ENDS = 8
"""Most prompts that usually end in one pack."""


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The sizes that an engine's steps are compiled for.

    Attributes:
      max_model_len, max_num_batched_tokens, max_num_seqs: as in `EngineConfig`.
      with_mass: the masses that capture needs are computed in some packs.
    """

    max_model_len: int
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 32
    with_mass: bool = True

    @property
    def context_tokens(self) -> int:
        """Most tokens of the contexts of a pack: enough for any single prompt, and for a full pack of prompts of which
        half is reused."""
        return slot_bucket(max(self.max_model_len, self._usual_tokens))

    @property
    def num_segments(self) -> int:
        """Columns of the mass output, for prompts of up to 15 passages and instructions."""
        return segment_bucket(1) if self.with_mass else 0

    @property
    def more_segments(self) -> int:
        """The same for longer conversations."""
        return segment_bucket(self.num_segments + 1) if self.with_mass else 0

    def packs(self) -> list[tuple[int, int]]:
        """(computed tokens, context slots) of every pack, small ones first.

        Above 4,096 slots only a few: compiling all sizes would take minutes, and the others compile once, when a
        request first needs them.
        """
        rows, few = self.rows(), {*_FEW_ROWS, *_covering(_few(self.rows()))}
        return [
            (count, size)
            for size in self.slots()
            for count in rows
            if count <= size and (size <= _ALL_ROWS_UP_TO or count in few)
        ]

    def first_packs(self) -> list[tuple[int, int]]:
        """A few packs that cover all others, most with little padding of rows. Extra slots are cheap, since unused ones
        are not read: 640 rows over 600 tokens take 58 ms with 1,024 slots, 70 ms with 8,192."""
        few = _few(self.rows())
        usual, most = slot_bucket(min(self._usual_tokens, self.context_tokens)), self.context_tokens
        packs = [(count, usual) for count in few if count <= usual]
        return packs + [(count, most) for count in _covering(few) if most > usual]

    def questions(self) -> list[tuple[int, int]]:
        """(computed tokens, context slots) of passes of questions of up to `_MOST_QUESTION_ROWS` tokens; longer ones
        compile on first use."""
        rows = sorted({question_bucket(length) for length in range(1, _MOST_QUESTION_ROWS + 1)})
        return [(count, size) for size in self.slots() for count in rows if count <= size]

    def first_questions(self) -> list[tuple[int, int]]:
        """Two of `questions`: one for a usual prompt, one that covers all others."""
        usual = slot_bucket(min(self._usual_tokens, self.context_tokens))
        sizes = (question_bucket(_USUAL_QUESTION_ROWS), usual), (_MOST_QUESTION_ROWS, self.context_tokens)
        return list(dict.fromkeys(sizes))

    def decodes(self) -> list[tuple[int, int]]:
        """(requests, entries of the page tables) of every decode step up to `max_model_len`, small ones first."""
        most = num_pages(self.max_model_len) + _PARTS
        entries = sorted({entry_bucket(count) for count in range(1, most + 1)})
        return [(batch, count) for count in entries for batch in self.batches()]

    def first_decodes(self) -> list[tuple[int, int]]:
        """A few decode steps that cover all others: for one request, for a few, for all. Unused entries cost next to
        nothing."""
        batches, entries = self.batches(), self.decodes()[-1][1]
        few = [batch for batch in batches if batch <= _MOST_ENDS]
        return [(batch, entries) for batch in dict.fromkeys([*few[:1], *few[-1:], batches[-1]])]

    def ends(self) -> list[int]:
        """Numbers of requests whose last token is in a pack: up to 8, or all."""
        batches = self.batches()
        return [count for count in batches if count <= _MOST_ENDS or count == batches[-1]]

    def batches(self) -> list[int]:
        """Requests of every decode step, and rows of its logits, ascending."""
        return sorted({batch_bucket(count) for count in range(1, self.max_num_seqs + 1)})

    def rows(self) -> list[int]:
        """Computed tokens of every pack, ascending; above `_ALL_ROWS` only a few."""
        most = min(self.max_num_batched_tokens, self.context_tokens)
        rows = sorted({token_bucket(length) for length in range(1, most + 1)})
        few = _few(rows)
        return [count for count in rows if count <= _ALL_ROWS or count in few]

    def slots(self) -> list[int]:
        """Context slots of every pack, ascending."""
        return sorted({slot_bucket(length) for length in range(1, self.context_tokens + 1)})

    @property
    def _usual_tokens(self) -> int:
        return min(2 * self.max_num_batched_tokens, 4 * self.max_model_len)


def _few(rows: Sequence[int]) -> list[int]:
    """A few of these rows that cover all others with little padding."""
    return spread([count for count in rows if count >= _FEWEST_ROWS] or rows[-1:])


def _covering(few: Sequence[int]) -> list[int]:
    """The least, and three or fewer of the others that cover them."""
    return [few[0], *(spread(few[1:], _MOST_PADDING_OF_LARGEST) if few[1:] else ())]


def spread(sizes: Sequence[int], most_padding: float = _MOST_PADDING) -> list[int]:
    """Selects a few of the given ascending sizes, including the largest, so that each of the others has one that is at
    most `most_padding` times as large."""
    kept, smallest = [], sizes[0]
    for size, larger in itertools.pairwise(sizes):
        if larger > most_padding * smallest:
            kept.append(size)
            smallest = larger
    return [*kept, sizes[-1]]
