"""An index of the token ids of stored chunks: finds every run of 24 or more that a prompt shares with one of them.

Anchors are chosen by content (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD 2003, sec. 3): of every 13 consecutive
windows of 12 tokens the one with the least hash. So any run of 24 tokens has an anchor, wherever it stands. Knows
nothing of KV.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import threading
from collections.abc import Sequence

import numpy as np

from ccjax.prompts import tenant_of
from ccjax.types import ChunkId, ChunkSlice, KnownSlice

LEAST_KNOWN = 24
"""Tokens of the shortest run that is found."""
_WINDOW = 12
_WINDOWS = LEAST_KNOWN - _WINDOW + 1
_MOST_PER_ANCHOR = 8
"""Places of one anchor that are kept in a run; text that is in more chunks is found in these."""
_MOST_ALIGNMENTS = 256
"""Pairs of a chunk and a shift against it that are compared token by token for one prompt: those with most anchors."""
_MOST_PENDING = 1 << 16
"""Tokens that wait to be indexed together."""
_GROWTH = 16
"""Each sorted run of anchors has at least so many times as many as the next: few runs to look into, and an anchor is
merged some 30 times while 10^7 are added."""
_NO_TOKEN = -1
_KEY_BITS = 31
_PLACE = (1 << 32) - 1
_MULTIPLIERS = tuple(np.uint32(value) for value in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))


class _Anchors:
    """Anchors in ascending order, those with one key in `_MOST_PER_ANCHOR` places at most.

    Attributes:
      entries: [n] int64: keys times 2^32, plus places among the stored tokens.
    """

    def __init__(self, entries: np.ndarray) -> None:
        keys = entries >> 32
        is_kept = np.ones(len(entries), bool)
        is_kept[_MOST_PER_ANCHOR:] = keys[_MOST_PER_ANCHOR:] != keys[:-_MOST_PER_ANCHOR]
        self.entries = entries[is_kept]
        bits = max(0, len(self.entries).bit_length() - 1)
        self._shift = _KEY_BITS - bits
        counts = np.bincount(self.entries >> (32 + self._shift), minlength=1 << bits)
        self._begins = np.zeros((1 << bits) + 1, np.uint32)
        np.cumsum(counts, out=self._begins[1:])

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self._begins.nbytes

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of `keys`, and for each of these a place where it is; keys are uniform, so 1 or 2 entries begin with
        the same bits on average, all of which it compares."""
        bucket = keys >> self._shift
        first = self._begins[bucket].astype(np.int64)
        counts = self._begins[bucket + 1] - first
        ends = np.cumsum(counts)
        index = np.repeat(np.arange(len(keys)), counts)
        entries = self.entries[np.arange(len(index)) + np.repeat(first - ends + counts, counts)]
        same = np.flatnonzero(entries >> 32 == keys[index])
        return index[same], entries[same] & _PLACE


