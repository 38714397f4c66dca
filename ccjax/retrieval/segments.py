"""Vectors in immutable segments, searched together.

As in a log-structured merge tree, each write creates a small flat segment, small segments are merged into larger ones,
and deleted rows are only marked. One segment may be a trained index (`ccjax.retrieval.trained`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import faiss
import numpy as np

from ccjax.retrieval.staged import staged_search

_FEW = 0.1
"""If a search may find at most this share of a trained segment, it compares all of these rows: the clusters near the
query may contain none of them."""
_faiss: Any = faiss


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Rows of a segment that may be found.

    Attributes:
      bits: uint8, a bit a row, lowest first; None for all rows.
    """

    num_rows: int
    bits: np.ndarray | None

    @classmethod
    def of(cls, mask: np.ndarray | None, num_rows: int) -> Chosen:
        """`mask` is bool [num_rows], or None for all."""
        if mask is None:
            return cls(num_rows, None)
        return cls(int(np.count_nonzero(mask)), np.packbits(mask, bitorder="little"))


@dataclasses.dataclass(frozen=True)
class IndexSegment:
    """Some rows and their vectors.

    Attributes:
      index: flat, IVF or HNSW, by inner product; its own ids count from 0.
      rows: int64 [n], ascending, by those ids.
      alive: bool [n], False for deleted rows; None while none is deleted.
    """

    index: faiss.Index
    rows: np.ndarray
    alive: np.ndarray | None = None

    @classmethod
    def flat(cls, rows: np.ndarray, vectors: np.ndarray) -> IndexSegment:
        """A segment that is searched exactly; `vectors` is float32 [n, dim]."""
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(np.ascontiguousarray(vectors, np.float32))  # pyright: ignore[reportCallIssue]
        return cls(index, rows)

    @property
    def is_flat(self) -> bool:
        """True for a segment that is searched exactly."""
        return isinstance(self.index, faiss.IndexFlat)

    @property
    def num_alive(self) -> int:
        """Number of rows that are not deleted."""
        return self.living.num_rows

    def without(self, rows: np.ndarray) -> IndexSegment:
        """The segment with more rows deleted, those of `rows` (ascending) that it holds."""
        gone = _is_in(self.rows, rows)
        if not gone.any():
            return self
        return dataclasses.replace(self, alive=~gone if self.alive is None else self.alive & ~gone)

    @functools.cached_property
    def living(self) -> Chosen:
        """All rows that were not deleted."""
        return Chosen.of(self.alive, len(self.rows))

    def choose(self, allowed: np.ndarray) -> Chosen:
        """The rows of `allowed` (ascending), none of which is deleted."""
        return Chosen.of(_is_in(self.rows, allowed), len(self.rows))

    def stages(
        self, vector: np.ndarray, top_k: int, num_stages: int, chosen: Chosen
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(scores float32, rows int64) of the best of the chosen rows so far, after each of at most `num_stages`
        stages; nothing if none is chosen."""
        if not chosen.num_rows:
            return
        index, selector, is_few = self.index, None, False
        if chosen.bits is not None:
            selector = _faiss.IDSelectorBitmap(chosen.bits)
            is_few = chosen.num_rows <= _FEW * len(self.rows)
        if is_few and isinstance(index, faiss.IndexHNSW):
            index = faiss.downcast_index(index.storage)
        num_probes = index.nlist if is_few and isinstance(index, faiss.IndexIVF) else None
        top_k = min(top_k, chosen.num_rows)
        for found in staged_search(
            index, vector, top_k, num_stages=num_stages, selector=selector, num_probes=num_probes
        ):
            yield found.scores, self.rows[found.rows]

    def nearest(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32, rows int64), both [n, top_k], best first, of many vectors [n, dim] at once, with the width
        of single searches; row -1 if fewer were found."""
        index, bits = self.index, self.living.bits
        selector = None if bits is None else _faiss.IDSelectorBitmap(bits)
        if isinstance(index, faiss.IndexIVF):
            params = _faiss.SearchParametersIVF(nprobe=index.nprobe, sel=selector)
        elif isinstance(index, faiss.IndexHNSW):
            params = _faiss.SearchParametersHNSW(efSearch=index.hnsw.efSearch, sel=selector)
        else:
            params = _faiss.SearchParameters(sel=selector)
        scores, ids = index.search(vectors, top_k, params=params)  # pyright: ignore[reportCallIssue]
        return scores, np.where(ids < 0, -1, self.rows[ids])


def neighbours(segments: Sequence[IndexSegment], rows: np.ndarray, vectors: np.ndarray, count: int) -> np.ndarray:
    """int64 [n, count]: for each of `rows` [n], whose vectors are `vectors` [n, dim], the other rows most similar to
    it, the nearest first, ties by row; -1 where fewer resemble it at all."""
    parts = [segment.nearest(np.ascontiguousarray(vectors, np.float32), count + 1) for segment in segments]
    scores, found = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    is_other = (found >= 0) & (found != rows[:, None]) & (scores > 0.0)
    scores = np.where(is_other, scores, -np.inf)
    order = np.lexsort((found, -scores))[:, :count]
    best = np.take_along_axis(np.where(is_other, found, -1), order, axis=1)
    return np.pad(best, ((0, 0), (0, count - best.shape[1])), constant_values=-1)


def search(
    segments: Sequence[IndexSegment], chosen: Sequence[Chosen], vector: np.ndarray, top_k: int, num_stages: int
) -> Iterator[list[tuple[float, int]]]:
    """(score, row) of the best of all segments so far, best first, ties by row, after each of at most `num_stages`
    stages of the largest segment; the others are searched first. At least one result.

    Args:
      chosen: of each segment, the rows that may be found.
    """
    *others, largest = sorted(zip(segments, chosen, strict=True), key=lambda pair: len(pair[0].rows))
    known: list[tuple[float, int]] = []
    for segment, own in others:
        for scores, rows in segment.stages(vector, top_k, 1, own):
            known += zip(scores.tolist(), rows.tolist(), strict=True)
    known = _best(known, top_k)
    if not largest[1].num_rows:
        yield known
    for scores, rows in largest[0].stages(vector, top_k, num_stages, largest[1]):
        yield _best([*known, *zip(scores.tolist(), rows.tolist(), strict=True)], top_k)


def appended(segments: Sequence[IndexSegment], new: IndexSegment) -> tuple[IndexSegment, ...]:
    """The segments plus one. Flat ones at most twice as large as those after them are merged, so that their number, and
    how often a vector is copied, is logarithmic; deleted rows are dropped."""
    kept = list(segments)
    while kept and kept[-1].is_flat and len(kept[-1].rows) <= 2 * len(new.rows):
        rows, vectors = zip(*map(_living, (kept.pop(), new)), strict=True)
        new = IndexSegment.flat(np.concatenate(rows), np.concatenate(vectors))
    return (*kept, new) if len(new.rows) else tuple(kept)


def _living(segment: IndexSegment) -> tuple[np.ndarray, np.ndarray]:
    """Rows and vectors of a flat segment that were not deleted."""
    vectors = segment.index.reconstruct_n(0, len(segment.rows))  # pyright: ignore[reportCallIssue]
    if segment.alive is None:
        return segment.rows, vectors
    return segment.rows[segment.alive], vectors[segment.alive]


def _is_in(rows: np.ndarray, some: np.ndarray) -> np.ndarray:
    """bool [rows]: which of `rows` are in `some`; both ascending."""
    if not len(some):
        return np.zeros(len(rows), np.bool_)
    places = np.minimum(np.searchsorted(some, rows), len(some) - 1)
    return some[places] == rows


def _best(hits: list[tuple[float, int]], top_k: int) -> list[tuple[float, int]]:
    return sorted(hits, key=lambda hit: (-hit[0], hit[1]))[:top_k]
