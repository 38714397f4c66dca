"""The index of passages: documents and vectors on disk, searched by words, by similarity and by metadata, and updated
during searches.

`passages.sqlite` is authoritative; a file of clustered vectors beside it may be deleted. Several processes may share a
directory.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from ccjax.retrieval.catalog import (
    Catalog,
    IndexedDocument,
    IndexSettings,
    IndexUnusableError,
    PassageRow,
    naming_damage,
)
from ccjax.retrieval.filters import Filter
from ccjax.retrieval.vectors import Found, VectorView, build_clusters, load_clusters

__all__ = ["IndexSettings", "IndexUnusableError", "IndexedDocument", "PassageIndex"]

_log = logging.getLogger(__name__)

LEAST_CLUSTERED = 50_000
"""Number of passages from which vectors are clustered: fewer are all compared in some milliseconds."""
_MOST_CHANGED = 0.1
"""Share of the clustered rows that may be new or deleted before they are clustered anew."""
_MOST_FILTERS = 16
_DEPTH = 50
"""Results of either search that are joined, at least."""
_RANK_OFFSET = 60
"""Of Cormack, Clarke, Buettcher: Reciprocal Rank Fusion (SIGIR 2009): the sum over searches of 1 / (60 + rank)."""
_LEAST_SHARE = 0.5
"""Passages below this share of the best bm25 do not count as found by words in a search by both: most questions share a
word with most passages, and ranks alone would say that the second is nearly as good as the only one with a number."""
Result = TypeVar("Result")
Hits = list[tuple[float, PassageRow]]


@dataclasses.dataclass(frozen=True)
class _View:
    """Consistent view for one search; rows up to `last_row` were seen."""

    vectors: VectorView = VectorView()
    num_passages: int = 0
    last_row: int = 0


class PassageIndex:
    """Documents with one vector for each passage, or none. Thread-safe.

    A search sees every document as it is before or after a `write`, never in between.
    """

    def __init__(self, catalog: Catalog, settings: IndexSettings) -> None:
        """Use `PassageIndex.open`."""
        self.settings = settings
        self._catalog = catalog
        self._lock = threading.RLock()
        self._view = _View()
        self._noted: dict | None = None
        self._stamp: int | None = None
        self._filtered: dict[Filter, tuple[_View, np.ndarray]] = {}
        self._sync()

    @classmethod
    def open(cls, directory: Path | None, settings: IndexSettings) -> PassageIndex:
        """Opens the index in `directory`, creating an empty one if there is none; None keeps it in memory.

        Raises:
          IndexUnusableError: it is damaged, or was not made with `settings`.
          OSError: its files cannot be opened or written.
        """
        catalog = Catalog.open(directory, settings)
        try:
            with naming_damage():
                return cls(catalog, settings)
        except BaseException:
            catalog.close()
            raise

    def __len__(self) -> int:
        return self._view.num_passages

    @property
    def is_clustered(self) -> bool:
        """False while all vectors are compared."""
        return self._view.vectors.clusters is not None

    @property
    def num_documents(self) -> int:
        """Number of documents, including those without passages."""
        return self._read(self._catalog.count_documents)

    def versions(self) -> dict[str, tuple[str, str]]:
        """(version, source) of every document by document id, sorted."""
        return self._read(self._catalog.versions)

    def digests(self) -> dict[str, str]:
        """The digests of sources stored by `write`."""
        return self._read(self._catalog.digests)

    def has(self, document_id: str) -> bool:
        """True if the document exists."""
        return self._read(lambda: self._catalog.has(document_id))

    def document(self, document_id: str) -> list[PassageRow]:
        """The passages of a document in reading order; empty if it is unknown."""
        return self._read(lambda: self._catalog.document(document_id))

    def some_of(self, document_id: str, numbers: Sequence[int]) -> list[PassageRow]:
        """The passages of a document with these numbers; unknown ones are left out."""
        return self._read(lambda: self._catalog.some_of(document_id, numbers))

    def known_vectors(self, document_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Text -> vector, float32 [dim], of the passages of some documents."""
        return self._read(lambda: self._catalog.known_vectors(document_ids))

    # -- searching ---------------------------------------------------------------------------------------------

    def search(
        self, text: str | Sequence[str] | None, vector: np.ndarray | None, top_k: int, *, where: Filter | None = None
    ) -> Hits:
        """(score, passage) of the `top_k` best passages, best first; fewer if fewer exist, match the filter or resemble
        the query at all.

        Args:
          text: is searched by words, several as in `Catalog.search`; None to search by `vector` alone.
          vector: float32 [dim], is searched by similarity; None to search by words alone. A zero vector is similar to
            nothing. Of several, [n, dim], the nearest counts.

        Returns:
          Scores are inner products with `vector`, or without one bm25. The order of a search by both is that of the sum
          over both of 1 / (60 + rank), ties in order of arrival.
        """
        ((hits, _),) = self.stages(text, vector, top_k, 1, where=where)
        return hits

    def stages(
        self,
        text: str | Sequence[str] | None,
        vector: np.ndarray | None,
        top_k: int,
        num_stages: int,
        *,
        where: Filter | None = None,
    ) -> Iterator[tuple[Hits, bool]]:
        """Preliminary results of `search` after each of at most `num_stages` parts of the search by similarity, and
        whether they are final: then they equal those of `search`."""
        if vector is not None:
            if vector.shape[-1:] != (self.settings.dim,) or vector.ndim > 2 or not vector.size:
                raise ValueError(f"vector: wanted [{self.settings.dim}], got {vector.shape}")
            vector = np.atleast_2d(vector)
            vector = vector[vector.any(axis=1)] if vector.any() else vector[:1]
        depth = top_k if text is None or vector is None else max(_DEPTH, top_k)
        while True:
            view = self._view
            with self._lock:
                by_words = self._catalog.search(text, depth, where) if text is not None and view.num_passages else []
                allowed = None if where is None else self._allowed(view, where)
            if vector is not None:
                by_words = [hit for hit in by_words if hit[0] >= _LEAST_SHARE * by_words[0][0]]
            near: Iterator[tuple[Found, ...]] = iter([(Found(is_final=True),)])
            if vector is not None and vector.any():
                near = zip(*(view.vectors.stages(one, depth, num_stages, allowed) for one in vector), strict=True)
            for founds in near:
                found = Found.nearest(founds, depth)
                if (hits := self._passages(by_words, found, vector, top_k, view)) is None:
                    break
                yield hits, found.is_final
                if found.is_final:
                    return

    def neighbours(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows and the `count` rows most similar to each, (int64 [n], int64 [n, count]), in batches; see
        `VectorView.neighbours`. Without vectors, by words."""
        view = self._view
        if not self.settings.dim:
            for row, passage in self._read(lambda: list(self._catalog.texts())):
                hits = self._read(lambda text=passage: self._catalog.search(text, count + 1))
                others = [other for _, other in hits if other != row][:count]
                yield np.array([row]), np.array([others + [-1] * (count - len(others))], np.int64)
            return
        for rows, vectors in self._batches(view.last_row)():
            yield rows, view.vectors.neighbours(rows, vectors, count)

    def keys(self) -> dict[int, tuple[str, int]]:
        """Row -> document id and number of every passage."""
        return self._read(self._catalog.keys)

    def _passages(
        self,
        by_words: Sequence[tuple[float, int]],
        near: Found,
        vector: np.ndarray | None,
        top_k: int,
        view: _View,
    ) -> Hits | None:
        """The results; None if a passage was deleted since, so that `view` is out of date."""
        ranks: dict[int, float] = {}
        for ranking in (near.rows.tolist(), [row for _, row in by_words]):
            for rank, row in enumerate(ranking, 1):
                ranks[row] = ranks.get(row, 0.0) + 1.0 / (_RANK_OFFSET + rank)
        best = sorted(ranks, key=lambda row: (-ranks[row], row))[:top_k]
        with self._lock:
            known = self._catalog.passages(best)
            if len(known) < len(best):
                if self._view is view:
                    self._sync()  # another process deleted it
                return None
            scores = {row: score for score, row in by_words}
            if vector is not None:
                scores = dict(zip(near.rows.tolist(), near.scores.tolist(), strict=True))
                others = self._catalog.some_vectors([row for row in best if row not in scores])
                scores |= {row: float((vector @ other).max()) for row, other in others.items()}
        return [(scores[row], known[row]) for row in best]

    def _allowed(self, view: _View, where: Filter) -> np.ndarray:
        """The rows that match a filter, ascending; those of the last filters are remembered."""
        known, rows = self._filtered.pop(where, (None, np.empty(0, np.int64)))
        if known is not view:
            rows = self._catalog.rows(where)
        self._filtered[where] = view, rows
        while len(self._filtered) > _MOST_FILTERS:  # the least recently used one
            self._filtered.pop(next(iter(self._filtered)))
        return rows

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
          vectors: float32 [passages, dim], in the order of the documents' passages.
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
        with self._lock:
            with self._catalog.transaction():
                gone = self._catalog.remove([*removed, *ids])
                parts = np.split(vectors, np.cumsum(counts)[:-1]) if documents else []
                rows = [self._catalog.add(document, part) for document, part in zip(documents, parts, strict=True)]
                for source, digest in (digests or {}).items():
                    self._catalog.set_digest(source, digest)
            if self._stamp != self._catalog.stamp:
                self._sync()
                return
            view = self._view
            seen = view.vectors.without(gone) if len(gone) else view.vectors
            added = np.concatenate(rows) if rows else np.empty(0, np.int64)
            if len(added) and self.settings.dim:
                seen = seen.plus(added, vectors)
            last_row = int(added[-1]) if len(added) else view.last_row
            self._show(_View(seen, view.num_passages - len(gone) + len(added), last_row))

    def improve(self) -> bool:
        """Clusters the vectors if there are many and too much has changed; False if nothing was done. Takes minutes for
        a million passages; searches and writes continue meanwhile."""
        view, path = self._view, self._catalog.path
        if path is None or not self._is_due(view.vectors):
            return False
        noted = None
        if view.vectors.num_alive >= LEAST_CLUSTERED:
            num_rows = int(np.searchsorted(self._read(self._catalog.rows), view.last_row, side="right"))
            noted = build_clusters(self._batches(view.last_row), num_rows, self.settings.dim, path.parent)
        with self._lock:
            with self._catalog.transaction():
                self._catalog.set_value("clusters", noted)
            self._noted = {}  # a damaged file may have been replaced by its like
            self._sync()
            noted = self._noted or {}
        for other in path.parent.glob("vectors-*.faiss"):
            if other.name != noted.get("file"):
                other.unlink(missing_ok=True)
        return True

    def _is_due(self, vectors: VectorView) -> bool:
        clusters, num_alive = vectors.clusters, vectors.num_alive
        if clusters is None or num_alive < LEAST_CLUSTERED:
            return (clusters is None) == (num_alive >= LEAST_CLUSTERED)
        num_changed = num_alive - clusters.num_alive + len(clusters.rows) - clusters.num_alive
        return num_changed > _MOST_CHANGED * len(clusters.rows)

    def close(self) -> None:
        """Frees the vectors and closes the file; no method may be called afterwards."""
        with self._lock:
            self._view = _View()
            self._catalog.close()

    # -- in step with the catalog ------------------------------------------------------------------------------

    def _show(self, view: _View) -> None:
        self._view = view
        self._filtered.clear()  # cached selections would only keep earlier vectors alive

    def _read(self, function: Callable[[], Result]) -> Result:
        with self._lock:
            return function()

    def _batches(self, last_row: int) -> Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]:
        """Rows and vectors up to a row, in batches; writes may happen in between."""

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            after = 0
            while True:
                with self._lock:
                    found = next(self._catalog.vectors(self.settings.dim, after=after), None)
                if found is None:
                    return
                rows, vectors = found
                after = int(rows[-1])
                upto = int(np.searchsorted(rows, last_row, side="right"))
                if upto:
                    yield rows[:upto], vectors[:upto]
                if upto < len(rows):
                    return

        return batches

    def _sync(self) -> None:
        """Updates the view with what any process wrote."""
        view = self._view
        with self._catalog.snapshot():
            noted = self._catalog.get_value("clusters")
            if noted != self._noted:
                view, self._noted = self._clustered(noted), noted
            new = list(self._catalog.vectors(self.settings.dim, after=view.last_row)) if self.settings.dim else []
            alive = self._catalog.rows()
            stamp = self._catalog.stamp
        seen = view.vectors
        for rows, vectors in new:
            seen = seen.plus(rows, vectors)
        last_row = max(view.last_row, int(alive[-1]) if len(alive) else 0)
        self._show(_View(seen.only(alive), len(alive), last_row))
        self._stamp = stamp

    def _clustered(self, noted: dict | None) -> _View:
        """A view of the clusters alone; empty if their file is damaged, since it can be rebuilt."""
        if noted is None or self._catalog.path is None:
            return _View()
        try:
            clusters = load_clusters(self._catalog.path.parent, noted)
        except ValueError as error:
            _log.warning("all vectors are compared until the index is rebuilt: %s", error)
            return _View()
        return _View(VectorView(clusters=clusters), last_row=int(noted["last_row"]))
