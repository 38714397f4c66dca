"""The index of passages: what is found, what a change does, what survives, and that two processes may share it."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.retrieval import index as index_module
from ccjax.retrieval.catalog import Catalog, IndexedDocument, IndexSettings, IndexUnusableError
from ccjax.retrieval.filters import parse_filter
from ccjax.retrieval.index import PassageIndex

SETTINGS = IndexSettings(embedder="e-1", dim=8, chunk_tokens=200, token_probe=(9, 12, 7))


def documents(num_passages: Sequence[int], tag: str = "") -> list[IndexedDocument]:
    return [
        IndexedDocument(
            f"d{i}.md", f"Title {i}", f"v{i}{tag}", tuple(f"text {i}.{n} ü{tag}" for n in range(num)), "", {"n": i}
        )
        for i, num in enumerate(num_passages)
    ]


def unit_vectors(num: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(num, 8)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def make(
    directory: Path | None = None, seed: int = 0, tag: str = "", counts: Sequence[int] = (3, 1, 4)
) -> PassageIndex:
    index = PassageIndex(directory, SETTINGS)
    index.write(documents(counts, tag), unit_vectors(sum(counts), seed))
    return index


def names(index: PassageIndex, query: np.ndarray, top_k: int = 100, where: dict | None = None) -> list[str]:
    hits = index.search(None, query, top_k, where=None if where is None else parse_filter(where))
    return [f"{passage.document_id}#{passage.number}" for passage in hits]


@pytest.mark.parametrize("top_k", [1, 5, 50, 1000])
def test_search_is_exact(top_k: int) -> None:
    counts, vectors = (0, 100, 7, 200, 3), unit_vectors(310)
    index = make(counts=counts)
    rows = [f"d{i}.md#{n}" for i, count in enumerate(counts) for n in range(count)]
    for query in unit_vectors(20, seed=1):
        expected = np.argsort(-(vectors.astype(np.float64) @ query.astype(np.float64)))[:top_k]
        assert names(index, query, top_k) == [rows[row] for row in expected]
        np.testing.assert_allclose(
            [passage.score for passage in index.search(None, query, top_k)], vectors[expected] @ query, atol=1e-6
        )


def test_ties_are_ordered_by_insertion() -> None:
    index = PassageIndex(None, SETTINGS)
    index.write(documents((2, 2, 2)), np.repeat(unit_vectors(1), 6, axis=0))
    assert names(index, unit_vectors(1)[0], 6) == [f"d{i}.md#{n}" for i in range(3) for n in range(2)]


def test_an_empty_index_and_a_zero_query_find_nothing() -> None:
    index = PassageIndex(None, SETTINGS)
    assert index.search("x", unit_vectors(1)[0], 3) == [] and len(index) == 0
    assert make().search(None, np.zeros(8, np.float32), 3) == []


@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_a_search_whose_vectors_are_all_zero_goes_by_words(shape: tuple[int, ...]) -> None:
    hits = make().search("text 2.3", np.zeros(shape, np.float32), 2)
    assert hits[0].text == "text 2.3 ü" and {passage.score for passage in hits} == {0.0}


def test_passage_includes_its_document_fields() -> None:
    index = make()
    (passage,) = index.search(None, unit_vectors(8)[2], 1)
    assert dataclasses.asdict(passage) == {
        "document_id": "d0.md",
        "source": "d0.md",
        "title": "Title 0",
        "version": "v0",
        "metadata": {"n": 0},
        "number": 2,
        "text": "text 0.2 ü",
        "score": pytest.approx(1.0),
    }
    assert [row.text for row in index.catalog.document("d2.md")] == [f"text 2.{n} ü" for n in range(4)]
    assert [row.number for row in index.catalog.document("d2.md", [2, 0, 9])] == [0, 2]
    assert index.catalog.document("else") == [] and index.catalog.has("d1.md") and not index.catalog.has("else")
    assert (
        index.catalog.versions() == {f"d{i}.md": (f"v{i}", f"d{i}.md") for i in range(3)}
        and index.catalog.count_documents() == 3
    )


def test_error_names_the_bad_argument() -> None:
    index = make()
    with pytest.raises(ValueError, match=r"vectors: wanted \[8, 8\], got \[7, 8\]"):
        index.write(documents((3, 1, 4)), unit_vectors(7))
    with pytest.raises(ValueError, match="documents: wanted every document_id once"):
        index.write(documents((1,)) * 2, unit_vectors(2))
    with pytest.raises(ValueError, match=r"vector: wanted \[8\], got \(9,\)"):
        index.search(None, np.ones(9, np.float32), 1)


# -- changes ---------------------------------------------------------------------------------------------------

Steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write without vectors", "fill", "remove", "reopen", "improve"]),
        st.integers(0, 11),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=14,
)


@given(steps=Steps)
@pytest.mark.parametrize("least_clustered", [1, 1000])
def test_search_matches_numpy_after_writes_removals_and_reopening(
    least_clustered: int, steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against plain NumPy over what is there; so few clusters are all searched. Passages without a vector are found by
    words, and by similarity once they are filled."""
    directory = tmp_path_factory.mktemp("index")
    patch = pytest.MonkeyPatch()
    patch.setattr(index_module, "LEAST_CLUSTERED", least_clustered)
    index = PassageIndex(directory, SETTINGS)
    there: dict[str, tuple[list[str], np.ndarray]] = {}
    later: dict[str, np.ndarray] = {}
    for step, (what, which, count) in enumerate(steps):
        name = f"d{which}.md"
        if what.startswith("write"):
            texts, vectors = [f"{step} {n}" for n in range(count)], unit_vectors(count, seed=step)
            later |= dict(zip(texts, vectors, strict=True))
            if what != "write":
                vectors[np.arange(count) % 2 < which] = np.nan
            index.write([IndexedDocument(name, "t", str(step), tuple(texts), "", {"n": which})], vectors)
            there[name] = texts, vectors
        elif what == "fill":
            gone = {row: passage.text for row, passage in index.pending(count).items()}
            if which % 2:
                index.write(removed=[name])  # before they are filled
                there.pop(name, None)
            index.fill([*gone], np.array([later[text] for text in gone.values()], np.float32).reshape(-1, 8))
            for texts, vectors in there.values():
                for place, text in enumerate(texts):
                    if text in gone.values():
                        vectors[place] = later[text]
        elif what == "remove":
            index.write(removed=[name])
            there.pop(name, None)
        elif what == "improve":
            index.improve()
        else:
            index.close()
            index = PassageIndex(directory, SETTINGS)
        query = unit_vectors(1, seed=100 + step)[0]
        for where in (None, {"type": "lt", "key": "n", "value": 4}):
            expected = [
                (-float(vector @ query), text)
                for name, (texts, vectors) in there.items()
                if where is None or int(name[1:-3]) < 4
                for text, vector in zip(texts, vectors, strict=True)
            ]
            shown = sorted(text for _, text in expected)
            expected = sorted(pair for pair in expected if not np.isnan(pair[0]))
            hits = index.search(None, query, 5, where=None if where is None else parse_filter(where))
            assert [passage.text for passage in hits] == [text for _, text in expected[:5]]
            by_words = index.search(f"{step} 0", None, 99, where=None if where is None else parse_filter(where))
            words = {str(step), "0"}
            assert sorted(passage.text for passage in by_words) == [t for t in shown if words & {*t.split()}]
        assert index.num_pending == sum(np.isnan(vectors[:, 0]).sum() for _, vectors in there.values())
        assert len(index) == sum(len(texts) for texts, _ in there.values()) and index.catalog.count_documents() == len(
            there
        )
    index.close()
    patch.undo()


