"""Trained indexes for many vectors: built from a stream of vectors for a given recall, memory-mapped from a file.

- `ivf`: clusters, of which the nearest are searched; half a minute of two CPU cores for every million vectors and 1,000
  clusters. Suits memory-mapping best: a search reads only its own clusters.
- `hnsw`: a graph of neighbours; faster to search, many times slower to build.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np

from ccjax.retrieval.catalog import IndexUnusableError
from ccjax.retrieval.segments import IndexSegment

TrainedKind = Literal["ivf", "hnsw"]
Batches = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Starts over a stream of (rows int64 [n], vectors float32 [n, dim]), rows ascending."""
Progress = Callable[[str, int, int], None]

RECALL_AT = 10
_NUM_QUERIES = 256
_POINTS_PER_CLUSTER = 64  # faiss warns below 39
_NUM_NEIGHBOURS = 32
_EF_CONSTRUCTION = 80
_LONGEST_EF = 4096
_SAME = 1e-6  # two ways to sum one inner product
_faiss: Any = faiss


@dataclasses.dataclass(frozen=True)
class Trained:
    """Description of a trained index, stored beside the documents.

    Attributes:
      file: its name, in the directory of the catalog.
      sha256: of the file, hex.
      last_row: it holds rows up to this one.
      num_trained: number of rows when it was trained; later ones were assigned to the same clusters.
      recall: share of the true 10 nearest rows that a search finds, mean over artificial queries half-way between two
        of its rows: like questions, these are farther from their results than rows are from each other.
      width: `nprobe` or `efSearch`, the least power of two that reaches the requested recall.
    """

    kind: TrainedKind
    file: str
    sha256: str
    num_rows: int
    num_trained: int
    last_row: int
    recall: float
    width: int


