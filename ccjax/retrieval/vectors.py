"""Passage vectors in memory and, from many passages on, clustered in a memory-mapped file (faiss' IVF); searched at
once or in stages (RAGCache sec. 5.3).

Views are immutable: a search keeps the one it began with.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

Batches = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Starts over a stream of (rows int64 [n], vectors float32 [n, dim]), rows ascending."""

_STAGE_ROWS = 8192
"""Least rows in memory that are searched between two results."""
_POINTS_PER_CLUSTER = 40  # faiss warns below 39
_PROBED_SHARE, _LEAST_PROBED = 1 / 64, 8
_FEW = 0.1
"""If a search may find at most this share of the clustered rows, it reads all clusters: those near the query may hold
none of them."""
_faiss: Any = faiss  # its type stubs know neither parameters nor the calls that NumPy arrays are wrapped in


@dataclasses.dataclass(frozen=True)
class Found:
    """The best rows so far, best first.

    Attributes:
      rows: int64; fewer than requested if fewer were found.
      scores: float32, the inner products.
      is_final: nothing is left to search.
    """

    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    scores: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))
    is_final: bool = False

    @classmethod
    def best(cls, founds: Sequence[Found], top_k: int) -> Found:
        """The best of several searches, equal ones by row, of a row the best score; final if the last of them is. Rows
        below 0 and scores of -inf are nothing."""
        rows = np.concatenate([found.rows for found in founds])
        scores = np.concatenate([found.scores for found in founds])
        order = np.lexsort((rows, -scores))
        order = order[(rows[order] >= 0) & (scores[order] > -np.inf)]
        order = order[np.sort(np.unique(rows[order], return_index=True)[1])][:top_k]
        return cls(rows[order], scores[order], founds[-1].is_final)


@dataclasses.dataclass(frozen=True)
class Clusters:
    """An IVF index by inner product whose own ids count from 0.

    Attributes:
      rows: int64 [n], ascending, by those ids.
      alive: bool [n], False for deleted rows.
    """

    index: Any
    rows: np.ndarray
    alive: np.ndarray

    @functools.cached_property
    def num_alive(self) -> int:
        """Number of rows that are not deleted."""
        return int(np.count_nonzero(self.alive))

    def stages(self, query: np.ndarray, top_k: int, num_stages: int, allowed: np.ndarray | None) -> Iterator[Found]:
        """See `VectorView.stages`."""
        mask = self.alive if allowed is None else is_in(self.rows, allowed)
        num_chosen = self.num_alive if allowed is None else int(np.count_nonzero(mask))
        if not num_chosen:
            return
        bits = None if num_chosen == len(self.rows) else np.packbits(mask, bitorder="little")
        selector = None if bits is None else _faiss.IDSelectorBitmap(bits)
        probes = self.index.nlist if num_chosen <= _FEW * len(self.rows) else self.index.nprobe
        for found in staged_search(
            self.index, query, top_k, num_stages=num_stages, selector=selector, num_probes=probes
        ):
            yield dataclasses.replace(found, rows=self.rows[found.rows])


