"""Vectors in memory and in clusters: staged searches end with what a plain search finds, clusters find nearly all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import faiss
import numpy as np
import pytest

from ccjax.retrieval.vectors import Found, VectorView, build_clusters, clusters_path, load_clusters, staged_search

DIM, NUM_VECTORS = 16, 20_000


def unit(num: int, seed: int, *, num_centres: int = 0) -> np.ndarray:
    """Vectors on the unit sphere, around `num_centres` points where that is not 0."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(num, DIM))
    if num_centres:
        centres = 3.0 * np.random.default_rng(99).normal(size=(num_centres, DIM))
        vectors += centres[rng.integers(num_centres, size=num)]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


VECTORS = unit(NUM_VECTORS, 0, num_centres=40)
ROWS = np.arange(1, 2 * NUM_VECTORS, 2)
QUERIES = unit(50, 1, num_centres=40)


def last(found: Iterator[Found]) -> Found:
    *_, final = found
    return final


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> VectorView:
    """18,000 of the vectors in clusters, the others in memory."""
    directory, num = tmp_path_factory.mktemp("clusters"), 18_000

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, num, 4000):
            part = slice(start, min(num, start + 4000))
            yield ROWS[part], VECTORS[part]

    digest = build_clusters(batches, num, DIM, directory)
    view = VectorView(clusters=load_clusters(directory, digest))
    assert view.num_alive == num and view.last_row == ROWS[num - 1]
    with open("/proc/self/maps") as maps:
        assert str(clusters_path(directory, digest)) in maps.read()  # the file is mapped
    return view.plus(ROWS[num:], VECTORS[num:])


@pytest.fixture(scope="module")
def flat() -> VectorView:
    view = VectorView()
    for start in range(0, NUM_VECTORS, 3000):
        view = view.plus(ROWS[start : start + 3000], VECTORS[start : start + 3000])
    return view


@pytest.fixture(params=["flat", "clustered"])
def view(request: pytest.FixtureRequest) -> VectorView:
    return request.getfixturevalue(request.param)


def truth(query: np.ndarray, top_k: int, alive: np.ndarray | None = None) -> list[int]:
    scores = VECTORS.astype(np.float64) @ query
    if alive is not None:
        scores[~alive] = -9.0
    return ROWS[np.argsort(-scores)[:top_k]].tolist()


@pytest.mark.parametrize("top_k", [1, 5, 100])
def test_memory_is_searched_exactly_and_clusters_nearly(flat: VectorView, clustered: VectorView, top_k: int) -> None:
    num_found = 0
    for query in QUERIES:
        wanted, found = truth(query, top_k), last(flat.stages(query, top_k))
        np.testing.assert_allclose(found.scores, np.sort(-(VECTORS @ query))[:top_k] * -1, atol=1e-6)
        assert len({*found.rows.tolist()} - {*wanted}) <= top_k // 50  # equal in float32
        num_found += len({*last(clustered.stages(query, top_k)).rows.tolist()} & {*wanted})
    assert num_found >= (0.6 if top_k == 100 else 0.9) * 50 * top_k


@pytest.mark.parametrize(("num_stages", "top_k"), [(2, 1), (3, 100), (8, 5), (1000, 1)])
def test_last_stage_equals_the_plain_search(view: VectorView, num_stages: int, top_k: int) -> None:
    for query in QUERIES[:10]:
        *before, final = view.stages(query, top_k, num_stages)
        plain = last(view.stages(query, top_k))
        np.testing.assert_array_equal(final.rows, plain.rows)
        np.testing.assert_array_equal(final.scores, plain.scores)
        assert final.is_final and not any(found.is_final for found in before) and 0 < len(before) < num_stages
        best = [found.scores[0] for found in before if len(found.scores)]
        assert all(earlier <= later for earlier, later in itertools.pairwise(best))


def test_stages_of_memory_are_rows_and_those_of_clusters_know_most_early(
    flat: VectorView, clustered: VectorView
) -> None:
    first, _ = flat.stages(QUERIES[0], 5, 2)
    assert first.rows.tolist() == ROWS[np.argsort(-(VECTORS[:10_000] @ QUERIES[0]))[:5]].tolist()
    early = 0
    for query in QUERIES:
        founds = list(clustered.stages(query, 5, 4))
        early += founds[1].rows.tolist() == founds[-1].rows.tolist()
    assert early >= 15


@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.3])
def test_only_allowed_rows_are_found(view: VectorView, num_stages: int, share: float) -> None:
    chosen = np.random.default_rng(3).random(NUM_VECTORS) < share
    for query in QUERIES[:10]:
        for found in view.stages(query, 10, num_stages, ROWS[chosen]):
            assert {*found.rows.tolist()} <= {*ROWS[chosen].tolist()}
        if share <= 0.05 or view.clusters is None:  # few rows are all compared
            assert found.rows.tolist() == truth(query, 10, chosen)
    assert last(view.stages(QUERIES[0], 3, num_stages, np.array([2, 4]))).rows.tolist() == []


def test_deleted_rows_are_not_found_and_their_vectors_are_freed(view: VectorView) -> None:
    gone = ROWS[np.random.default_rng(4).random(NUM_VECTORS) < 0.6]
    left, alive = view.without(gone), ~np.isin(ROWS, gone)
    assert left.num_alive == view.only(ROWS[alive]).num_alive == alive.sum()
    assert left.vectors is not None and len(left.rows) == len(left.vectors) < len(view.rows) / 2
    for query in QUERIES[:10]:
        found = last(left.stages(query, 10))
        assert not {*found.rows.tolist()} & {*gone.tolist()} and len(found.rows) == 10
        if view.clusters is None:
            assert found.rows.tolist() == truth(query, 10, alive)
    few = view.without(gone[:100])
    assert few.vectors is view.vectors and few.num_alive == NUM_VECTORS - 100
    nothing = view.without(ROWS)
    assert nothing.num_alive == 0 and last(nothing.stages(QUERIES[0], 3)).rows.tolist() == []


def test_equal_scores_are_ordered_by_row_and_top_k_may_exceed_the_rows(flat: VectorView) -> None:
    view = VectorView().plus(np.arange(40), np.repeat(unit(1, 5), 40, axis=0))
    assert last(view.stages(unit(1, 5)[0], 40, 5)).rows.tolist() == list(range(40))
    assert last(view.stages(unit(1, 5)[0], 3)).rows.tolist() == [0, 1, 2]
    assert len(last(view.stages(unit(1, 5)[0], 99)).rows) == 40
    (nothing,) = VectorView().stages(QUERIES[0], 5, 4)
    assert len(nothing.rows) == 0 and nothing.is_final


# -- a plain IVF index -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ivf() -> faiss.IndexIVFFlat:
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, 32, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = 13
    index.train(VECTORS[:4000])  # pyright: ignore[reportCallIssue]
    index.add(VECTORS[:4000])  # pyright: ignore[reportCallIssue]
    return index


@pytest.mark.parametrize(("num_stages", "top_k"), [(1, 5), (3, 100), (13, 1), (1000, 5)])
def test_last_stage_is_bit_identical_to_the_search_of_faiss(ivf, num_stages: int, top_k: int) -> None:
    scores, rows = ivf.search(QUERIES, top_k)
    for number, query in enumerate(QUERIES):
        *before, final = staged_search(ivf, query, top_k, num_stages=num_stages)
        assert sorted(final.rows.tolist()) == sorted(rows[number].tolist())  # equal scores in any order
        np.testing.assert_array_equal(final.scores, scores[number])
        assert final.is_final and len(before) < num_stages
