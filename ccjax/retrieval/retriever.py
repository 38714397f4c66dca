"""The retriever: keeps an index in step with a directory of documents and answers queries. It knows no model of the
engine, no prompt and no HTTP."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ccjax.retrieval.chunking import split
from ccjax.retrieval.documents import MAX_FILE_BYTES, DocumentError, parse_document, read_document
from ccjax.retrieval.embedding import Embedder, default_embedder
from ccjax.retrieval.index import IndexedDocument, IndexSettings, IndexUnusableError, PassageIndex
from ccjax.retrieval.scan import find_files

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total); stages are `read` (files) and then `embed` (passages)."""

_EMBED_BATCH = 64  # passages between two progress reports: about 3 s on two CPU cores
_TOKEN_PROBES = ("The quick brown fox jumps over the lazy dog.", "naïve_id = f(x, 3.14159)\n\n\t", "日本語 Ελλάδα")


@dataclasses.dataclass(frozen=True)
class Passage:
    """One retrieved passage.

    Attributes:
      document_id: the source file's path below the documents directory, with forward slashes.
      passage_id: `document_id#n`, n counted from 0 in reading order.
      version: sha256 (hex) of the source file's bytes.
      score: cosine similarity to the query, in [-1, 1].
      path: the source file.
    """

    document_id: str
    passage_id: str
    title: str
    text: str
    version: str
    score: float
    path: str


