"""The index of passages: documents and vectors on disk, searched by similarity and metadata, and updated during
searches.

`passages.sqlite` is authoritative. Vectors are searched in segments built from it; of many vectors, most are in a
trained index, a memory-mapped file that may be deleted. Several processes may share a directory.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np

from ccjax.config.documents import DocumentOptions, IndexKind
from ccjax.retrieval.catalog import (
    Catalog,
    IndexedDocument,
    IndexSettings,
    IndexUnusableError,
    PassageRow,
    naming_damage,
)
from ccjax.retrieval.filters import Filter
from ccjax.retrieval.segments import Chosen, IndexSegment, appended, neighbours, search
from ccjax.retrieval.trained import Progress, Trained, TrainedKind, build, load

__all__ = ["IndexKind", "IndexSettings", "IndexUnusableError", "IndexedDocument", "PassageIndex"]

_log = logging.getLogger(__name__)

_DEFAULTS = DocumentOptions()
INDEX_KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
LEAST_TRAINED = 50_000
"""Number of passages from which `auto` trains an IVF index: fewer are searched exactly in some milliseconds."""
_MOST_UNTRAINED = 0.1
"""Share of the trained rows that may be new or deleted before the index is rebuilt."""
_RETRAIN_AT = 2.0
"""Growth factor of the rows since training from which clusters are retrained."""
_MOST_FILTERS = 16
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class _View:
    """Consistent view for one search."""

    segments: tuple[IndexSegment, ...] = ()
    trained: Trained | None = None
    last_row: int = 0

    @property
    def num_passages(self) -> int:
        return sum(segment.num_alive for segment in self.segments)


class PassageIndex:
    """Documents with one vector for each passage. Thread-safe.

    A search sees every document as it is before or after a `write`, never in between.
    """

    def __init__(self, catalog: Catalog, settings: IndexSettings, kind: IndexKind, recall: float) -> None:
        """Use `PassageIndex.open`."""
        self.settings = settings
        self._catalog = catalog
        self._kind: IndexKind = kind
        self._recall = recall
        self._lock = threading.RLock()
        self._view = _View()
        self._stamp: int | None = None
        self._filtered: dict[Filter, tuple[_View, list[Chosen]]] = {}
        self._sync()

    @classmethod
    def open(
        cls,
        directory: Path | None,
        settings: IndexSettings,
        *,
        kind: IndexKind = _DEFAULTS.index_kind,
        recall: float = _DEFAULTS.index_recall,
    ) -> PassageIndex:
        """Opens the index in `directory`, creating an empty one if there is none; None keeps it in memory.

        Args:
          kind: `flat` searches every vector; `ivf` and `hnsw` those near the query (`ccjax.retrieval.trained`), once
            `improve` trained them; `auto` is `flat` below 50,000 passages and `ivf` above. In memory always `flat`.
          recall: share of the true nearest passages that a trained index should find, above 0 and below 1.

        Raises:
          IndexUnusableError: it is damaged, or was not made with `settings`.
          OSError: its files cannot be opened or written.
          ValueError: an argument is invalid.
        """
        if kind not in INDEX_KINDS:
            raise ValueError(f"index_kind: wanted one of {', '.join(INDEX_KINDS)}, got {kind!r}")
        if not isinstance(recall, float) or not 0.0 < recall < 1.0:
            raise ValueError(f"index_recall: wanted a number above 0 and below 1, got {recall!r}")
        catalog = Catalog.open(directory, settings)
        try:
            with naming_damage():
                return cls(catalog, settings, "flat" if directory is None else kind, recall)
        except BaseException:
            catalog.close()
            raise

    def __len__(self) -> int:
        return self._view.num_passages

    @property
    def trained(self) -> Trained | None:
        """The trained index that is in use; None while all vectors are searched."""
        return self._view.trained

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

    # -- searching ---------------------------------------------------------------------------------------------

    def search(self, vector: np.ndarray, top_k: int, *, where: Filter | None = None) -> list[tuple[float, PassageRow]]:
        """(score, passage) of the `top_k` best passages, best first, ties in order of arrival.

        Returns fewer if fewer exist or match the filter, and none for a zero `vector`, which is similar to nothing.
        """
        ((hits, _),) = self.stages(vector, top_k, 1, where=where)
        return hits

    def stages(
        self, vector: np.ndarray, top_k: int, num_stages: int, *, where: Filter | None = None
    ) -> Iterator[tuple[list[tuple[float, PassageRow]], bool]]:
        """Preliminary results of `search` after each of at most `num_stages` parts of the work, and whether they are
        final: then they equal those of `search`."""
        while True:
            view = self._view
            if not view.segments or not vector.any():
                yield [], True
                return
            if vector.shape != (self.settings.dim,):
                raise ValueError(f"vector: wanted [{self.settings.dim}], got {vector.shape}")
            found = search(view.segments, self._chosen(view, where), vector, top_k, num_stages)
            hits = next(found)
            for better in found:
                if (known := self._passages(hits, view)) is None:
                    break
                yield known, False
                hits = better
            else:
                if (known := self._passages(hits, view)) is not None:
                    yield known, True
                    return

    def neighbours(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows and the `count` rows most similar to each, (int64 [n], int64 [n, count]), in batches; see
        `ccjax.retrieval.segments.neighbours`."""
        view = self._view
        for rows, vectors in self._batches(view.last_row)():
            yield rows, neighbours(view.segments, rows, vectors, count)

    def keys(self) -> dict[int, tuple[str, int]]:
        """Row -> document id and number of every passage."""
        return self._read(self._catalog.keys)

    def recall(self, vectors: np.ndarray, top_k: int) -> float:
        """Share of the true `top_k` nearest passages of some queries that `search` finds; reads every vector.

        Args:
          vectors: float32 [queries, dim].
        """
        view = self._view
        best = np.full((len(vectors), top_k), -np.inf, np.float32)
        for _, some in self._batches(view.last_row)():
            best = -np.sort(-np.concatenate([best, vectors @ some.T], axis=1), axis=1)[:, :top_k]
        num_found = 0
        for vector, scores in zip(vectors, best, strict=True):
            *_, hits = search(view.segments, self._chosen(view, None), vector, top_k, 1)
            num_found += sum(score >= scores[-1] - 1e-5 for score, _ in hits)
        return num_found / max(1, int(np.isfinite(best).sum()))

    def _passages(self, hits: Sequence[tuple[float, int]], view: _View) -> list[tuple[float, PassageRow]] | None:
        """The texts of the results; None if a passage was deleted since, so that `view` is out of date."""
        with self._lock:
            known = self._catalog.passages([row for _, row in hits])
            if len(known) < len(hits):
                if self._view is view:
                    self._sync()  # another process deleted it
                return None
        return [(score, known[row]) for score, row in hits]

    def _chosen(self, view: _View, where: Filter | None) -> list[Chosen]:
        """The rows that may be found, segment by segment."""
        if where is None:
            return [segment.living for segment in view.segments]
        with self._lock:
            known, chosen = self._filtered.pop(where, (None, []))
            if known is not view:
                rows = self._catalog.rows(where)
                chosen = [segment.choose(rows) for segment in view.segments]
            self._filtered[where] = view, chosen
            while len(self._filtered) > _MOST_FILTERS:  # the least recently used one
                self._filtered.pop(next(iter(self._filtered)))
            return chosen

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
        vectors = np.empty((0, self.settings.dim), np.float32) if vectors is None else vectors
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
            segments = tuple(segment.without(gone) for segment in view.segments)
            added = np.concatenate(rows) if rows else np.empty(0, np.int64)
            if len(added):
                segments = appended(segments, IndexSegment.flat(added, vectors))
                view = dataclasses.replace(view, last_row=int(added[-1]))
            self._show(dataclasses.replace(view, segments=tuple(segment for segment in segments if segment.num_alive)))

    def improve(self, progress: Progress = lambda stage, done, total: None) -> Trained | None:
        """Trains the index of `kind` if it is missing or too much has changed; None if nothing was done. Takes minutes
        for a million passages; searches and writes continue meanwhile.

        Args:
          progress: called as (`train` or `add`, done, total).
        """
        view, directory = self._view, self._directory
        kind = self._trained_kind(view)
        old = view.trained
        if directory is None or not self._is_due(view, kind):
            return None
        if kind is None:
            trained = None
        else:
            keeps = old is not None and old.kind == kind == "ivf" and view.num_passages < _RETRAIN_AT * old.num_trained
            rows = self._read(self._catalog.rows)
            trained = build(
                kind,
                self._batches(view.last_row),
                int(np.searchsorted(rows, view.last_row, side="right")),
                self.settings.dim,
                directory,
                recall=self._recall,
                like=next((segment for segment in view.segments if not segment.is_flat), None) if keeps else None,
                num_trained=old.num_trained if old is not None else 0,
                progress=progress,
            )
        made = _View() if trained is None else _View((load(trained, directory),), trained, trained.last_row)
        with self._lock:
            with self._catalog.transaction():
                self._catalog.set_value("trained", None if trained is None else dataclasses.asdict(trained))
            self._sync(made)
            noted = self._catalog.get_value("trained") or {}
        for path in directory.glob("vectors-*.faiss"):
            if path.name != noted.get("file"):
                path.unlink(missing_ok=True)
        return trained

    def close(self) -> None:
        """Frees the vectors and closes the file; no method may be called afterwards."""
        with self._lock:
            self._view = _View()
            self._catalog.close()

    @property
    def _directory(self) -> Path | None:
        return None if self._catalog.path is None else self._catalog.path.parent

    def _trained_kind(self, view: _View) -> TrainedKind | None:
        if self._kind == "auto":
            return "ivf" if view.num_passages >= LEAST_TRAINED else None
        if self._kind == "flat" or not view.num_passages:
            return None
        return self._kind

    def _is_due(self, view: _View, kind: TrainedKind | None) -> bool:
        trained = view.trained
        if trained is None or kind != trained.kind:
            return (trained and trained.kind) != kind
        flat = sum(segment.num_alive for segment in view.segments if segment.is_flat)
        num_dead = trained.num_rows - (view.num_passages - flat)
        return flat + num_dead > max(_MOST_UNTRAINED * trained.num_rows, math.sqrt(LEAST_TRAINED))

    # -- in step with the catalog ------------------------------------------------------------------------------

    def _show(self, view: _View) -> None:
        self._view = view
        self._filtered.clear()  # cached selections would only keep earlier segments alive

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

    def _sync(self, view: _View | None = None) -> None:
        """Updates the segments, or those of `view`, with what any process wrote."""
        view = view or self._view
        with self._catalog.snapshot():
            trained = self._stored_trained()
            if trained != view.trained:
                view = self._opened(trained)
            new = list(self._catalog.vectors(self.settings.dim, after=view.last_row))
            alive = self._catalog.rows()
            stamp = self._catalog.stamp
        segments, last_row = view.segments, view.last_row
        if new:
            rows, vectors = np.concatenate([rows for rows, _ in new]), np.concatenate([some for _, some in new])
            segments, last_row = appended(segments, IndexSegment.flat(rows, vectors)), int(rows[-1])
        living = (segment.without(np.setdiff1d(segment.rows, alive, assume_unique=True)) for segment in segments)
        segments = tuple(segment for segment in living if segment.num_alive)
        self._show(dataclasses.replace(view, segments=segments, last_row=last_row))
        self._stamp = stamp

    def _stored_trained(self) -> Trained | None:
        noted = self._catalog.get_value("trained")
        try:
            return None if noted is None else Trained(**noted)
        except TypeError as error:
            raise IndexUnusableError(f"damaged: {error}") from None

    def _opened(self, trained: Trained | None) -> _View:
        """A view of the trained index alone; empty if its file is damaged, since it can be rebuilt."""
        if trained is None or self._directory is None:
            return _View()
        try:
            return _View((load(trained, self._directory),), trained, trained.last_row)
        except IndexUnusableError as error:
            _log.warning("all vectors are searched until the index is rebuilt: %s", error)
            return _View()