@dataclasses.dataclass(frozen=True, eq=False)
class VectorView:
    """All passages and their vectors, which may have 0 dimensions, at one moment.

    Attributes:
      rows: int64 [n], ascending, of those in memory; they are behind the clusters' rows.
      alive: bool [n], False for deleted rows.
      vectors: float32 [n, dim], NaN in the rows whose vectors are not computed yet; these are not found.
    """

    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    alive: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.bool_))
    vectors: np.ndarray | None = None
    clusters: Clusters | None = None

    @property
    def num_alive(self) -> int:
        """Number of rows that are not deleted."""
        return int(np.count_nonzero(self.alive)) + (0 if self.clusters is None else self.clusters.num_alive)

    @property
    def last_row(self) -> int:
        """The last row; 0 without any."""
        last = self.rows if len(self.rows) or self.clusters is None else self.clusters.rows
        return int(last[-1]) if len(last) else 0

    @functools.cached_property
    def pending(self) -> np.ndarray:
        """int64, ascending: the rows whose vectors are not computed yet."""
        if self.vectors is None or not self.vectors.shape[1]:
            return np.empty(0, np.int64)
        return self.rows[self.alive & np.isnan(self.vectors[:, 0])]

    def filled(self, rows: np.ndarray, vectors: np.ndarray) -> VectorView:
        """With the vectors, float32 [n, dim], of some rows in memory, int64 [n]."""
        assert self.vectors is not None
        filled = self.vectors.copy()
        filled[np.searchsorted(self.rows, rows)] = vectors
        return dataclasses.replace(self, vectors=filled)

    def plus(self, rows: np.ndarray, vectors: np.ndarray) -> VectorView:
        """With more rows, int64 [n], and their vectors, float32 [n, dim]."""
        if self.vectors is not None:
            rows, vectors = np.concatenate([self.rows, rows]), np.concatenate([self.vectors, vectors])
        alive = np.concatenate([self.alive, np.ones(len(rows) - len(self.alive), np.bool_)])
        return VectorView(rows, alive, np.ascontiguousarray(vectors, np.float32), self.clusters)

    def only(self, alive: np.ndarray) -> VectorView:
        """With those of its rows that are in `alive` (int64, ascending)."""
        return self._kept(lambda rows: is_in(rows, alive))

    def without(self, gone: np.ndarray) -> VectorView:
        """Without some rows (int64, ascending)."""
        return self._kept(lambda rows: ~is_in(rows, gone))

    def _kept(self, mask_of: Callable[[np.ndarray], np.ndarray]) -> VectorView:
        """With the rows of a mask; the vectors of deleted ones are freed once they are more than half."""
        clusters = self.clusters
        if clusters is not None:
            clusters = Clusters(clusters.index, clusters.rows, clusters.alive & mask_of(clusters.rows))
        view = dataclasses.replace(self, alive=self.alive & mask_of(self.rows), clusters=clusters)
        if view.vectors is None or 2 * np.count_nonzero(view.alive) >= len(view.alive):
            return view
        alive = view.alive
        return VectorView(view.rows[alive], alive[alive], view.vectors[alive], clusters)

    def stages(
        self, query: np.ndarray, top_k: int, num_stages: int = 1, allowed: np.ndarray | None = None
    ) -> Iterator[Found]:
        """The best rows for `query` (float32 [dim]) after each of at most `num_stages` parts of the work, at least one:
        of clusters if there are any, else of the rows in memory. The last result does not depend on their number.

        Args:
          allowed: rows that may be found, ascending, none of them deleted; None for all.
        """
        best, num_rows = Found(), len(self.rows)
        for start, end in _parts(num_rows, min(num_stages, num_rows // _STAGE_ROWS) if self.clusters is None else 1):
            best = Found.best([best, self._nearest(slice(start, end), query, top_k, allowed)], top_k)
            if end < num_rows:
                yield best
        if self.clusters is not None:
            known = best
            for found in self.clusters.stages(query, top_k, num_stages, allowed):
                best = Found.best([known, found], top_k)
                if not found.is_final:
                    yield best
        yield dataclasses.replace(best, is_final=True)

    def _nearest(self, some: slice, query: np.ndarray, top_k: int, allowed: np.ndarray | None) -> Found:
        """Some rows in memory that may be among the best, as every one is compared; in no order."""
        if self.vectors is None:
            return Found()
        rows, vectors = self.rows[some], self.vectors[some]
        scores = np.empty(len(rows), np.float32)
        pointers = [_faiss.swig_ptr(array) for array in (scores, query, vectors)]
        _faiss.fvec_inner_products_ny(*pointers, len(query), len(rows))
        chosen = ~np.isnan(scores) & (self.alive[some] if allowed is None else is_in(rows, allowed))
        scores, rows = scores[chosen], rows[chosen]
        if 4 * top_k < len(scores):
            near = scores >= np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
            scores, rows = scores[near], rows[near]
        return Found(rows, scores)


def staged_search(
    index: Any,
    query: np.ndarray,
    top_k: int,
    *,
    num_stages: int = 1,
    selector: faiss.IDSelector | None = None,
    num_probes: int | None = None,
) -> Iterator[Found]:
    """The best rows of an IVF index after each of at most `num_stages` groups of clusters, the nearest clusters first.
    The last result equals that of `index.search`, except for the choice among rows of equal score.

    Args:
      query: float32 [dim].
      selector: rows that may be found; None for all.
      num_probes: number of clusters to search instead of `index.nprobe`.
    """
    vector, most = np.ascontiguousarray(query, np.float32)[None], min(num_probes or index.nprobe, index.nlist)
    distances, clusters = index.quantizer.search(vector, most)
    best = Found()
    for start, end in _parts(most, num_stages):
        own = [np.ascontiguousarray(part[:, start:end]) for part in (clusters, distances)]
        scores, rows = np.empty((1, top_k), np.float32), np.empty((1, top_k), np.int64)
        # The form that takes parameters: `search_preassigned` itself would need `index.nprobe` changed.
        params = _faiss.SearchParametersIVF(nprobe=end - start, sel=selector)
        pointers = [_faiss.swig_ptr(array) for array in (vector, *own, scores, rows)]
        index.search_preassigned_c(1, pointers[0], top_k, *pointers[1:], False, params)
        best = Found.best([best, Found(rows[0], scores[0], end == most)], top_k)
        yield best


def build_clusters(batches: Batches, num_rows: int, dim: int, directory: Path) -> str:
    """Writes an IVF index of all rows of `batches` to a new file in `directory`; returns the sha256 (hex) of the file,
    which it is named by. Takes minutes for a million rows."""
    num_clusters = max(1, min(2 ** round(math.log2(4.0 * math.sqrt(num_rows))), num_rows // 16))
    is_sample = np.zeros(num_rows, np.bool_)
    is_sample[np.random.default_rng(0).permutation(num_rows)[: num_clusters * _POINTS_PER_CLUSTER]] = True
    sample, start = [], 0
    for rows, vectors in batches():
        sample.append(vectors[is_sample[start : start + len(rows)]])
        start += len(rows)
    index: Any = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, num_clusters, faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid, index.cp.min_points_per_centroid = _POINTS_PER_CLUSTER, 1
    index.train(np.concatenate(sample))
    mapped = faiss.IndexIDMap(index)
    for rows, vectors in batches():
        mapped.add_with_ids(vectors, rows)  # pyright: ignore[reportCallIssue]
    temporary = directory / f".writing-{os.getpid()}.faiss"  # renamed when complete: no reader sees half a file
    try:
        faiss.write_index(mapped, str(temporary))
        with temporary.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        temporary.replace(clusters_path(directory, digest))
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def clusters_path(directory: Path, digest: str) -> Path:
    """The file with this sha256 (hex)."""
    return directory / f"vectors-{digest[:16]}.faiss"


def load_clusters(directory: Path, digest: str) -> Clusters:
    """The clusters that `build_clusters` wrote, their vectors mapped into memory.

    Raises:
      ValueError: the file is missing or damaged.
    """
    try:
        path = clusters_path(directory, digest)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{path.name} does not have its recorded sha256")
        mapped = _faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    rows = faiss.vector_to_array(mapped.id_map).copy()
    index: Any = faiss.downcast_index(mapped.index)
    index.referenced_objects = [mapped]  # which owns it
    index.nprobe = max(_LEAST_PROBED, round(_PROBED_SHARE * index.nlist))
    return Clusters(index, rows, np.ones(len(rows), np.bool_))


def is_in(rows: np.ndarray, some: np.ndarray) -> np.ndarray:
    """bool [rows]: which of `rows` are in `some`; both ascending."""
    if not len(some):
        return np.zeros(len(rows), np.bool_)
    return some[np.minimum(np.searchsorted(some, rows), len(some) - 1)] == rows


def _parts(total: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """(start, end) of at most `num_parts` parts of equal size."""
    num_parts = max(1, min(num_parts, total))
    ends = [total * (part + 1) // num_parts for part in range(num_parts)]
    yield from zip([0, *ends[:-1]], ends, strict=True)
