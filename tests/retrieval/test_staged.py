"""Staged searches end with what faiss' plain search finds; before, they tell the best of what was searched."""

from __future__ import annotations

import itertools

import faiss
import numpy as np
import pytest

from ccjax.retrieval.staged import staged_search

DIM, NUM_VECTORS = 16, 4000
KINDS = ("flat", "ivf", "hnsw")


def unit(num: int, seed: int, *, num_centres: int = 0) -> np.ndarray:
    """Vectors on the unit sphere, around `num_centres` points where that is not 0."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(num, DIM))
    if num_centres:
        centres = 3.0 * np.random.default_rng(99).normal(size=(num_centres, DIM))
        vectors += centres[rng.integers(num_centres, size=num)]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


VECTORS = unit(NUM_VECTORS, 0, num_centres=40)
QUERIES = unit(50, 1, num_centres=40)


def build(kind: str, vectors: np.ndarray = VECTORS) -> faiss.Index:
    if kind == "flat":
        index = faiss.IndexFlatIP(DIM)
    elif kind == "ivf":
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, 32, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = 13
        index.train(vectors)
    else:
        index = faiss.IndexHNSWFlat(DIM, 16, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = 48
    index.add(vectors)
    return index


@pytest.fixture(scope="module", params=KINDS)
def index(request) -> faiss.Index:
    return build(request.param)


@pytest.mark.parametrize(
    ("num_stages", "top_k"), [(1, 5), (2, 1), (3, 100), (8, 5), (13, 1), (13, 100), (1000, 1), (1000, 100)]
)
def test_last_stage_is_bit_identical_to_the_plain_search(index, num_stages, top_k):
    scores, rows = index.search(QUERIES, top_k)
    for number, query in enumerate(QUERIES if num_stages < 1000 else QUERIES[:5]):
        *before, last = staged_search(index, query, top_k, num_stages=num_stages)
        np.testing.assert_array_equal(last.rows, rows[number])
        np.testing.assert_array_equal(last.scores, scores[number])
        assert last.is_final and not any(found.is_final for found in before) and len(before) < num_stages


def test_flat_stages_search_slices_and_ivf_stages_nearest_clusters_first():
    *_, half, _ = staged_search(build("flat"), QUERIES[0], 5, num_stages=2)
    wanted = np.argsort(-(VECTORS[: NUM_VECTORS // 2] @ QUERIES[0]))[:5]
    assert half.rows.tolist() == wanted.tolist()
    ivf = build("ivf")
    first, *_ = staged_search(ivf, QUERIES[0], 5, num_stages=13)
    ivf.nprobe = 1
    assert first.rows.tolist() == ivf.search(QUERIES[:1], 5)[1][0].tolist()


def test_stages_never_get_worse_and_clustered_indexes_converge_early(index):
    early = 0
    for query in QUERIES:
        founds = list(staged_search(index, query, 5, num_stages=4))
        best = [found.scores[0] for found in founds if len(found.scores)]
        assert all(earlier <= later for earlier, later in itertools.pairwise(best))
        early += founds[1].rows.tolist() == founds[-1].rows.tolist()
    assert isinstance(index, faiss.IndexFlat) or early >= 30  # a slice of all rows says little about the others


@pytest.mark.parametrize("num_stages", [1, 4])
def test_only_chosen_rows_are_found(index, num_stages):
    allowed = np.flatnonzero(np.random.default_rng(3).random(NUM_VECTORS) < 0.3)
    selector = faiss.IDSelectorBatch(allowed)
    for query in QUERIES[:10]:
        for found in staged_search(index, query, 10, num_stages=num_stages, selector=selector):
            assert set(found.rows.tolist()) <= set(allowed.tolist())
        assert len(found.rows) == 10
        if isinstance(index, faiss.IndexFlat):
            assert found.rows.tolist() == allowed[np.argsort(-(VECTORS[allowed] @ query))[:10]].tolist()


def test_equal_scores_are_all_found_once(index):
    twins = np.repeat(unit(1, 5), 40, axis=0)
    same = build(next(kind for kind in KINDS if kind in type(index).__name__.lower()), np.concatenate([VECTORS, twins]))
    *_, last = staged_search(same, twins[0], 40, num_stages=5)
    assert sorted(last.rows.tolist()) == list(range(NUM_VECTORS, NUM_VECTORS + 40))


def test_top_k_may_exceed_the_rows_and_the_index_may_be_empty():
    few = build("flat", VECTORS[:3])
    (*_, last) = staged_search(few, QUERIES[0], 5, num_stages=8)
    assert sorted(last.rows.tolist()) == [0, 1, 2]
    (nothing,) = staged_search(faiss.IndexFlatIP(DIM), QUERIES[0], 5, num_stages=4)
    assert len(nothing.rows) == 0 and nothing.is_final


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k: wanted an integer of at least 1, got 0"),
        ({"num_stages": 1.5}, "num_stages"),
        ({"query": QUERIES[0][:4]}, r"query: wanted \[16\], got \(4,\)"),
        ({"index": faiss.IndexFlatL2(DIM)}, "index: wanted inner products"),
        ({"index": faiss.IndexLSH(DIM, 8)}, "index: wanted"),
    ],
)
def test_error_names_the_bad_argument(change, message):
    arguments = {"index": build("flat"), "query": QUERIES[0], "top_k": 5, "num_stages": 2, **change}
    with pytest.raises(ValueError, match=message):
        staged_search(arguments.pop("index"), arguments.pop("query"), arguments.pop("top_k"), **arguments)
