"""Vector search in stages (RAGCache sec. 5.3): the best rows after each part of the work; the last stage equals faiss'
plain search.

- Flat indexes are read slice by slice.
- IVF indexes are searched by groups of clusters, the nearest clusters first.
- HNSW graphs are searched with ever longer lists of candidates (`efSearch`). The paper interrupts one search after
  slices of time; faiss cannot resume a search, so each stage starts anew, at the cost of the shorter lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np

_faiss: Any = faiss  # its type stubs know neither parameters nor the calls that NumPy arrays are wrapped in


@dataclasses.dataclass(frozen=True)
class Found:
    """The best rows so far.

    Attributes:
      rows: int64, best first; fewer than requested if fewer were found.
      scores: float32, the inner products.
      is_final: nothing is left to search.
    """

    rows: np.ndarray
    scores: np.ndarray
    is_final: bool


def staged_search(
    index: faiss.Index,
    query: np.ndarray,
    top_k: int,
    *,
    num_stages: int = 1,
    selector: faiss.IDSelector | None = None,
    num_probes: int | None = None,
) -> Iterator[Found]:
    """The best rows after each of at most `num_stages` stages; fewer if there is less to divide.

    The last result equals that of `index.search`, except for the choice among rows of equal score.

    Args:
      index: flat, IVF or HNSW with inner products; searched with its own `nprobe` or `efSearch`.
      query: float32 [dim].
      selector: rows that may be found; None for all.
      num_probes: clusters of an IVF index to search instead of its `nprobe`.

    Raises:
      ValueError: another kind of index or metric, a query of another length, or a number below 1.
    """
    for name, value in (("top_k", top_k), ("num_stages", num_stages)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: wanted an integer of at least 1, got {value!r}")
    if query.shape != (index.d,):
        raise ValueError(f"query: wanted [{index.d}], got {query.shape}")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"index: wanted inner products, got metric {index.metric_type}")
    vector = np.ascontiguousarray(query, np.float32)[None]
    if isinstance(index, faiss.IndexIVF):
        return _ivf(index, vector, top_k, num_stages, selector, num_probes or index.nprobe)
    if isinstance(index, faiss.IndexHNSW):
        return _hnsw(index, vector, top_k, num_stages, selector)
    if isinstance(index, faiss.IndexFlat):
        return _flat(index, vector, top_k, num_stages, selector)
    raise ValueError(f"index: wanted a flat, IVF or HNSW index, got {type(index).__name__}")


def _flat(
    index: faiss.IndexFlat, vector: np.ndarray, top_k: int, num_stages: int, selector: faiss.IDSelector | None
) -> Iterator[Found]:
    best = _nothing()
    ends = _ends(index.ntotal, num_stages)
    for start, end in zip([0, *ends], ends, strict=False):
        rows = faiss.IDSelectorRange(start, end)
        chosen = rows if selector is None else faiss.IDSelectorAnd(rows, selector)
        met = index.search(vector, top_k, params=_faiss.SearchParameters(sel=chosen))  # pyright: ignore[reportCallIssue]
        best = _merged(best, met, top_k, is_final=end == ends[-1])
        yield best


def _ivf(
    index: faiss.IndexIVF,
    vector: np.ndarray,
    top_k: int,
    num_stages: int,
    selector: faiss.IDSelector | None,
    num_probes: int,
) -> Iterator[Found]:
    num_probes = min(num_probes, index.nlist)
    distances, clusters = index.quantizer.search(vector, num_probes)  # pyright: ignore[reportCallIssue]
    best = _nothing()
    ends = _ends(num_probes, num_stages)
    for start, end in zip([0, *ends], ends, strict=False):
        own = [np.ascontiguousarray(part[:, start:end]) for part in (clusters, distances)]
        scores, rows = np.empty((1, top_k), np.float32), np.empty((1, top_k), np.int64)
        # The form that takes parameters: `search_preassigned` itself would need `index.nprobe` changed.
        params = _faiss.SearchParametersIVF(nprobe=end - start, sel=selector)
        pointers = [_faiss.swig_ptr(array) for array in (vector, *own, scores, rows)]
        index.search_preassigned_c(1, pointers[0], top_k, *pointers[1:], False, params)  # pyright: ignore
        best = _merged(best, (scores, rows), top_k, is_final=end == ends[-1])
        yield best


def _hnsw(
    index: faiss.IndexHNSW, vector: np.ndarray, top_k: int, num_stages: int, selector: faiss.IDSelector | None
) -> Iterator[Found]:
    longest = index.hnsw.efSearch
    lengths = sorted({max(1, longest >> left) for left in range(num_stages)})
    for length in lengths:
        params = _faiss.SearchParametersHNSW(efSearch=length, sel=selector)
        met = index.search(vector, top_k, params=params)  # pyright: ignore[reportCallIssue]
        yield _merged(_nothing(), met, top_k, is_final=length == longest)


def _ends(total: int, num_parts: int) -> list[int]:
    """Ends of at least one part of equal size."""
    num_parts = max(1, min(num_parts, total))
    return [total * (part + 1) // num_parts for part in range(num_parts)]


def _nothing() -> Found:
    return Found(np.empty(0, np.int64), np.empty(0, np.float32), False)


def _merged(best: Found, met: tuple[np.ndarray, np.ndarray], top_k: int, *, is_final: bool) -> Found:
    """The best of both, among equal ones the earlier; faiss pads with row -1 if it found too few."""
    scores, rows = np.concatenate([best.scores, met[0][0]]), np.concatenate([best.rows, met[1][0]])
    order = np.argsort(-scores, kind="stable")
    order = order[rows[order] >= 0][:top_k]
    return Found(rows[order], scores[order], is_final)