def build(
    kind: TrainedKind,
    batches: Batches,
    num_rows: int,
    dim: int,
    directory: Path,
    *,
    recall: float,
    like: IndexSegment | None = None,
    num_trained: int = 0,
    progress: Progress,
) -> Trained:
    """Writes a trained index of all rows of `batches` to a new file in `directory`.

    Args:
      recall: see `Trained.recall`; below 1. Rows that the widest search misses stay missed.
      like: an IVF segment whose clusters and `num_trained` are kept instead of training.
      progress: called as (`train` or `add`, done, total).
    """
    rng = np.random.default_rng(0)
    num_clusters = max(1, min(2 ** round(math.log2(4.0 * math.sqrt(num_rows))), num_rows // 16))
    num_sampled = min(num_rows, num_clusters * _POINTS_PER_CLUSTER)
    is_sample = np.zeros(num_rows, np.bool_)
    is_sample[rng.choice(num_rows, num_sampled, replace=False)] = True
    is_end = np.zeros(num_rows, np.bool_)
    is_end[rng.choice(num_rows, min(num_rows, _NUM_QUERIES), replace=False)] = True
    progress("train", 0, 1)
    sample, ends = _chosen(batches, is_sample if kind == "ivf" and like is None else is_end, is_end)
    queries = ends + rng.permutation(ends)
    if kind == "hnsw":
        index: Any = faiss.IndexHNSWFlat(dim, _NUM_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _EF_CONSTRUCTION
        num_trained = num_rows
    elif like is not None:
        old: Any = like.index
        index = faiss.IndexIVFFlat(faiss.clone_index(old.quantizer), dim, old.nlist, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, num_clusters, faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = _POINTS_PER_CLUSTER
        index.cp.min_points_per_centroid = 1
        index.train(sample)
        num_trained = num_rows
    progress("train", 1, 1)

    mapped, truth, last_row = faiss.IndexIDMap(index), _Truth(queries), 0
    progress("add", 0, num_rows)
    for rows, vectors in batches():
        mapped.add_with_ids(vectors, rows)  # pyright: ignore[reportCallIssue]
        truth.meet(vectors)
        last_row = int(rows[-1])
        progress("add", mapped.ntotal, num_rows)
    width, reached = _width(index, truth, recall)
    name, digest = _save(mapped, directory)
    return Trained(kind, name, digest, mapped.ntotal, num_trained, last_row, reached, width)


def load(trained: Trained, directory: Path) -> IndexSegment:
    """The segment of a trained index, its vectors mapped into memory.

    Raises:
      IndexUnusableError: the file is missing or damaged.
    """
    path = directory / Path(trained.file).name
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != trained.sha256:
                raise IndexUnusableError(f"damaged: {path.name} does not have its recorded sha256")
        flag = faiss.IO_FLAG_MMAP if trained.kind == "ivf" else faiss.IO_FLAG_MMAP_IFC
        mapped = _faiss.read_index(str(path), flag)
    except (OSError, RuntimeError) as error:
        raise IndexUnusableError(f"{path.name}: {error}") from None
    rows = faiss.vector_to_array(mapped.id_map).copy()
    index: Any = faiss.downcast_index(mapped.index)
    index.referenced_objects = [mapped]  # which owns it
    return IndexSegment(index, rows)


def _widen(index: Any, width: int) -> None:
    if isinstance(index, faiss.IndexIVF):
        index.nprobe = width
    else:
        index.hnsw.efSearch = width


def _width(index: Any, truth: _Truth, recall: float) -> tuple[int, float]:
    widest = index.nlist if isinstance(index, faiss.IndexIVF) else _LONGEST_EF
    width = 1 if isinstance(index, faiss.IndexIVF) else RECALL_AT
    while True:
        _widen(index, width)
        reached = truth.recall(index)
        if reached >= recall or width >= widest:
            return width, reached
        width = min(2 * width, widest)


def _save(mapped: faiss.IndexIDMap, directory: Path) -> tuple[str, str]:
    """Writes under a temporary name, flushes to disk, then renames, so that no reader sees half a file."""
    temporary = directory / f".writing-{os.getpid()}.faiss"
    try:
        faiss.write_index(mapped, str(temporary))
        with temporary.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        name = f"vectors-{digest[:16]}.faiss"
        temporary.replace(directory / name)
    finally:
        temporary.unlink(missing_ok=True)
    return name, digest


def _chosen(batches: Batches, *which: np.ndarray) -> list[np.ndarray]:
    """The vectors of the rows that each mask chooses, float32 [n, dim], in one pass."""
    found: list[list[np.ndarray]] = [[] for _ in which]
    start = 0
    for rows, vectors in batches():
        for chosen, parts in zip(which, found, strict=True):
            parts.append(vectors[chosen[start : start + len(rows)]])
        start += len(rows)
    return [np.concatenate(parts) for parts in found]


class _Truth:
    """Similarities of the nearest rows of some queries, found batch by batch."""

    def __init__(self, queries: np.ndarray) -> None:
        """`queries` is float32 [n, dim]."""
        lengths = np.linalg.norm(queries, axis=1, keepdims=True)
        self._queries = np.ascontiguousarray(queries / np.maximum(lengths, _SAME), np.float32)
        self._scores = np.full((len(queries), RECALL_AT), -np.inf, np.float32)

    def meet(self, vectors: np.ndarray) -> None:
        """More rows, float32 [n, dim]."""
        count = min(RECALL_AT, len(vectors))
        scores, _ = _faiss.knn(self._queries, vectors, count, faiss.METRIC_INNER_PRODUCT)
        self._scores = -np.sort(-np.concatenate([self._scores, scores], axis=1), axis=1)[:, :RECALL_AT]

    def recall(self, index: Any) -> float:
        """Share of the nearest rows that the index finds."""
        count = min(RECALL_AT, index.ntotal)
        scores, _ = index.search(self._queries, count)
        return float(np.mean(scores >= self._scores[:, count - 1 : count] - _SAME))