class KnownText:
    """Token ids of chunks, and where each anchor is in them. Thread-safe. Chunks of one tenant are found only in
    prompts of that tenant.

    Per stored token: 4 bytes for its id and 1.4 for anchors (one in 7 tokens, 8 bytes each, and where their first bits
    begin); per chunk some 100 bytes besides its id. Adding merges sorted anchors: up to 2 s for 10^6 chunks, once in
    each 6 % that they grow by.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[ChunkId, np.ndarray] = {}
        self._num_pending = 0
        self._numbers: dict[ChunkId, int] = {}
        self._ids: list[ChunkId | None] = []
        self._tokens = np.empty(0, np.int32)
        self._starts = np.zeros(1, np.int64)
        self._num_tokens = self._num_dead = 0
        self._runs: list[_Anchors] = []

    def __len__(self) -> int:
        return len(self._numbers) + len(self._pending)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._numbers or chunk_id in self._pending

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, as far as they are filled."""
        with self._lock:
            self._flush()
            return 4 * self._num_tokens + 8 * len(self._ids) + sum(run.nbytes for run in self._runs)

    def add(self, chunk_id: ChunkId, token_ids: Sequence[int] | np.ndarray) -> None:
        """Adds a chunk, unless it is there or too short to be found."""
        if len(token_ids) < LEAST_KNOWN:
            return
        with self._lock:
            if chunk_id not in self:
                self._pending[chunk_id] = np.asarray(token_ids, np.int32)
                self._num_pending += len(token_ids)
            if self._num_pending >= _MOST_PENDING:
                self._flush()

    def remove(self, chunk_id: ChunkId) -> None:
        """Removes a chunk, if it is there, and overwrites its token ids."""
        with self._lock:
            self._flush()
            number = self._numbers.pop(chunk_id, None)
            if number is None:
                return
            self._ids[number] = None
            start, end = self._starts[number : number + 2].tolist()
            self._tokens[start:end] = _NO_TOKEN
            self._num_dead += end - start
            if 2 * self._num_dead > self._num_tokens:
                self._compact()

    def find(self, token_ids: Sequence[int] | np.ndarray, tenant: str = "") -> list[KnownSlice]:
        """The longest runs of a prompt that are in chunks of this tenant, in prompt order: no two overlap, each has at
        least `LEAST_KNOWN` tokens. What a longer run covers of a shorter one is cut off. Of equally long runs that
        which begins its chunk comes first, then that of the chunk added first."""
        prompt = np.asarray(token_ids, np.int32)
        if len(prompt) < LEAST_KNOWN or not len(self):
            return []
        at, keys = _anchors(prompt, _salt(tenant))
        with self._lock:
            self._flush()
            shifts, numbers = self._alignments(at, keys, tenant)
            return self._longest(self._equal_runs(prompt, shifts, numbers))

    def _flush(self) -> None:
        """Indexes the pending chunks."""
        if not self._pending:
            return
        chunks, self._pending, self._num_pending = self._pending, {}, 0
        lengths = np.asarray([len(ids) for ids in chunks.values()])
        tokens, first = np.concatenate(list(chunks.values())), self._num_tokens
        if first + len(tokens) > np.iinfo(np.uint32).max:  # an anchor has 32 bits for its place
            return
        if first + len(tokens) > len(self._tokens):
            self._tokens.resize(max(first + len(tokens), len(self._tokens) * 5 // 4), refcheck=False)
        self._tokens[first : first + len(tokens)] = tokens
        if len(self._ids) + len(chunks) >= len(self._starts):
            self._starts.resize(2 * (len(self._ids) + len(chunks)) + 1, refcheck=False)
        ends = np.cumsum(lengths)
        self._starts[len(self._ids) + 1 : len(self._ids) + 1 + len(chunks)] = first + ends
        salts = np.repeat([_salt(tenant_of(key)) for key in chunks], lengths)
        for key in chunks:
            self._numbers[key] = len(self._ids)
            self._ids.append(key)
        self._num_tokens += len(tokens)
        at, keys = _anchors(tokens, salts)  # those across two chunks are of no use, but few
        chunk_of = np.searchsorted(ends, at, side="right")
        # The first place of each anchor in its chunk is enough: repetitive text would have one in every token.
        _, kept = np.unique((chunk_of << 32) | keys, return_index=True)
        entries = np.sort((keys[kept] << 32) | (at[kept] + first))
        while self._runs and len(self._runs[-1].entries) < _GROWTH * len(entries):
            entries = np.sort(np.concatenate([self._runs.pop().entries, entries]), kind="stable")
        self._runs.append(_Anchors(entries))

    def _alignments(self, at: np.ndarray, keys: np.ndarray, tenant: str) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of a shift (stored place minus prompt offset) and a chunk's number that have an anchor in common with
        the prompt."""
        found = [run.find(keys) for run in self._runs]
        if not sum(len(index) for index, _ in found):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.concatenate([places for _, places in found])
        shift = places - at[np.concatenate([index for index, _ in found])]
        number = np.searchsorted(self._starts[: len(self._ids) + 1], places, side="right") - 1
        # One number for both: at most 2^32 tokens in chunks of 24 or more.
        pairs, counts = np.unique((shift - shift.min() << 28) | number, return_counts=True)
        pairs = pairs[np.argsort(-counts, kind="stable")[:_MOST_ALIGNMENTS]]
        shift, number = (pairs >> 28) + shift.min(), pairs & ((1 << 28) - 1)
        ids = [self._ids[one] for one in number.tolist()]
        is_own = np.asarray([key is not None and tenant_of(key) == tenant for key in ids], bool)
        return shift[is_own], number[is_own]

    def _equal_runs(
        self, prompt: np.ndarray, shifts: np.ndarray, numbers: np.ndarray
    ) -> list[tuple[int, int, int, int]]:
        """(start, end, place of the start, chunk's number) of each run of equal tokens."""
        starts = np.maximum(self._starts[numbers], shifts)
        ends = np.minimum(self._starts[numbers + 1], len(prompt) + shifts)
        lengths = ends - starts
        # One array of all pairs of tokens, with one that differs in front of each alignment and at the end.
        begins = np.cumsum(lengths + 1) - lengths
        total = int((lengths + 1).sum())
        places = np.arange(total + 1) - np.append(np.repeat(begins - starts, lengths + 1), 0)
        is_pair = np.ones(total + 1, bool)
        is_pair[begins - 1] = is_pair[total] = False
        places, shift = places[is_pair], np.repeat(shifts, lengths)
        is_equal = np.zeros(total + 1, bool)
        is_equal[is_pair] = self._tokens[places] == prompt[places - shift]
        edges = np.flatnonzero(np.diff(is_equal.view(np.int8)))
        firsts, lasts = edges[::2] + 1, edges[1::2] + 1
        is_long = lasts - firsts >= LEAST_KNOWN
        firsts, lasts = firsts[is_long], lasts[is_long]
        pair = np.searchsorted(begins, firsts, side="right") - 1
        place = firsts - begins[pair] + starts[pair]
        start = place - shifts[pair]
        return list(
            zip(start.tolist(), (start + lasts - firsts).tolist(), place.tolist(), numbers[pair].tolist(), strict=True)
        )

    def _longest(self, runs: list[tuple[int, int, int, int]]) -> list[KnownSlice]:
        """The runs that are left when longer ones are taken first."""
        heap = [self._ranked(*run) for run in runs]
        heapq.heapify(heap)
        taken: list[tuple[int, int]] = []
        found = []
        while heap:
            *_, number, start, end, place = heapq.heappop(heap)
            index = bisect.bisect_left(taken, (start, start))
            if index and taken[index - 1][1] > start:
                index -= 1
            if index < len(taken) and taken[index][0] < end:  # what is left before it and behind it
                before, behind = taken[index]
                for first, last in ((start, before), (behind, end)):
                    if last - first >= LEAST_KNOWN:
                        heapq.heappush(heap, self._ranked(first, last, place + first - start, number))
                continue
            taken.insert(index, (start, end))
            key = self._ids[number]
            assert key is not None
            found.append(KnownSlice(start, end, ChunkSlice(key, place - int(self._starts[number]))))
        return sorted(found, key=lambda run: run.start)

    def _ranked(self, start: int, end: int, place: int, number: int) -> tuple[int, bool, int, int, int, int]:
        return start - end, place != self._starts[number], number, start, end, place

    def _compact(self) -> None:
        """Drops what removed chunks left behind."""
        alive = np.asarray([key is not None for key in self._ids], bool)
        starts = self._starts[: len(self._ids) + 1]
        lengths = np.diff(starts)
        shifts = starts[:-1] - (np.cumsum(lengths * alive) - lengths * alive)
        self._tokens = self._tokens[: self._num_tokens][np.repeat(alive, lengths)]
        for index, run in enumerate(self._runs):
            number = np.searchsorted(starts, run.entries & _PLACE, side="right") - 1
            kept = alive[number]
            self._runs[index] = _Anchors(run.entries[kept] - shifts[number[kept]])
        self._runs = [run for run in self._runs if len(run.entries)]
        self._starts = np.concatenate([[0], np.cumsum(lengths[alive])])
        self._ids = [key for key in self._ids if key is not None]
        self._numbers = {key: number for number, key in enumerate(self._ids) if key is not None}
        self._num_tokens, self._num_dead = len(self._tokens), 0


def _salt(tenant: str) -> int:
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "big") >> 1


def _anchors(tokens: np.ndarray, salt: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the anchors of a text, ascending, and their keys of `_KEY_BITS` bits.

    Args:
      tokens: [n] int32, at least `LEAST_KNOWN`.
      salt: mixed into the keys: one, or [n].
    """
    first, second, third = _MULTIPLIERS
    with np.errstate(over="ignore"):
        squared, fourth = first**2, first**4
        one = (tokens.view(np.uint32) + np.uint32(1)) * second
        one = (one ^ (one >> np.uint32(15))) * third
        two = one[:-1] * first + one[1:]
        four = two[:-2] * squared + two[2:]
        eight = four[:-4] * fourth + four[4:]
        hashes = eight[:-4] * fourth + four[8:]
        hashes = (hashes ^ (hashes >> np.uint32(16))) * second
        hashes ^= hashes >> np.uint32(13)
        least = _sliding(np.minimum, hashes, _WINDOWS)
        edge = np.zeros(_WINDOWS - 1, np.uint32)
        padded = np.concatenate([edge, least, edge])  # each window once for each hash in it
        at = np.flatnonzero(_sliding(np.maximum, padded, _WINDOWS) == hashes)
        keys = ((hashes[at] * third) >> np.uint32(32 - _KEY_BITS)).astype(np.int64)
    return at, keys ^ (salt if isinstance(salt, int) else salt[at])


def _sliding(extreme: np.ufunc, values: np.ndarray, count: int) -> np.ndarray:
    """The extreme of each `count` consecutive values."""
    length = 1
    while 2 * length <= count:
        values = extreme(values[:-length], values[length:])
        length *= 2
    return extreme(values[: len(values) - (count - length)], values[count - length :]) if length < count else values
