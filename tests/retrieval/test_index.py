"""The saved vector index: exact search, atomic writes, and no damaged or foreign index is ever served."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ccjax.retrieval.index import IndexedDocument, IndexSettings, IndexUnusableError, PassageIndex

SETTINGS = IndexSettings(embedder="e-1", dim=8, chunk_tokens=200, overlap_tokens=0, token_probe=(9, 12, 7))


def documents(num_passages: tuple[int, ...], tag: str = "") -> list[IndexedDocument]:
    return [
        IndexedDocument(f"d{i}.md", f"Title {i}", f"v{i}{tag}", tuple(f"text {i}.{n} ü{tag}" for n in range(num)))
        for i, num in enumerate(num_passages)
    ]


def unit_vectors(num: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(num, 8)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def make(seed: int = 0, tag: str = "") -> PassageIndex:
    return PassageIndex(documents((3, 1, 4), tag), unit_vectors(8, seed))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("top_k", [1, 5, 50, 1000])
def test_search_is_exact(top_k: int) -> None:
    docs, vectors = documents((0, 100, 7, 200, 3)), unit_vectors(310)
    index = PassageIndex(docs, vectors)
    rows = [(doc.document_id, n) for doc in docs for n in range(len(doc.passages))]
    for query in unit_vectors(20, seed=1):
        expected = np.argsort(-(vectors.astype(np.float64) @ query.astype(np.float64)))[:top_k]
        hits = index.search(query, top_k)
        assert [(doc.document_id, n) for _, doc, n in hits] == [rows[row] for row in expected]
        np.testing.assert_allclose([score for score, _, _ in hits], vectors[expected] @ query, atol=1e-6)


@pytest.mark.parametrize("num_stages", [2, 7, 1000])
def test_stages_end_with_what_a_search_finds(num_stages: int) -> None:
    index = PassageIndex(documents((0, 100, 7, 200, 3)), unit_vectors(310))
    for query in unit_vectors(5, seed=1):
        *before, last = index.stages(query, 5, num_stages)
        assert last == (index.search(query, 5), True) and not any(is_all for _, is_all in before)
        assert len(before[0][0]) == min(5, 310 // num_stages or 1)


def test_ties_come_in_index_order() -> None:
    index = PassageIndex(documents((2, 2, 2)), np.repeat(unit_vectors(1), 6, axis=0))
    hits = index.search(unit_vectors(1)[0], 6)
    assert [(doc.document_id, n) for _, doc, n in hits] == [(f"d{i}.md", n) for i in range(3) for n in range(2)]


def test_an_empty_index_and_a_zero_query_find_nothing() -> None:
    assert PassageIndex((), np.empty((0, 8), np.float32)).search(unit_vectors(1)[0], 3) == []
    assert make().search(np.zeros(8, np.float32), 3) == []


def test_vectors_must_match_passages() -> None:
    with pytest.raises(ValueError, match=r"vectors: wanted \[8, dim\], got \(7, 8\)"):
        PassageIndex(documents((3, 1, 4)), unit_vectors(7))


def test_save_load_save_is_byte_equal(tmp_path: Path) -> None:
    make().save(tmp_path / "a", SETTINGS)
    loaded = PassageIndex.load(tmp_path / "a", SETTINGS)
    assert loaded.documents == make().documents and np.array_equal(loaded.vectors, make().vectors)
    loaded.save(tmp_path / "b", SETTINGS)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") and len(contents(tmp_path / "a")) == 3


def test_a_new_save_replaces_the_old_one_and_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    make().save(tmp_path, SETTINGS)
    make(seed=1, tag="x").save(tmp_path, SETTINGS)
    assert len(contents(tmp_path)) == 4 and (tmp_path / "notes.json").read_text() == "mine"
    assert PassageIndex.load(tmp_path, SETTINGS).documents == make(tag="x").documents


@pytest.mark.parametrize("step", [0, 1, 2], ids=["vectors", "passages", "manifest"])
def test_a_save_that_dies_leaves_the_old_index(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save(tmp_path, SETTINGS)
    replace, done = os.replace, []

    def dying(source: str, target: Path) -> None:
        if len(done) == step:
            raise OSError("no space left on device")
        done.append(target)
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(os, "replace", dying)
        make(seed=1, tag="x").save(tmp_path, SETTINGS)
    assert PassageIndex.load(tmp_path, SETTINGS).documents == make().documents
    assert not list(tmp_path.glob(".writing-*"))
    make(seed=1, tag="x").save(tmp_path, SETTINGS)
    assert len(contents(tmp_path)) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("embedder", "e-2"), ("dim", 9), ("chunk_tokens", 100), ("overlap_tokens", 5), ("token_probe", (9, 12, 8))]
    + [("format_version", 2)],
)
def test_an_index_made_with_other_settings_is_refused(tmp_path: Path, field: str, value: object) -> None:
    make().save(tmp_path, SETTINGS)
    with pytest.raises(IndexUnusableError, match=f"made with other settings: {field} "):
        PassageIndex.load(tmp_path, dataclasses.replace(SETTINGS, **{field: value}))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flip_byte,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
@pytest.mark.parametrize("pattern", ["vectors-*.faiss", "passages-*.json", "manifest.json"])
def test_a_damaged_index_is_refused(tmp_path: Path, pattern: str, damage: str) -> None:
    make().save(tmp_path, SETTINGS)
    (path,) = tmp_path.glob(pattern)
    DAMAGE[damage](path)
    with pytest.raises(IndexUnusableError, match="damaged|missing|no saved index|other settings"):
        PassageIndex.load(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"settings": {}, "files": {}}', '{"settings": 3, "files": 4}', "null"]
)
def test_a_foreign_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(IndexUnusableError):
        PassageIndex.load(tmp_path, SETTINGS)


def test_a_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    make().save(tmp_path / "index", SETTINGS)
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    name = manifest["files"]["passages"]["name"]
    (tmp_path / "index" / name).rename(tmp_path / name)
    manifest["files"]["passages"]["name"] = f"../{name}"
    (tmp_path / "index" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexUnusableError, match="missing"):
        PassageIndex.load(tmp_path / "index", SETTINGS)
