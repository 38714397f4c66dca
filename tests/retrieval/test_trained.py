"""Trained indexes: they find what they say, are mapped from their file, and follow what changes."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from ccjax.retrieval import index as index_module
from ccjax.retrieval.catalog import IndexedDocument, IndexSettings
from ccjax.retrieval.filters import parse_filter
from ccjax.retrieval.index import IndexKind, PassageIndex

DIM = 24
SETTINGS = IndexSettings(embedder="e-1", dim=DIM, chunk_tokens=200, overlap_tokens=0, token_probe=(9, 12, 7))


def clustered(num: int, seed: int) -> np.ndarray:
    """Unit vectors in 40 clumps, as the passages of some subjects are."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(40, DIM))
    x = centres[rng.integers(0, 40, num)] + 0.6 * rng.normal(size=(num, DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def fill(index: PassageIndex, num: int, *, seed: int = 0, start: int = 0) -> None:
    documents = [IndexedDocument(f"d{n}", "t", "v", (f"text {n}",), "", {"n": n}) for n in range(start, start + num)]
    index.write(documents, clustered(num, seed))


Made = Callable[..., PassageIndex]


@pytest.fixture(scope="module")
def made_before(tmp_path_factory: pytest.TempPathFactory) -> Callable[[IndexKind, int], Path]:
    """`made_before(kind, num)` is the directory of a trained index of recall 0.9, to be copied."""
    directories: dict[tuple[IndexKind, int], Path] = {}

    def find(kind: IndexKind, num: int) -> Path:
        if (kind, num) not in directories:
            directory = directories[kind, num] = tmp_path_factory.mktemp("trained")
            index = PassageIndex.open(directory, SETTINGS, kind=kind, recall=0.9)
            fill(index, num)
            assert index.improve() is not None
            index.close()
        return directories[kind, num]

    return find


@pytest.fixture
def made(made_before: Callable[[IndexKind, int], Path], tmp_path: Path) -> Made:
    """`made(kind, num)` is a trained index of recall 0.9 of `fill(index, num)` at `tmp_path`."""

    def open_copy(kind: IndexKind, num: int) -> PassageIndex:
        shutil.copytree(made_before(kind, num), tmp_path, dirs_exist_ok=True)
        return PassageIndex.open(tmp_path, SETTINGS, kind=kind, recall=0.9)

    return open_copy


def recall(index: PassageIndex, vectors: np.ndarray, queries: np.ndarray, **how: object) -> float:
    """Of the ten nearest of `vectors`, which are documents d0, d1, ..."""
    found = 0
    for query in queries:
        truth = {f"d{n}" for n in np.argsort(-(vectors @ query), kind="stable")[:10]}
        found += len(truth & {passage.document_id for _, passage in index.search(query, 10, **how)})  # pyright: ignore
    return found / (10 * len(queries))


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_trained_index_reaches_its_stated_recall(kind: IndexKind, tmp_path: Path) -> None:
    index = PassageIndex.open(tmp_path, SETTINGS, kind=kind, recall=0.9)
    fill(index, 4000)
    assert recall(index, clustered(4000, 0), clustered(100, 1)) == 1.0  # nothing is trained yet
    reports: list[tuple[str, int, int]] = []
    trained = index.improve(lambda *report: reports.append(report))
    assert trained is not None and index.trained == trained and trained.kind == kind and trained.num_rows == 4000
    assert 0.9 <= trained.recall < 1.0
    pairs = clustered(4000, 0)[np.random.default_rng(5).integers(0, 4000, (2, 400))].sum(0)
    halfway = pairs / np.linalg.norm(pairs, axis=1, keepdims=True)
    reached = recall(index, clustered(4000, 0), halfway)
    assert abs(reached - trained.recall) < 0.05  # of other pairs; half as wide a search finds 0.1 less
    assert index.recall(halfway, 10) == pytest.approx(reached, abs=5e-3)  # ties, two ways to sum
    nearer = recall(index, clustered(4000, 0), clustered(200, 1))
    assert nearer > reached
    assert reports[0] == ("train", 0, 1) and reports[-1] == ("add", 4000, 4000)
    assert index.improve() is None  # nothing changed


def test_higher_recall_target_searches_more(tmp_path: Path) -> None:
    widths = []
    for wanted in (0.3, 0.8, 0.999):
        (tmp_path / str(wanted)).mkdir()
        index = PassageIndex.open(tmp_path / str(wanted), SETTINGS, kind="ivf", recall=wanted)
        fill(index, 4000)
        trained = index.improve()
        assert trained is not None and trained.recall >= wanted
        widths.append(trained.width)
    assert widths[0] < widths[1] < widths[2]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_trained_index_is_memory_mapped_after_a_restart(kind: IndexKind, tmp_path: Path) -> None:
    index = PassageIndex.open(tmp_path, SETTINGS, kind=kind)
    fill(index, 3000)
    index.improve()
    queries = clustered(20, 1)
    hits = [index.search(query, 10) for query in queries]
    index.close()
    again = PassageIndex.open(tmp_path, SETTINGS, kind=kind)
    assert again.trained is not None and [again.search(query, 10) for query in queries] == hits
    with open("/proc/self/maps") as maps:
        assert again.trained.file in maps.read()
    (segment,) = again._view.segments
    if kind == "ivf":
        assert isinstance(
            faiss.downcast_InvertedLists(segment.index.invlists),  # pyright: ignore[reportAttributeAccessIssue]
            faiss.OnDiskInvertedLists,
        )


def test_changes_are_visible_at_once_and_many_changes_cause_a_rebuild(made: Made, tmp_path: Path) -> None:
    index = made("ivf", 4000)
    first = index.trained
    assert first is not None
    fill(index, 200, seed=7, start=4000)
    index.write(removed=[f"d{n}" for n in range(100)])
    assert index.improve() is None and index.trained == first
    vectors = np.concatenate([clustered(4000, 0), clustered(200, 7)])
    vectors[:100] = 0.0
    assert recall(index, vectors, clustered(100, 1)) > 0.85
    ((_, newest),) = index.search(vectors[4100], 1)
    assert newest.document_id == "d4100"
    assert all(int(p.document_id[1:]) >= 100 for q in clustered(50, 0) for _, p in index.search(q, 10))
    fill(index, 300, seed=8, start=4200)
    second = index.improve()
    assert second is not None and second.num_rows == 4400 and second.num_trained == first.num_trained == 4000
    assert [path.name for path in tmp_path.glob("*.faiss")] == [second.file]
    vectors = np.concatenate([vectors, clustered(300, 8)])
    assert recall(index, vectors, clustered(100, 1)) > 0.85
    fill(index, 4000, seed=9, start=4500)
    third = index.improve()
    assert third is not None and third.num_trained == third.num_rows == 8400  # too many for the old clusters


def test_auto_trains_above_a_passage_count_and_drops_the_index_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "LEAST_TRAINED", 1000)
    index = PassageIndex.open(tmp_path, SETTINGS)
    fill(index, 999)
    assert index.improve() is None and index.trained is None
    fill(index, 2, start=999)
    assert index.improve() is not None and index.trained is not None
    index.write(removed=["d999", "d1000", *(f"d{n}" for n in range(600))])
    assert index.improve() is None and index.trained is None and not list(tmp_path.glob("*.faiss"))
    assert recall(index, np.concatenate([0 * clustered(600, 0), clustered(999, 0)[600:]]), clustered(20, 1)) == 1.0
    assert PassageIndex.open(None, SETTINGS, kind="ivf").improve() is None  # in memory


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("upto", [20, 2000])
def test_selective_filters_are_searched_exactly(kind: IndexKind, upto: int, made: Made) -> None:
    index = made(kind, 4000)
    where = parse_filter({"type": "lt", "key": "n", "value": upto})
    reached = recall(index, clustered(4000, 0)[:upto], clustered(50, 1), where=where)
    assert reached == 1.0 if upto == 20 else reached > 0.8


def test_all_passages_of_a_trained_index_can_be_removed(made: Made) -> None:
    index = made("ivf", 2000)
    fill(index, 2000, seed=5)  # each replaced
    assert index.improve() is not None
    assert recall(index, clustered(2000, 5), clustered(50, 1)) > 0.85
    index.write(removed=index.versions())
    assert index.improve() is None and index.trained is None and index.search(clustered(1, 1)[0], 3) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damaged_index_file_is_rebuilt_without_losing_results(
    damage: str, made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = made("ivf", 2000)
    trained = index.trained
    assert trained is not None
    index.close()
    path = tmp_path / trained.file
    if damage == "delete":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-9])
    with caplog.at_level(logging.WARNING):
        index = PassageIndex.open(tmp_path, SETTINGS, kind="ivf", recall=0.9)
    assert index.trained is None and "until the index is rebuilt" in caplog.text
    assert recall(index, clustered(2000, 0), clustered(20, 1)) == 1.0
    again = index.improve()
    assert again is not None and index.trained == again
    assert [path.name for path in tmp_path.glob("*.faiss")] == [again.file]