def test_similarity_counts_by_the_share_of_passages_that_have_vectors() -> None:
    index, vectors = PassageIndex(None, SETTINGS), unit_vectors(10)
    vectors[1] = -vectors[5]
    texts = ("pump pump quay", "pump quay pier", *(f"other {n}" for n in range(8)))
    index.write([IndexedDocument("d", "t", "v", texts)], np.where(np.arange(10)[:, None] == 5, vectors, np.nan))
    found = index.search("pump quay", vectors[5], 3)
    assert [passage.number for passage in found] == [0, 1, 5] and np.isnan(found[0].score)
    pending = index.pending(10)
    index.fill([*pending], vectors[[row - 1 for row in pending]])
    assert [passage.number for passage in index.search("pump quay", vectors[5], 3)][:2] == [0, 5]


def test_the_nearest_of_many_are_found_among_passages_without_vectors() -> None:
    index, vectors = PassageIndex(None, SETTINGS), unit_vectors(200)
    is_known = np.arange(200) % 2 == 0
    index.write(documents((200,)), np.where(is_known[:, None], vectors, np.nan))
    query = unit_vectors(1, seed=1)[0]
    expected = np.flatnonzero(is_known)[np.argsort(-(vectors[is_known] @ query))][:3]
    assert names(index, query, 3) == [f"d0.md#{number}" for number in expected]