@dataclasses.dataclass(frozen=True)
class RefreshReport:
    """What an update of the index did: document ids in order, and (path, reason) of what could not be used.

    A document that was served before and fails now stands under both `removed` and `failed`. `rebuilt` says why a
    saved index was not used, or is None.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    rebuilt: str | None = None


class Retriever:
    """Ranked passages from a directory of documents; made by `Retriever.open`.

    `search` may run in several threads and during `refresh`: it sees the index before or after, never between.
    """

    def __init__(
        self,
        docs_dir: Path,
        *,
        index_dir: Path | None,
        embedder: Embedder,
        count_tokens: Callable[[str], int],
        chunk_tokens: int,
        overlap_tokens: int,
        max_file_bytes: int,
        progress: Progress | None,
    ) -> None:
        """Use `Retriever.open`: a retriever made here has loaded nothing yet."""
        self._docs_dir = docs_dir
        self._index_dir = index_dir
        self._embedder = embedder
        self._count_tokens = count_tokens
        self._settings = IndexSettings(
            embedder=embedder.name,
            dim=embedder.dim,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
            token_probe=tuple(count_tokens(text) for text in _TOKEN_PROBES),
        )
        self._max_file_bytes = max_file_bytes
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._update_lock = threading.Lock()
        self._index: PassageIndex | None = PassageIndex((), np.empty((0, embedder.dim), np.float32))
        self.report = RefreshReport()
        """What the last update of the index did: that of `open`, then that of each `refresh`."""

    @classmethod
    def open(
        cls,
        docs_dir: str | Path,
        *,
        index_dir: str | Path | None = None,
        embedder: Embedder | None = None,
        count_tokens: Callable[[str], int],
        chunk_tokens: int = 200,
        overlap_tokens: int = 0,
        progress: Progress | None = None,
        strict: bool = False,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> Retriever:
        """A retriever over the files below `docs_dir`, up to date with them.

        Args:
          index_dir: where the index is kept between runs; None keeps it in memory only. A saved index made with
            another embedder, tokenizer or chunk size, or a damaged one, is rebuilt with a log line.
          embedder: None = `default_embedder("auto")`.
          count_tokens: length of a text in the engine's tokens; decides where passages end.
          chunk_tokens: longest passage, in those tokens.
          overlap_tokens: most tokens that two neighbouring passages share.
          progress: called while files are read and passages embedded.
          strict: whether a file that cannot be used raises. By default it is skipped, logged, and listed in
            `report.failed`.
          max_file_bytes: larger files are refused.

        Raises:
          ValueError: an argument is out of range, or `docs_dir` is not a directory.
          DocumentError: with `strict`, for the first file that cannot be used.
        """
        docs_dir = Path(docs_dir)
        if not docs_dir.is_dir():
            raise ValueError(f"docs_dir: wanted a directory, got {str(docs_dir)!r}")
        if index_dir is not None and Path(index_dir).resolve() == docs_dir.resolve():
            raise ValueError(f"index_dir: wanted a directory other than docs_dir, got {str(index_dir)!r}")
        split("", count_tokens=count_tokens, chunk_tokens=chunk_tokens, overlap_tokens=overlap_tokens)  # bad settings
        retriever = cls(
            docs_dir.resolve(),
            index_dir=None if index_dir is None else Path(index_dir).resolve(),
            embedder=embedder if embedder is not None else default_embedder(),
            count_tokens=count_tokens,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
            max_file_bytes=max_file_bytes,
            progress=progress,
        )
        rebuilt = retriever._load()
        retriever._update(strict=strict, rebuilt=rebuilt)
        if not retriever.num_passages:
            _log.warning("no passages: %s holds no usable document", docs_dir)
        return retriever

    @property
    def num_documents(self) -> int:
        """Documents that can be found."""
        return len(self._current().documents)

    @property
    def num_passages(self) -> int:
        """Passages that can be found."""
        return len(self._current())

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of the documents that can be found."""
        return tuple(document.document_id for document in self._current().documents)

    def passages(self, document_id: str) -> list[Passage]:
        """All passages of a document in reading order, each with score 0; empty where there is no such document."""
        return [
            self._passage(document, number, 0.0)
            for document in self._current().documents
            if document.document_id == document_id
            for number in range(len(document.passages))
        ]

    def search(self, query: str, top_k: int) -> list[Passage]:
        """The `top_k` passages most similar to `query`, best first; fewer where fewer exist or match.

        Raises:
          ValueError: `query` is blank, `top_k` is under 1, or the retriever is closed.
        """
        ((passages, _),) = self.stages(query, top_k, 1)
        return passages

    def stages(self, query: str, top_k: int, num_stages: int) -> Iterator[tuple[list[Passage], bool]]:
        """What `search` finds in what was searched so far, after each of at most `num_stages` parts of the work
        (RAGCache sec. 5.3), and whether that is all: then it is what `search` finds.

        Raises:
          ValueError: as `search`, or `num_stages` is under 1; at once.
        """
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query: wanted a non-empty string, got {query!r}")
        for name, value in (("top_k", top_k), ("num_stages", num_stages)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: wanted an integer of at least 1, got {value!r}")
        index = self._current()
        vector = self._embedder.embed([query])[0] if len(index) else np.empty(0, np.float32)
        found = index.stages(vector, top_k, num_stages)
        return (([self._passage(doc, number, score) for score, doc, number in hits], is_all) for hits, is_all in found)

    def refresh(self) -> RefreshReport:
        """Brings the index in step with the directory and saves it if it changed.

        Every file is read and hashed; only new and changed ones are parsed and embedded, the vectors of the others
        are kept. A changed file that cannot be used any more is dropped rather than served stale.
        """
        return self._update(strict=False, rebuilt=None)

    def save(self) -> None:
        """Writes the index to `index_dir`. `open` and `refresh` do this themselves after every change.

        Raises:
          ValueError: the retriever was opened without `index_dir`, or is closed.
        """
        if self._index_dir is None:
            raise ValueError("index_dir: wanted a directory given to Retriever.open, got None")
        with self._update_lock:
            self._current().save(self._index_dir, self._settings)

    def close(self) -> None:
        """Frees the index; every later call but `close` raises ValueError."""
        with self._update_lock:
            self._index = None

    def _current(self) -> PassageIndex:
        index = self._index
        if index is None:
            raise ValueError("the retriever is closed")
        return index

    def _passage(self, document: IndexedDocument, number: int, score: float) -> Passage:
        return Passage(
            document_id=document.document_id,
            passage_id=f"{document.document_id}#{number}",
            title=document.title,
            text=document.passages[number],
            version=document.version,
            score=score,
            path=str(self._docs_dir / document.document_id),
        )

    def _load(self) -> str | None:
        """Takes over the saved index; else says why there is something to rebuild (None at a first start)."""
        if self._index_dir is None:
            return None
        self._index_dir.mkdir(parents=True, exist_ok=True)  # fails now rather than after the embedding
        if not any(self._index_dir.iterdir()):
            return None
        try:
            self._index = PassageIndex.load(self._index_dir, self._settings)
        except IndexUnusableError as error:
            _log.warning("the index in %s is rebuilt: %s", self._index_dir, error)
            return str(error)
        return None

    def _update(self, *, strict: bool, rebuilt: str | None) -> RefreshReport:
        with self._update_lock:
            old = self._current()
            known = {document.document_id: document for document in old.documents}
            files, failed = find_files(self._docs_dir, skip=self._index_dir)
            problems = [DocumentError(path, reason) for path, reason in failed]
            if strict and problems:
                raise problems[0]
            documents: list[IndexedDocument] = []
            for done, (document_id, path) in enumerate(files.items()):
                self._progress("read", done, len(files))
                try:
                    documents.append(self._read(document_id, path, known.get(document_id)))
                except DocumentError as error:
                    if strict:
                        raise
                    problems.append(error)
            self._progress("read", len(files), len(files))
            for problem in problems:
                _log.warning("skipped %s", problem)

            now = {document.document_id for document in documents}
            report = RefreshReport(
                added=tuple(doc.document_id for doc in documents if doc.document_id not in known),
                changed=tuple(
                    doc.document_id for doc in documents if known.get(doc.document_id, doc).version != doc.version
                ),
                removed=tuple(document_id for document_id in known if document_id not in now),
                failed=tuple((problem.path, problem.reason) for problem in problems),
                rebuilt=rebuilt,
            )
            if report.added or report.changed or report.removed:
                self._index = PassageIndex(documents, self._vectors(documents, old))
            if self._index_dir is not None and (self._index is not old or rebuilt):
                self._current().save(self._index_dir, self._settings)
            self.report = report
            return report

    def _read(self, document_id: str, path: Path, known: IndexedDocument | None) -> IndexedDocument:
        data = read_document(path, max_file_bytes=self._max_file_bytes)
        version = hashlib.sha256(data).hexdigest()
        if known is not None and known.version == version:
            return known
        loaded = parse_document(path, data)
        try:
            passages = split(
                loaded.text,
                count_tokens=self._count_tokens,
                chunk_tokens=self._settings.chunk_tokens,
                overlap_tokens=self._settings.overlap_tokens,
                markdown=loaded.markdown,
            )
        except ValueError as error:
            raise DocumentError(path, str(error)) from None
        return IndexedDocument(document_id, loaded.title, version, tuple(passages))

    def _vectors(self, documents: list[IndexedDocument], old: PassageIndex) -> np.ndarray:
        """The vectors of `documents`: kept for those that `old` holds unchanged, computed for the others."""
        old_vectors = old.vectors
        old_rows: dict[str, list[int]] = {document.document_id: [] for document in old.documents}
        unchanged = {id(document) for document in old.documents}
        for row, (place, _) in enumerate(old.places):
            old_rows[old.documents[place].document_id].append(row)

        vectors = np.empty((sum(len(document.passages) for document in documents), self._settings.dim), np.float32)
        new_rows: list[int] = []
        texts: list[str] = []
        start = 0
        for document in documents:
            end = start + len(document.passages)
            if id(document) in unchanged:
                vectors[start:end] = old_vectors[old_rows[document.document_id]]
            else:
                new_rows.extend(range(start, end))
                texts.extend(f"{document.title}\n{text}" for text in document.passages)  # a title names the subject
            start = end
        for done in range(0, len(texts), _EMBED_BATCH):
            self._progress("embed", done, len(texts))
            batch = slice(done, done + _EMBED_BATCH)
            embedded = self._embedder.embed(texts[batch])
            if embedded.shape != (wanted := (len(texts[batch]), self._settings.dim)):
                raise ValueError(f"embedder: wanted vectors of shape {wanted}, got {embedded.shape}")
            vectors[new_rows[batch]] = embedded
        self._progress("embed", len(texts), len(texts))
        return vectors