def test_index_file_outside_the_directory_is_ignored(
    made_before: Callable[[IndexKind, int], Path], tmp_path: Path
) -> None:
    shutil.copytree(made_before("ivf", 2000), tmp_path / "own")
    index = PassageIndex.open(tmp_path / "own", SETTINGS, kind="ivf", recall=0.9)
    trained = index.trained
    assert trained is not None
    (tmp_path / "own" / trained.file).rename(tmp_path / trained.file)
    with index._catalog.transaction():
        moved = dataclasses.replace(trained, file=f"../{trained.file}")
        index._catalog.set_value("trained", dataclasses.asdict(moved))
    index.close()
    assert PassageIndex.open(tmp_path / "own", SETTINGS, kind="ivf", recall=0.9).trained is None


def test_last_stage_of_a_trained_index_equals_a_plain_search(made: Made) -> None:
    index = made("ivf", 4000)
    fill(index, 100, seed=3, start=4000)
    num_early = 0
    for query in clustered(30, 1):
        *before, last = index.stages(query, 5, 8)
        assert last == (index.search(query, 5), True)
        num_early += any(hits == last[0] for hits, _ in before[: len(before) // 2])
    assert num_early > 12


def test_many_deletions_alone_cause_a_rebuild(made: Made) -> None:
    index = made("ivf", 4000)
    index.write(removed=[f"d{n}" for n in range(390)])
    assert index.improve() is None
    index.write(removed=[f"d{n}" for n in range(390, 410)])
    again = index.improve()
    assert again is not None and again.num_rows == 3590