def test_vectors_of_deleted_passages_are_freed() -> None:
    index = PassageIndex(None, SETTINGS)
    for tag in "vw":  # each replaced
        for n in range(200):
            index.write([IndexedDocument(f"d{n}", "t", tag, ("text",))], unit_vectors(1, seed=n))
            assert index._view.vectors is not None and len(index._view.vectors) <= max(2, 2 * len(index))
    index.write(removed=[f"d{n}" for n in range(200)])
    assert len(index) == 0 and not len(index._view.rows)


def test_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = make(tmp_path)
    before = names(index, unit_vectors(1)[0])
    with monkeypatch.context() as patch, pytest.raises(sqlite3.OperationalError, match="disk is full"):

        def fails(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        patch.setattr(Catalog, "set_digest", fails)
        index.write(documents((2, 2), tag="x"), unit_vectors(4), removed=["d2.md"], digests={"a": "b"})
    assert names(index, unit_vectors(1)[0]) == before and index.catalog.versions()["d0.md"][0] == "v0"
    index.close()
    assert names(PassageIndex(tmp_path, SETTINGS), unit_vectors(1)[0]) == before


def test_digests_are_updated_and_removed(tmp_path: Path) -> None:
    index = make(tmp_path)
    index.write(digests={"a": "1", "b": "2"})
    index.write(digests={"a": None, "b": "3"})
    assert index.catalog.digests() == {"b": "3"}


def test_concurrent_searches_never_see_a_partial_write(tmp_path: Path) -> None:
    index = make(tmp_path, counts=(3, 1, 4))
    failures, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            hits = index.search(None, unit_vectors(1)[0], 100)
            if len({passage.version for passage in hits if passage.document_id == "d0.md"}) != 1 or len(hits) != 8:
                failures.append(hits)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(150):
        index.write(documents((3,), tag=str(n)), unit_vectors(3, seed=n))
    done.set()
    for thread in threads:
        thread.join()
    assert not failures


# -- filters ---------------------------------------------------------------------------------------------------


def test_cached_filter_is_invalidated_when_documents_change() -> None:
    index = make(counts=(3, 1, 4))
    query, where = unit_vectors(1)[0], {"type": "gte", "key": "n", "value": 1}
    assert set(names(index, query, where=where)) == {"d1.md#0", *(f"d2.md#{n}" for n in range(4))}
    index.write([IndexedDocument("d9.md", "t", "v", ("new",), "", {"n": 9})], unit_vectors(1), removed=["d2.md"])
    assert set(names(index, query, where=where)) == {"d1.md#0", "d9.md#0"}
    assert names(index, query, where={"type": "eq", "key": "n", "value": 77}) == []
    *before, (hits, is_all) = index.stages(None, query, 9, 4, where=parse_filter(where))
    assert is_all and [passage.document_id for passage in hits] == ["d9.md", "d1.md"]
    assert all("d0.md" != passage.document_id for some, _ in before for passage in some)


def test_search_on_an_old_view_does_not_cache_a_stale_filter() -> None:
    index, where = make(counts=(3, 1, 4)), {"type": "gte", "key": "n", "value": 1}
    before = index._view
    index.write([IndexedDocument("d9.md", "t", "v", ("new",) * 9, "", {"n": 9})], unit_vectors(9), removed=["d0.md"])
    index._allowed(before, parse_filter(where))
    assert len(names(index, unit_vectors(1)[0], where=where)) == 1 + 4 + 9


def test_filters_do_not_keep_earlier_views() -> None:
    index = make()
    names(index, unit_vectors(1)[0], where={"type": "gte", "key": "n", "value": 1})
    before = weakref.ref(index._view)
    index.write(removed=["d0.md"])
    assert before() is None


# -- on disk ---------------------------------------------------------------------------------------------------


def _damage_table(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def _overwritten(path: Path) -> None:
    """The middle pages, as where a disk lost them."""
    data = bytearray(path.read_bytes())
    data[4096:-4096] = b"\x55" * (len(data) - 8192)
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "other file": lambda path: path.write_bytes(b"[]" * 5000),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "overwritten": _overwritten,
    "no table": lambda path: _damage_table(path, "DROP TABLE vectors"),
    "no words": lambda path: _damage_table(path, "DROP TABLE words"),
    "other settings": lambda path: _damage_table(path, "UPDATE about SET value = '[3'"),
    "no settings": lambda path: _damage_table(path, "DELETE FROM about"),
    "short vectors": lambda path: _damage_table(path, "UPDATE vectors SET vector = x'00'"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_damaged_index_is_refused(tmp_path: Path, damage: str) -> None:
    make(tmp_path).close()
    DAMAGE[damage](tmp_path / "passages.sqlite")
    with pytest.raises(IndexUnusableError, match="damaged"):
        PassageIndex(tmp_path, SETTINGS)


def test_index_that_cannot_be_opened_is_not_reported_as_damaged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="unable to open"):
        PassageIndex(tmp_path / "absent", SETTINGS)


# -- several processes -----------------------------------------------------------------------------------------


def test_two_indexes_on_one_directory_see_each_others_changes(tmp_path: Path) -> None:
    one, two = make(tmp_path), PassageIndex(tmp_path, SETTINGS)
    query = unit_vectors(1)[0]
    assert names(two, query) == names(one, query)
    one.write(documents((1,), tag="x"), unit_vectors(1, seed=5), removed=["d1.md"])
    assert names(two, query) == names(one, query)  # it noticed that passages had gone
    one.write([IndexedDocument("d7.md", "t", "v", ("new",))], unit_vectors(1, seed=6))
    two.write([IndexedDocument("d8.md", "t", "v", ("newer",))], unit_vectors(1, seed=7))
    assert "d7.md#0" in names(two, query) and "d8.md#0" in names(two, query)
    one.write(removed=["d8.md"])
    assert names(two, query) == names(one, query) and "d8.md#0" not in names(two, query)


def test_vectors_clustered_by_one_process_are_used_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LEAST_CLUSTERED", 100)
    one, two = make(tmp_path, counts=(200,)), PassageIndex(tmp_path, SETTINGS)
    assert one.improve() and two._view.clusters is None
    two.write(removed=["nothing"])
    assert two._view.clusters is not None
    assert names(two, unit_vectors(1)[0], 3) == names(one, unit_vectors(1)[0], 3)


# -- by words, and by both -------------------------------------------------------------------------------------


def of_texts(texts: Sequence[str], directory: Path | None = None) -> PassageIndex:
    index = PassageIndex(directory, SETTINGS)
    index.write([IndexedDocument(f"d{n}", "t", "v", (text,)) for n, text in enumerate(texts)], unit_vectors(len(texts)))
    return index


def ids(index: PassageIndex, text: str | None, vector: np.ndarray | None, top_k: int = 5) -> list[str]:
    return [passage.document_id for passage in index.search(text, vector, top_k)]


def test_an_index_without_vectors_is_searched_by_words(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, embedder="", dim=0)
    texts = ["a red boat", "a red car", "blue", "the boat and the car"]
    documents = [IndexedDocument(f"d{n}", "t", "v", (text,)) for n, text in enumerate(texts)]
    PassageIndex(tmp_path, settings).write(documents)
    index = PassageIndex(tmp_path, settings)
    assert len(index) == 4 and ids(index, "blue", None) == ["d2"] and not index.improve()
    assert set(ids(index, "red boats", None)) == {"d0", "d1", "d3"}
    index.write(removed=["d0", "d1", "d3"])
    index.write(documents[:1])
    assert len(index) == len(PassageIndex(tmp_path, settings)) == 2


def test_results_of_both_searches_are_joined_by_rank() -> None:
    """By similarity d3, d0, d1, d2, by words d1: worth 1/6 + 1/8, then 1/6, 1/7, 1/9, and 0.05 of their scores."""
    index = PassageIndex(None, SETTINGS)
    vectors = np.zeros((4, 8), np.float32)
    vectors[:, 0], vectors[:, 1] = (0.8, 0.6, 0.0, 1.0), (0.6, 0.8, 1.0, 0.0)
    texts = ("one", "needle", "two", "three")
    index.write([IndexedDocument(f"d{n}", "t", "v", (text,)) for n, text in enumerate(texts)], vectors)
    query = np.eye(8, dtype=np.float32)[0]
    assert ids(index, "the needle", query) == ["d1", "d3", "d0", "d2"]
    assert ids(index, None, query) == ["d3", "d0", "d1", "d2"] and ids(index, "the needle", None) == ["d1"]
    scores = [passage.score for passage in index.search("the needle", query, 4)]
    np.testing.assert_allclose(scores, [0.6, 1.0, 0.8, 0.0], atol=1e-6)  # similarities, as in a search by it alone
    assert ids(index, "the needle", query, 1) == ["d1"]
    assert ids(index, "haystack", query) == ids(index, None, query)


def test_a_large_lead_by_words_outweighs_a_rank_by_meaning() -> None:
    """Locker 44 is first by words and fourth by meaning; what is first by meaning has its number elsewhere."""
    index = PassageIndex(None, SETTINGS)
    vectors = np.zeros((24, 8), np.float32)
    vectors[:, 0] = [0.89, 0.9, 0.895, 0.87, *np.linspace(0.86, 0.5, 20)]
    vectors[:, 1] = np.sqrt(1 - vectors[:, 0] ** 2)
    texts = [f"Locker {n} costs a day." for n in range(41, 65)]
    texts[1] = "Locker 42 costs 44 a day."
    index.write([IndexedDocument(f"d{n}", "t", "v", (text,)) for n, text in enumerate(texts)], vectors)
    query = np.eye(8, dtype=np.float32)[0]
    assert ids(index, "What does locker 44 cost a day?", None)[0] == "d3"
    assert ids(index, "What does locker 44 cost a day?", query)[0] == "d3"


def test_words_decide_between_the_first_by_words_and_the_first_by_meaning() -> None:
    index = PassageIndex(None, SETTINGS)
    vectors = np.zeros((2, 8), np.float32)
    vectors[:, 0], vectors[:, 1] = (1.0, 0.8), (0.0, 0.6)
    texts = ("The pressure of pump B is 9 bar.", "The pressure of pump A is 4 bar.")
    index.write([IndexedDocument(f"d{n}", "t", "v", (text,)) for n, text in enumerate(texts)], vectors)
    query = np.eye(8, dtype=np.float32)[0]
    assert ids(index, "pressure of pump A", query) == ["d1", "d0"]
    assert ids(index, "pressure of pump B", query) == ["d0", "d1"]


def test_a_passage_that_only_words_find_has_its_similarity_as_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_DEPTH", 1)
    index = of_texts([f"word{n}" for n in range(30)])
    query = unit_vectors(30)[7]
    hits = {passage.document_id: passage.score for passage in index.search("word20", query, 2)}
    assert set(hits) == {"d7", "d20"} and hits["d20"] == pytest.approx(float(unit_vectors(30)[20] @ query), abs=1e-6)


def test_weak_results_by_words_do_not_outvote_similarity() -> None:
    """Every page says "error"; only one has the number."""
    index = of_texts([f"Error E-{1040 + n}: a part does not answer." for n in range(30)])
    for n in (0, 13, 29):
        assert ids(index, f"What is error E-{1040 + n}?", unit_vectors(30)[n - 1], 1) == [f"d{n}"]


def test_frequent_words_are_not_scored_where_there_are_rare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from ccjax.retrieval import catalog

    monkeypatch.setattr(catalog, "_SCORED_ROWS", 12)
    monkeypatch.setattr(catalog, "_COUNTED_ROWS", 45)
    texts = [f"{'rare' if n % 10 == 0 else 'x'} {'middle' if n % 4 == 0 else 'y'} often" for n in range(100)]
    index = of_texts(texts)
    found = [int(passage.document_id[1:]) for passage in index.search("often middle rare", None, 50)]
    assert set(found) == set(range(0, 100, 10)) and set(found[:5]) == {0, 20, 40, 60, 80}
    assert len(index.search("often", None, 200)) == 100


def test_the_last_stage_of_a_search_by_both_equals_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccjax.retrieval.vectors._STAGE_ROWS", 15)
    index = PassageIndex(None, SETTINGS)
    for n in range(60):
        text = f"word{n} {'even' if n % 2 == 0 else 'odd'}"
        index.write([IndexedDocument(f"d{n}", "t", "v", (text,))], unit_vectors(60)[n : n + 1])
    for query in unit_vectors(5, seed=3):
        *before, last = index.stages("word7 odd", query, 5, 4)
        found, is_final = last
        wanted = index.search("word7 odd", query, 5)
        assert len(before) == 3 and is_final and [hit.passage_id for hit in found] == [hit.passage_id for hit in wanted]
        np.testing.assert_allclose([hit.score for hit in found], [hit.score for hit in wanted], atol=1e-6)
        assert all(not is_final for _, is_final in before)


def test_damaged_clusters_are_rebuilt_without_losing_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_module, "LEAST_CLUSTERED", 100)

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    index = make(tmp_path, counts=(300,))
    before = names(index, unit_vectors(1)[0], 5)
    assert index.improve()
    for damage in (flip, lambda path: path.write_bytes(path.read_bytes()[:-9]), Path.unlink):
        index.close()
        (file,) = tmp_path.glob("vectors-*.faiss")
        damage(file)
        index = PassageIndex(tmp_path, SETTINGS)
        assert caplog.text.count("until the index is rebuilt") == 1
        caplog.clear()
        assert names(index, unit_vectors(1)[0], 5) == before
        assert index.improve() and not index.improve() and len(list(tmp_path.glob("*.faiss"))) == 1


def test_clusters_are_made_from_a_passage_count_and_dropped_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "LEAST_CLUSTERED", 300)
    index = make(tmp_path, counts=(299,))
    assert not index.improve()
    index.write([IndexedDocument("more", "t", "v", ("a",))], unit_vectors(1, 5))
    assert index.improve() and list(tmp_path.glob("*.faiss")) and not index.improve()
    index.write([IndexedDocument("some", "t", "v", ("a",) * 20)], unit_vectors(20, 6))
    assert not index.improve()  # few changes
    index.write([IndexedDocument("many", "t", "v", ("a",) * 20)], unit_vectors(20, 7))
    assert index.improve() and index._view.clusters is not None and index._view.clusters.num_alive == 340
    index.write(removed=["d0.md"])
    assert index.improve() and not list(tmp_path.glob("*.faiss"))
    assert len(names(index, unit_vectors(1)[0])) == 41
    assert not make(counts=(400,)).improve()  # in memory
