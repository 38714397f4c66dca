"""The vector index: passages and their vectors in memory and on disk. Knows no files of documents and no embedder.

On disk an index is `manifest.json`, which names by content `vectors-<sha256>.faiss` and `passages-<sha256>.json`. The
manifest is renamed into place last, so a reader sees the old index or the new one. One process writes at a time; if
two do, the loser's index is found incomplete and rebuilt, never mixed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ccjax.retrieval.staged import staged_search

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"


class IndexUnusableError(Exception):
    """A saved index that cannot serve: absent, damaged, or made with other settings. The message says which."""


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """Everything besides the documents that decides passages and vectors; an index serves these settings only.

    Attributes:
      embedder: the embedder's name, fingerprint included.
      token_probe: token counts of fixed texts, which tell one tokenizer from another.
    """

    embedder: str
    dim: int
    chunk_tokens: int
    overlap_tokens: int
    token_probe: tuple[int, ...]
    format_version: int = FORMAT_VERSION


@dataclasses.dataclass(frozen=True)
class IndexedDocument:
    """One document and its passages' texts. `version` is the sha256 (hex) of the source file."""

    document_id: str
    title: str
    version: str
    passages: tuple[str, ...]


class PassageIndex:
    """An immutable set of documents with one vector for each passage, searched exactly by inner product.

    Exact search reads every vector: some milliseconds for 50,000 passages of 384 dimensions. A coarser faiss index
    would take the place of `IndexFlatIP` here; the file format holds any faiss index, and so does `staged_search`.
    """

    def __init__(self, documents: Sequence[IndexedDocument], vectors: np.ndarray) -> None:
        """`vectors` is float32 [passages, dim], in the order of the documents' passages."""
        self.documents = tuple(documents)
        self.places = tuple((row, n) for row, doc in enumerate(self.documents) for n in range(len(doc.passages)))
        if vectors.ndim != 2 or len(vectors) != len(self.places):
            raise ValueError(f"vectors: wanted [{len(self.places)}, dim], got {vectors.shape}")
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(np.ascontiguousarray(vectors, np.float32))  # pyright: ignore[reportCallIssue]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def vectors(self) -> np.ndarray:
        """A copy of all vectors, float32 [passages, dim]."""
        return self._index.reconstruct_n(0, len(self))  # pyright: ignore[reportCallIssue]

    def search(self, vector: np.ndarray, top_k: int) -> list[tuple[float, IndexedDocument, int]]:
        """(score, document, passage number) of the `top_k` best passages, best first, ties in index order.

        Fewer come back where the index holds fewer; none for a zero `vector`, which resembles nothing.
        """
        ((hits, _),) = self.stages(vector, top_k, 1)
        return hits

    def stages(
        self, vector: np.ndarray, top_k: int, num_stages: int
    ) -> Iterator[tuple[list[tuple[float, IndexedDocument, int]], bool]]:
        """What `search` would return of what was searched so far, after each of at most `num_stages` parts of the work,
        and whether that is all: then it is what `search` returns."""
        if not len(self) or not vector.any():
            yield [], True
            return
        for found in staged_search(self._index, vector, min(top_k, len(self)), num_stages=num_stages):
            hits = sorted(
                zip(found.scores.tolist(), found.rows.tolist(), strict=True), key=lambda hit: (-hit[0], hit[1])
            )
            places = ((score, self.places[row]) for score, row in hits)
            yield [(score, self.documents[place], number) for score, (place, number) in places], found.is_final

    def save(self, directory: Path, settings: IndexSettings) -> None:
        """Writes the index to `directory`, replacing the one there in one step."""
        directory.mkdir(parents=True, exist_ok=True)
        passages = json.dumps([dataclasses.asdict(document) for document in self.documents]).encode()
        files = {
            "vectors": _write(directory, "vectors", ".faiss", faiss.serialize_index(self._index).tobytes()),
            "passages": _write(directory, "passages", ".json", passages),
        }
        manifest = json.dumps({"settings": dataclasses.asdict(settings), "files": files}, indent=1)
        _replace(directory / _MANIFEST, manifest.encode())
        for pattern in ("vectors-*.faiss", "passages-*.json"):
            for path in directory.glob(pattern):
                if path.name not in {file["name"] for file in files.values()}:
                    path.unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: Path, settings: IndexSettings) -> PassageIndex:
        """The index saved in `directory`, every byte checked against the manifest's sha256 before it is parsed.

        Raises:
          IndexUnusableError: there is none, it is damaged, or it was not made with `settings`.
        """
        try:
            manifest = json.loads((directory / _MANIFEST).read_bytes())
            saved, files = manifest["settings"], manifest["files"]
            wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
            if changed := [key for key in wanted if saved.get(key) != wanted[key]]:
                pairs = ", ".join(f"{key} {saved.get(key)!r} -> {wanted[key]!r}" for key in changed)
                raise IndexUnusableError(f"made with other settings: {pairs}")
            vectors = faiss.deserialize_index(np.frombuffer(_read(directory, files["vectors"]), np.uint8))
            passages = json.loads(_read(directory, files["passages"]))
            documents = [IndexedDocument(**{**raw, "passages": tuple(raw["passages"])}) for raw in passages]
            return cls(documents, vectors.reconstruct_n(0, vectors.ntotal))
        except FileNotFoundError as error:
            reason = "no saved index" if str(error.filename).endswith(_MANIFEST) else f"{error.filename} is missing"
            raise IndexUnusableError(reason) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise IndexUnusableError(f"damaged: {type(error).__name__}: {error}") from None


def _write(directory: Path, kind: str, suffix: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    path = directory / f"{kind}-{digest}{suffix}"
    _replace(path, data)
    return {"name": path.name, "sha256": digest}


def _read(directory: Path, file: dict[str, Any]) -> bytes:
    data = (directory / Path(file["name"]).name).read_bytes()
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise ValueError(f"{file['name']} does not have the sha256 that the manifest names")
    return data


def _replace(path: Path, data: bytes) -> None:
    """Writes under a temporary name, flushes to disk, then renames: no reader meets half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
