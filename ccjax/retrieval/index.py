"""The index of passages: documents and vectors on disk, searched by words, by similarity and by metadata, and updated
during searches.

`passages.sqlite` is authoritative; a file of clustered vectors beside it may be deleted. Several processes may share a
directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ccjax.retrieval.catalog import Catalog, IndexedDocument, IndexSettings, IndexUnusableError, Passage
from ccjax.retrieval.filters import Filter
from ccjax.retrieval.vectors import Found, VectorView, build_clusters, clusters_path, is_in, load_clusters

_log = logging.getLogger(__name__)

LEAST_CLUSTERED = 50_000
"""Number of passages from which vectors are clustered: fewer are all compared in some milliseconds."""
_MOST_CHANGED = 0.1
"""Share of the clustered rows that may be new or deleted before they are clustered anew."""
_MOST_FILTERS = 16
_DEPTH = 50
"""Results of either search that are joined, at least."""
_RANK_OFFSET = 5
"""Of reciprocal rank fusion (Cormack, Clarke, Buettcher, SIGIR 2009), the sum over searches of 1 / (offset + rank).
Their 60 is for many searches; of two it prefers what both find late to what one finds first. 3 to 10 are alike: they
find more than 60 in two of four collections and no less in the others."""
_SCORE_WEIGHT = 0.05
"""Of the scores in that sum, from 0 for the last to 1 for the first of the joined results: ranks alone do not say that
one row of a table, or one pump, has the number or letter of the question and the next has not. With 0.05, 42 of 48 such
questions find theirs first instead of 34, other collections as many; with 0.2 MuSiQue loses."""
_LEAST_SHARE = 0.3
"""Passages below this share of the best bm25 do not count as found by words in a search by both: most questions share a
word with most passages, and ranks alone would say that the second is nearly as good as the only one with a number."""


@contextlib.contextmanager
def _naming_damage() -> Iterator[None]:
    """Translates SQLite errors: `IndexUnusableError` if the file is at fault, else OSError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_ERROR:
            raise OSError(f"the index: {error}") from None
        raise IndexUnusableError(f"damaged: {error}") from None


