"""Documents, passages, their words and vectors in one SQLite file, which is authoritative.

Row ids of passages only grow and are never reused, so ids alone show what is new and what was deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.retrieval.filters import Filter
from ccjax.retrieval.words import TOKENIZER, indexed_text, question_terms
from ccjax.types import Document

FORMAT_VERSION = 10
_FILE = "passages.sqlite"
_ROWS_AT_ONCE = 8192
_PATIENCE_S, _PATIENCE_WITH_OTHERS_S = 60.0, 0.5
_MOST_TERMS = 64
_SCORED_ROWS, _SCORED_SHARE = 1000, 0.01
"""Rows, once for each of their words, whose bm25 is computed, at 3 us each: those with the rarest words, at most so
many or that share of all rows."""
_COUNTED_ROWS, _COUNTED_SHARE = 4000, 0.02
"""Of all words that count towards scores: frequent ones take time and say little."""
_TABLES = f"""
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sources (path TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    id INTEGER PRIMARY KEY, document_id TEXT NOT NULL UNIQUE, source TEXT NOT NULL, title TEXT NOT NULL,
    version TEXT NOT NULL, metadata TEXT NOT NULL
);
CREATE TABLE passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    number INTEGER NOT NULL, text TEXT NOT NULL
);
CREATE INDEX passages_of_document ON passages (document, number);
CREATE TABLE vectors (
    passage INTEGER PRIMARY KEY REFERENCES passages (id) ON DELETE CASCADE, vector BLOB NOT NULL
);
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize="{TOKENIZER}");
"""

_ROWS_WHERE = """SELECT id FROM passages INDEXED BY passages_of_document
    WHERE document IN (SELECT id FROM documents WHERE"""
_AMONG = "document_id IN (SELECT value FROM json_each(?))"


class IndexUnusableError(Exception):
    """A saved index that cannot be used: damaged, or made with other settings. The message says which."""


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """Everything besides the documents that determines passages and vectors; an index is valid for these settings only.

    Attributes:
      embedder: the embedder's name, fingerprint included.
      token_probe: token counts of fixed texts, which distinguish tokenizers.
    """

    embedder: str
    dim: int
    chunk_tokens: int
    token_probe: tuple[int, ...]
    format_version: int = FORMAT_VERSION


@dataclasses.dataclass(frozen=True)
class IndexedDocument:
    """One document and its passages' texts.

    Attributes:
      version: sha256 (hex) of its source text.
      source: its file, as a path below the documents directory; "" means `document_id`.
      metadata: values for filters: text, numbers and booleans by name.
    """

    document_id: str
    title: str
    version: str
    passages: tuple[str, ...]
    source: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Passage:
    """The `number`-th passage of a document, counted from 0 in reading order.

    Attributes:
      document_id: the source file's path below the documents directory, with forward slashes; in a collection
        (`ccjax.retrieval.jsonl`) followed by `/` and the document's own id.
      source: the file, as a path below the documents directory.
      version: sha256 (hex) of the source file's bytes, in a collection of the document's line.
      metadata: text, numbers and booleans by name: a Markdown file's front matter, a collection's `metadata`.
      text: with the document's title and the passage's headings as first line.
      score: cosine similarity to the query, in [-1, 1]; in a search by words alone bm25, above 0; 0 without a query.
    """

    document_id: str
    source: str
    title: str
    version: str
    metadata: Mapping[str, Any]
    number: int
    text: str
    score: float = 0.0

    @property
    def passage_id(self) -> str:
        """`document_id#number`."""
        return f"{self.document_id}#{self.number}"

    def as_document(self) -> Document:
        """The passage as part of a request."""
        return Document(self.text, self.passage_id, self.title, self.version, self.score, self.document_id)


class Catalog:
    """The catalog. Thread-safe: `lock` is held during every call and transaction."""

    def __init__(self, directory: Path | None, settings: IndexSettings, *, read_only: bool = False) -> None:
        """Opens the catalog in `directory`, creating an empty one if there is none; None keeps it in memory. If it is
        `read_only`, there must be one, and nothing waits long for processes that lock it.

        Raises:
          IndexUnusableError: it is damaged, or was not made with `settings`.
          sqlite3.DatabaseError: it is damaged, or cannot be opened or written.
        """
        self.path = None if directory is None else directory / _FILE
        self.lock = threading.RLock()
        self._frequencies: dict[str, int] = {}
        place = (
            "file::memory:" if self.path is None else f"{self.path.absolute().as_uri()}?mode=rw{'c' * (not read_only)}"
        )
        patience_s = _PATIENCE_WITH_OTHERS_S if read_only else _PATIENCE_S
        self._connection = sqlite3.connect(
            place, isolation_level=None, check_same_thread=False, timeout=patience_s, uri=True
        )
        try:
            if read_only:
                self._connection.execute("PRAGMA query_only = ON")
            else:
                self._connection.execute("PRAGMA foreign_keys = ON")
                self._connection.execute("PRAGMA journal_mode = WAL")
                # An index that loses its last seconds recomputes them.
                self._connection.execute("PRAGMA synchronous = NORMAL")
            self._check(settings, read_only)
        except BaseException:
            self.close()
            raise

    @classmethod
    def known_to_others(
        cls, directory: Path, settings: IndexSettings, documents: Sequence[IndexedDocument]
    ) -> dict[str, np.ndarray]:
        """Text -> vector, float32 [dim], of the passages of some documents, as far as indexes in the folders of a
        directory hold the same versions under the same ids."""
        known: dict[str, np.ndarray] = {}
        for path in directory.glob(f"*/{_FILE}"):
            try:
                with contextlib.closing(cls(path.parent, settings, read_only=True)) as other:
                    old = {(name, version) for name, (version, _) in other.versions().items()}
                    same = [one.document_id for one in documents if (one.document_id, one.version) in old]
                    known |= other.known_vectors(same)
            except (IndexUnusableError, sqlite3.DatabaseError):
                continue
        return known

    @staticmethod
    def delete(directory: Path) -> None:
        """Deletes the catalog's files; processes that have it open keep theirs."""
        for suffix in ("", "-wal", "-shm"):
            (directory / f"{_FILE}{suffix}").unlink(missing_ok=True)

    def _check(self, settings: IndexSettings, read_only: bool) -> None:
        with self.transaction(writes=not read_only):
            tables = {name for (name,) in self._all("SELECT name FROM sqlite_master")}
            if not tables and not read_only:
                for statement in _TABLES.split(";"):
                    self._connection.execute(statement)
                self.set_value("settings", dataclasses.asdict(settings))
            elif missing := [name for name in ("documents", "passages", "vectors", "words") if name not in tables]:
                raise IndexUnusableError(f"damaged: no table {missing[0]}")
        try:
            saved = self.get_value("settings")
            wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
            changed = [key for key in wanted if saved.get(key) != wanted[key]]
        except (ValueError, AttributeError) as error:
            raise IndexUnusableError(f"damaged: {type(error).__name__}: {error}") from None
        if changed:
            pairs = ", ".join(f"{key} {saved.get(key)!r} -> {wanted[key]!r}" for key in changed)
            raise IndexUnusableError(f"made with other settings: {pairs}")

    @contextlib.contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[None]:
        """What is read in it is consistent, what is written happens as a whole; waits for other processes that
        write if it `writes` itself."""
        with self.lock:
            self._connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite ends it by itself if the disk is full
                    self._connection.execute("ROLLBACK")
                raise

    # -- notes -------------------------------------------------------------------------------------------------

    def set_value(self, name: str, value: Any) -> None:
        """Stores a JSON value by name."""
        self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, json.dumps(value)))

    def get_value(self, name: str) -> Any:
        """A stored value, or None."""
        found = self._all("SELECT value FROM about WHERE name = ?", name)
        return json.loads(found[0][0]) if found else None

    @property
    def stamp(self) -> int:
        """A number that changes whenever another process writes."""
        return self._one("PRAGMA data_version")

    # -- writing, in a transaction -----------------------------------------------------------------------------

    def add(self, document: IndexedDocument, vectors: np.ndarray) -> np.ndarray:
        """Adds a new document; returns int64 [passages], the rows of its passages.

        Args:
          vectors: float32 [passages, dim]; dim 0 for none. One that is NaN is not stored, nor is one of zeros: what the
            encoder failed on is tried again by the next process.
        """
        execute = self._connection.execute
        metadata = json.dumps(dict(document.metadata), ensure_ascii=False)
        source = document.source or document.document_id
        values = (document.document_id, source, document.title, document.version, metadata)
        insert = "INSERT INTO documents (document_id, source, title, version, metadata) VALUES (?, ?, ?, ?, ?)"
        key = execute(insert, values).lastrowid
        rows: list[int] = []
        for number, text in enumerate(document.passages):
            insert = "INSERT INTO passages (document, number, text) VALUES (?, ?, ?)"
            row = execute(insert, (key, number, text)).lastrowid
            assert row is not None
            execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row, indexed_text(text)))
            rows.append(row)
        self.add_vectors(rows, vectors)
        self._frequencies.clear()
        return np.array(rows, np.int64)

    def add_vectors(self, rows: Sequence[int], vectors: np.ndarray) -> None:
        """Adds the vectors of passages, as in `add`; those of deleted passages, and known ones, are ignored."""
        insert = "INSERT OR IGNORE INTO vectors SELECT id, ? FROM passages WHERE id = ?"
        own = zip(rows, vectors.astype("<f4"), strict=True)
        stored = ((vector.tobytes(), int(row)) for row, vector in own if vector.any() and not np.isnan(vector[0]))
        self._connection.executemany(insert, stored)

    def remove(self, document_ids: Collection[str]) -> np.ndarray:
        """Deletes documents, ignoring unknown ones; returns int64 [passages], the deleted rows, ascending."""
        which = json.dumps(list(document_ids))
        query = f"SELECT passages.id, text FROM passages JOIN documents ON documents.id = document WHERE {_AMONG}"
        old = [(row, indexed_text(text)) for row, text in self._all(query, which)]
        self._connection.executemany("INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", old)
        self._connection.execute(f"DELETE FROM documents WHERE {_AMONG}", (which,))
        self._frequencies.clear()
        return np.sort(np.array([row for row, _ in old], np.int64))

    def set_digest(self, source: str, digest: str | None) -> None:
        """Stores the digest of a source once all of it was added; None if the source is gone."""
        if digest is None:
            self._connection.execute("DELETE FROM sources WHERE path = ?", (source,))
        else:
            self._connection.execute("INSERT OR REPLACE INTO sources VALUES (?, ?)", (source, digest))

    # -- reading -----------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """The digests stored by `set_digest`, by source."""
        return dict(self._all("SELECT path, digest FROM sources"))

    def versions(self) -> dict[str, tuple[str, str]]:
        """(version, source) of every document, by document id, sorted."""
        rows = self._all("SELECT document_id, version, source FROM documents ORDER BY document_id")
        return {document_id: (version, source) for document_id, version, source in rows}

    def has(self, document_id: str) -> bool:
        """True if the document exists."""
        return self._one("SELECT EXISTS (SELECT 1 FROM documents WHERE document_id = ?)", document_id) == 1

    def count_documents(self) -> int:
        """Number of documents, including those without passages."""
        return self._one("SELECT COUNT(*) FROM documents")

    def document(self, document_id: str, numbers: Sequence[int] | None = None) -> list[Passage]:
        """The passages of a document in reading order, all or those with some numbers; none if it is unknown."""
        which = "document_id = ? AND (? OR number IN (SELECT value FROM json_each(?))) ORDER BY number"
        return list(self._passages(which, document_id, numbers is None, json.dumps(numbers)).values())

    def passages(self, rows: Sequence[int]) -> dict[int, Passage]:
        """Passages by row; deleted ones are left out."""
        return self._passages("passages.id IN (SELECT value FROM json_each(?))", json.dumps(rows))

    def rows(self, where: Filter | None = None) -> np.ndarray:
        """int64 [passages], ascending: all rows, or those of the documents that match a filter."""
        query, values = "SELECT id FROM passages INDEXED BY passages_of_document", ()
        if where is not None:
            query, values = f"{_ROWS_WHERE} {where.sql})", where.parameters
        with self.lock:
            found = self._connection.execute(query, values)
            parts = [np.array(part, np.int64)[:, 0] for part in iter(lambda: found.fetchmany(_ROWS_AT_ONCE), [])]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def search(self, text: str | Sequence[str], top_k: int | None) -> list[tuple[float, int]]:
        """(bm25, row) of the passages that share most words with a text, best first, ties by row.

        Args:
          text: of several, words count as often as these have them.
          top_k: None for all that are scored.
        """
        query = self._match([text] if isinstance(text, str) else text)
        if query is None:
            return []
        statement = "SELECT -rank, rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?"
        return self._all(statement, query, -1 if top_k is None else top_k)

    def _match(self, texts: Sequence[str]) -> str | None:
        """The FTS5 query for texts; None if no passage has any of their words."""
        terms = [term for text in texts for term in question_terms(text) if self._frequency(term)]
        terms = sorted(terms, key=self._frequency)[:_MOST_TERMS]
        if not terms:
            return None
        if (num_rows := self._frequencies.get("")) is None:
            num_rows = self._frequencies[""] = self._one("SELECT COUNT(*) FROM passages")
        sums = np.cumsum([self._frequency(term) for term in terms])
        most = (max(_SCORED_ROWS, _SCORED_SHARE * num_rows), max(_COUNTED_ROWS, _COUNTED_SHARE * num_rows))
        num_found, num_counted = (max(1, int(count)) for count in np.searchsorted(sums, most, side="right"))
        found = " OR ".join(terms[:num_found])
        if num_found == num_counted:
            return found
        return f"({found}) AND ({' OR '.join(terms[:num_counted])})"

    def _frequency(self, term: str) -> int:
        """Number of passages with a term, remembered until something changes."""
        if (known := self._frequencies.get(term)) is None:
            known = self._frequencies[term] = self._one("SELECT COUNT(*) FROM words WHERE words MATCH ?", term)
        return known

    def vectors(self, dim: int, after: int = 0, last: int = 2**63 - 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows after `after` up to `last` that have vectors, with these: (int64 [n], float32 [n, dim]), ascending, in
        batches; writes may happen in between."""
        query = "SELECT passage, vector FROM vectors WHERE passage > ? AND passage <= ? ORDER BY passage LIMIT ?"
        while found := self._all(query, after, last, _ROWS_AT_ONCE):
            rows = np.array([row for row, _ in found], np.int64)
            values = np.frombuffer(b"".join(vector for _, vector in found), "<f4")
            if values.size != len(rows) * dim:
                raise IndexUnusableError(f"damaged: vectors of another length than {dim}")
            yield rows, values.reshape(len(rows), dim)
            after = int(rows[-1])

    def some_vectors(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """The vectors of some rows, float32 [dim], as far as they are computed."""
        query = "SELECT passage, vector FROM vectors WHERE passage IN (SELECT value FROM json_each(?))"
        return {row: np.frombuffer(vector, "<f4") for row, vector in self._all(query, json.dumps(rows))}

    def known_vectors(self, document_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Text -> vector, float32 [dim], of the passages of some documents."""
        query = f"""SELECT text, vector FROM documents JOIN passages ON document = documents.id
            JOIN vectors ON passage = passages.id WHERE {_AMONG}"""
        found = self._all(query, json.dumps(list(document_ids)))
        return {text: np.frombuffer(vector, "<f4") for text, vector in found}

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def _passages(self, which: str, *values: Any) -> dict[int, Passage]:
        query = f"""SELECT passages.id, document_id, source, title, version, metadata, number, text
            FROM passages JOIN documents ON documents.id = passages.document WHERE {which}"""
        return {
            row: Passage(document_id, source, title, version, json.loads(metadata), number, text)
            for row, document_id, source, title, version, metadata, number, text in self._all(query, *values)
        }

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self.lock:
            return self._connection.execute(query, values).fetchall()

    def _one(self, query: str, *values: Any) -> Any:
        return self._all(query, *values)[0][0]