class PassageIndex:
    """Documents with one vector for each passage, or none. Thread-safe.

    A search sees every document as it is before or after a `write`, never in between. Passages whose vectors are not
    computed yet are found by words alone, and similarity counts as much as the share of passages that have vectors.

    Attributes:
      catalog: the documents; only `write` changes them.
    """

    def __init__(self, directory: Path | None, settings: IndexSettings) -> None:
        """Opens the index in `directory`, creating an empty one if there is none; None keeps it in memory.

        Raises:
          IndexUnusableError: it is damaged, or was not made with `settings`.
          OSError: its files cannot be opened or written.
        """
        self.settings = settings
        self._view = VectorView()
        self._noted: str | None = None
        self._stamp: int | None = None
        # Of the last filters, in a view: those of earlier ones are searched for the last time.
        self._allowed = functools.lru_cache(_MOST_FILTERS)(lambda view, where: self.catalog.rows(where))
        with _naming_damage():
            self.catalog = Catalog(directory, settings)
            try:
                self._sync()
            except BaseException:
                self.catalog.close()
                raise

    def __len__(self) -> int:
        return self._view.num_alive

    @property
    def num_pending(self) -> int:
        """Number of passages whose vectors are not computed yet."""
        return len(self._view.pending)

    # -- searching ---------------------------------------------------------------------------------------------

    def search(
        self, text: str | Sequence[str] | None, vector: np.ndarray | None, top_k: int, *, where: Filter | None = None
    ) -> list[Passage]:
        """The `top_k` best passages, best first; fewer if fewer exist, match the filter or resemble
        the query at all.

        Args:
          text: is searched by words, several as in `Catalog.search`; None to search by `vector` alone.
          vector: float32 [dim], is searched by similarity; None to search by words alone. A zero vector is similar to
            nothing. Of several, [n, dim], the nearest counts.

        Returns:
          Scores are inner products with `vector`, NaN where a passage has no vector yet, or without `vector` bm25. The
          order of a search by both is that of the sum over both of 1 / (5 + rank) and a small share of the score, ties
          in order of arrival.
        """
        ((passages, _),) = self.stages(text, vector, top_k, 1, where=where)
        return passages

    def stages(
        self,
        text: str | Sequence[str] | None,
        vector: np.ndarray | None,
        top_k: int,
        num_stages: int,
        *,
        where: Filter | None = None,
        weight: float = 1.0,
    ) -> Iterator[tuple[list[Passage], bool]]:
        """Preliminary results of `search` after each of at most `num_stages` parts of the search by similarity, and
        whether they are final: then they equal those of `search`.

        Args:
          weight: of the ranks by similarity in the sum; those by words have 1.
        """
        if vector is not None:
            if vector.shape[-1:] != (self.settings.dim,) or vector.ndim > 2 or not vector.size:
                raise ValueError(f"vector: wanted [{self.settings.dim}], got {vector.shape}")
            vector = np.atleast_2d(vector)
            vector = vector[vector.any(axis=1)] if vector.any() else vector[:1]
        depth = top_k if text is None or vector is None else max(_DEPTH, top_k)
        while True:
            view = self._view
            share = 1.0 - len(view.pending) / max(1, view.num_alive)
            with self.catalog.lock:
                allowed = None if where is None else self._allowed(view, where)
                by_words = [] if text is None or not view.num_alive else self._by_words(text, depth, allowed)
            if vector is not None:
                by_words = [hit for hit in by_words if hit[0] >= _LEAST_SHARE * by_words[0][0]]
            near: Iterator[tuple[Found, ...]] = iter([(Found(is_final=True),)])
            if vector is not None and vector.any():
                near = zip(*(view.stages(one, depth, num_stages, allowed) for one in vector), strict=True)
            for founds in near:
                found = Found.best(founds, depth)
                if (passages := self._passages(by_words, found, vector, top_k, view, share * weight)) is None:
                    break
                yield passages, found.is_final
                if found.is_final:
                    return

    def _by_words(
        self, text: str | Sequence[str], depth: int, allowed: np.ndarray | None
    ) -> Sequence[tuple[float, int]]:
        """See `Catalog.search`. What a filter allows is known, and evaluating it for each passage with one of the words
        takes longer than their scores."""
        if allowed is None:
            return self.catalog.search(text, depth)
        found = self.catalog.search(text, None)
        mask = is_in(np.array([row for _, row in found], np.int64), allowed)
        return list(itertools.compress(found, mask))[:depth]

    def _passages(
        self,
        by_words: Sequence[tuple[float, int]],
        near: Found,
        vector: np.ndarray | None,
        top_k: int,
        view: VectorView,
        weight: float,
    ) -> list[Passage] | None:
        """The results; None if a passage was deleted since, so that `view` is out of date."""
        sums: dict[int, float] = {}
        by_meaning = list(zip(near.scores.tolist(), near.rows.tolist(), strict=True))
        for share, found in ((weight, by_meaning), (1.0, by_words)):
            span = found[0][0] - found[-1][0] if found else 0.0
            for rank, (score, row) in enumerate(found, 1):
                relative = (score - found[-1][0]) / span if span > 0 else 1.0
                sums[row] = sums.get(row, 0.0) + share * (1 / (_RANK_OFFSET + rank) + _SCORE_WEIGHT * relative)
        scores = {row: score for score, row in by_words}
        # Where one is first by words and another by meaning, words decide: names and numbers differ in them alone.
        best = sorted(sums, key=lambda row: (-sums[row], -scores.get(row, 0.0), row))[:top_k]
        with self.catalog.lock:
            known = self.catalog.passages(best)
            if len(known) < len(best):
                if self._view is view:
                    self._sync()  # another process deleted it
                return None
            if vector is not None:
                scores = {row: score for score, row in by_meaning}
                others = self.catalog.some_vectors([row for row in best if row not in scores])
                scores |= {row: float((vector @ other).max()) for row, other in others.items()}
        return [dataclasses.replace(known[row], score=scores.get(row, math.nan)) for row in best]

    # -- writing -----------------------------------------------------------------------------------------------

    def write(
        self,
        documents: Sequence[IndexedDocument] = (),
        vectors: np.ndarray | None = None,
        *,
        removed: Collection[str] = (),
        digests: Mapping[str, str | None] | None = None,
    ) -> None:
        """Adds and removes documents, all or nothing. A document of the same id is replaced.

        Args:
          vectors: float32 [passages, dim], in the order of the documents' passages; NaN in the rows of those that
            `fill` adds later.
          removed: document ids; unknown ones are ignored.
          digests: notes to keep about sources, None to forget one.
        """
        ids = [document.document_id for document in documents]
        if len(set(ids)) < len(ids):
            raise ValueError("documents: wanted every document_id once")
        counts = [len(document.passages) for document in documents]
        wanted = (sum(counts), self.settings.dim)
        if vectors is None:
            vectors = np.empty((0 if self.settings.dim else sum(counts), self.settings.dim), np.float32)
        if vectors.shape != wanted:
            raise ValueError(f"vectors: wanted {list(wanted)}, got {list(vectors.shape)}")
        with self.catalog.lock:
            with self.catalog.transaction():
                gone = self.catalog.remove([*removed, *ids])
                parts = np.split(vectors, np.cumsum(counts)[:-1]) if documents else []
                rows = [self.catalog.add(document, part) for document, part in zip(documents, parts, strict=True)]
                for source, digest in (digests or {}).items():
                    self.catalog.set_digest(source, digest)
            if self._stamp != self.catalog.stamp:
                self._sync()
            elif len(gone) or rows:
                view = self._view.without(gone) if len(gone) else self._view
                self._show(view.plus(np.concatenate(rows), vectors) if rows else view)

    def pending(self, count: int) -> dict[int, Passage]:
        """By row, at most `count` passages whose vectors are not computed yet, beginning anywhere, so that several
        processes seldom compute the same."""
        self.keep_up()
        rows = self._view.pending
        start = int(np.random.default_rng().integers(max(1, len(rows) - count + 1)))
        return self.catalog.passages(rows[start : start + count].tolist())

    def fill(self, rows: Sequence[int], vectors: np.ndarray) -> None:
        """Adds the vectors of passages that are `pending`, float32 [n, dim]; those deleted meanwhile are ignored."""
        with self.catalog.lock:
            with self.catalog.transaction():
                self.catalog.add_vectors(rows, vectors)
            if self._stamp != self.catalog.stamp:
                self._sync()
            is_pending = is_in(np.array(rows, np.int64), self._view.pending)
            self._show(self._view.filled(np.array(rows, np.int64)[is_pending], vectors[is_pending]))

    def keep_up(self) -> None:
        """Reads what other processes wrote, if they did."""
        with self.catalog.lock:
            if self._stamp != self.catalog.stamp:
                self._sync()

    def improve(self) -> bool:
        """Clusters the vectors if there are many and too much has changed; False if nothing was done. Takes minutes for
        a million passages; searches and writes continue meanwhile."""
        view, path, dim = self._view, self.catalog.path, self.settings.dim
        if path is None or not dim or not self._is_due(view):
            return False
        noted = None
        if view.num_alive >= LEAST_CLUSTERED:
            num_rows = int(np.searchsorted(self.catalog.rows(), view.last_row, side="right"))
            batches = functools.partial(self.catalog.vectors, dim, last=view.last_row)
            noted = build_clusters(batches, num_rows, dim, path.parent)
        with self.catalog.lock:
            with self.catalog.transaction():
                self.catalog.set_value("clusters", noted)
            self._noted = ""  # a damaged file may have been replaced by its like
            self._sync()
            noted = self._noted
        for other in path.parent.glob("vectors-*.faiss"):
            if noted is None or other != clusters_path(path.parent, noted):
                other.unlink(missing_ok=True)
        return True

    def _is_due(self, view: VectorView) -> bool:
        clusters, num_alive = view.clusters, view.num_alive
        if len(view.pending):
            return False
        if clusters is None or num_alive < LEAST_CLUSTERED:
            return (clusters is None) == (num_alive >= LEAST_CLUSTERED)
        num_changed = num_alive - clusters.num_alive + len(clusters.rows) - clusters.num_alive
        return num_changed > _MOST_CHANGED * len(clusters.rows)

    def close(self) -> None:
        """Frees the vectors and closes the file; no method may be called afterwards."""
        with self.catalog.lock:
            self._show(VectorView())
            self.catalog.close()

    # -- in step with the catalog ------------------------------------------------------------------------------

    def _show(self, view: VectorView) -> None:
        self._view = view
        self._allowed.cache_clear()  # which keeps earlier views alive

    def _sync(self) -> None:
        """Updates the view with what any process wrote."""
        view = self._view
        with self.catalog.transaction(writes=False):
            noted = self.catalog.get_value("clusters")
            if noted != self._noted:
                view, self._noted = self._clustered(noted), noted
            alive, dim = self.catalog.rows(), self.settings.dim
            new = alive[alive > view.last_row]
            view = view.plus(new, np.full((len(new), dim), np.nan, np.float32)).only(alive)
            if len(view.pending):
                parts = list(self.catalog.vectors(dim, after=int(view.pending[0]) - 1))
                rows, vectors = (
                    map(np.concatenate, zip(*parts, strict=True)) if parts else (new[:0], np.empty((0, dim)))
                )
                is_new = is_in(rows, view.pending)
                view = view.filled(rows[is_new], vectors[is_new])
            self._stamp = self.catalog.stamp
        self._show(view)

    def _clustered(self, noted: str | None) -> VectorView:
        """The clusters alone; nothing if their file is damaged, since it can be rebuilt."""
        if noted is None or self.catalog.path is None:
            return VectorView()
        try:
            return VectorView(clusters=load_clusters(self.catalog.path.parent, noted))
        except ValueError as error:
            _log.warning("all vectors are compared until the index is rebuilt: %s", error)
            return VectorView()
