"""The retriever: keeps an index in step with a directory of documents and answers queries."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ccjax.config.documents import DocumentOptions, SearchKind
from ccjax.retrieval.catalog import Catalog, IndexedDocument, IndexSettings, IndexUnusableError, PassageRow
from ccjax.retrieval.changes import IndexChanges, find_changes
from ccjax.retrieval.chunking import split
from ccjax.retrieval.documents import MAX_FILE_BYTES, LoadedDocument
from ccjax.retrieval.embedding import HOW_TO_INSTALL, Embedder, default_embedder
from ccjax.retrieval.filters import parse_filter
from ccjax.retrieval.index import PassageIndex
from ccjax.retrieval.question import is_follow_up, own_words
from ccjax.retrieval.report import ProblemLog, RefreshReport
from ccjax.retrieval.selection import distinct, with_neighbours
from ccjax.types import Document

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total); stages are `read` (files) and `embed` (passages)."""

_DEFAULTS = DocumentOptions()
_EMBED_BATCH = 64  # passages between two progress reports: about 3 s on two CPU cores
_SPARE = 8
"""Passages that are found beyond those wanted, in place of near-duplicates and of those below a least score; if these
are more, four times as many, and so on up to `_MOST_FOUND`."""
_MOST_FOUND = 1000
_MOST_WINDOWS = 8
"""Parts of a long question that are embedded: as many from its beginning as from its end."""
_EARLIER_WEIGHT, _EARLIER_WORDS = 0.25, 100
"""Of the vector of the question before a follow-up; its last words, which count once, those of the follow-up twice."""
_WARMUP_WORDS = (8, 24, 48)
_WRITE_BATCH = 1024  # most passages to compute again after a process was killed while embedding
_TOKEN_PROBES = ("The quick brown fox jumps over the lazy dog.", "naïve_id = f(x, 3.14159)\n\n\t", "日本語 Ελλάδα")


@dataclasses.dataclass(frozen=True)
class Passage:
    """One retrieved passage.

    Attributes:
      document_id: the source file's path below the documents directory, with forward slashes; in a collection
        (`ccjax.retrieval.jsonl`) followed by `/` and the document's own id.
      passage_id: `document_id#n`, n counted from 0 in reading order.
      text: with the document's title and the passage's headings as first line.
      version: sha256 (hex) of the source file's bytes, in a collection of the document's line.
      score: cosine similarity to the query, in [-1, 1]; in a search by words alone bm25, above 0.
      path: the source file.
      metadata: text, numbers and booleans by name: a Markdown file's front matter, a collection's `metadata`.
    """

    document_id: str
    passage_id: str
    title: str
    text: str
    version: str
    score: float
    path: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_document(self) -> Document:
        """The passage as part of a request."""
        return Document(self.text, self.passage_id, self.title, self.version, self.score, self.document_id)


class Retriever:
    """Ranked passages from a directory of documents; created by `Retriever.open`.

    `search` may run in several threads and during `refresh`: it sees every document as it is before or after.
    """

    def __init__(
        self,
        docs_dir: Path,
        *,
        index_dir: Path | None,
        embedder: Embedder | None,
        search: SearchKind,
        count_tokens: Callable[[str], int],
        chunk_tokens: int,
        overlap_tokens: int,
        max_file_bytes: int,
        exclude: Sequence[str],
        outside_links: bool,
        progress: Progress | None,
    ) -> None:
        """Use `Retriever.open`: a retriever constructed directly has loaded nothing yet."""
        self._docs_dir = docs_dir
        self._index_dir = index_dir
        self.embedder = embedder
        self._by_words = search != "dense"
        self._count_tokens = count_tokens
        self._settings = IndexSettings(
            embedder="" if embedder is None else embedder.name,
            dim=0 if embedder is None else embedder.dim,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
            token_probe=tuple(count_tokens(text) for text in _TOKEN_PROBES),
        )
        self._max_file_bytes = max_file_bytes
        self._exclude, self._outside_links = tuple(exclude), outside_links
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._update_lock = threading.Lock()
        self._index: PassageIndex | None = None
        self._clustering: threading.Thread | None = None
        self._problems = ProblemLog()
        self._root: Path | None = None
        self.report = RefreshReport()
        """Report of the last update of the index, by `open` or `refresh`."""

    @classmethod
    def open(
        cls,
        docs_dir: str | Path,
        *,
        index_dir: str | Path | None = None,
        search: SearchKind = _DEFAULTS.search,
        embedder: Embedder | None = None,
        count_tokens: Callable[[str], int],
        chunk_tokens: int = _DEFAULTS.chunk_tokens,
        overlap_tokens: int = _DEFAULTS.overlap_tokens,
        progress: Progress | None = None,
        strict: bool = False,
        max_file_bytes: int = MAX_FILE_BYTES,
        exclude: Sequence[str] = (),
        outside_links: bool = False,
    ) -> Retriever:
        """Opens a retriever over the files below `docs_dir` and updates its index.

        Args:
          index_dir: where the index is kept between runs; None keeps it in memory only. A saved index made with another
            embedder, tokenizer or chunk size, or a damaged one, is rebuilt with a log line.
          search: `hybrid` (by words and by similarity), `dense` (by similarity) or `lexical` (by words). Without an
            encoder `hybrid` is `lexical`, with a log line.
          embedder: None = `default_embedder("auto")`; `lexical` has none.
          count_tokens: length of a text in the engine's tokens; determines where passages end.
          chunk_tokens: longest passage, in those tokens.
          overlap_tokens: most tokens by which adjacent passages overlap.
          progress: called while files are read and passages embedded.
          strict: raise for a file that cannot be used. By default it is skipped, logged, and listed in `report.failed`.
          max_file_bytes: larger files are refused, and longer lines of collections.
          exclude, outside_links: see `ccjax.retrieval.scan.find_files`.

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
        if search not in get_args(SearchKind):
            raise ValueError(f"search: wanted one of {', '.join(get_args(SearchKind))}, got {search!r}")
        if search == "lexical":
            embedder = None
        elif embedder is None and (embedder := default_embedder()) is None:
            if search == "dense":
                raise ValueError(f"search: wanted hybrid or lexical without a sentence encoder ({HOW_TO_INSTALL})")
            _log.warning("no sentence encoder installed: documents are searched by words alone (%s)", HOW_TO_INSTALL)
        retriever = cls(
            docs_dir.absolute(),
            index_dir=None if index_dir is None else Path(index_dir).resolve(),
            embedder=embedder,
            search=search,
            count_tokens=count_tokens,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
            max_file_bytes=max_file_bytes,
            exclude=exclude,
            outside_links=outside_links,
            progress=progress,
        )
        rebuilt = retriever._load()
        try:
            retriever._update(strict=strict, rebuilt=rebuilt)
        except BaseException:
            retriever.close()
            raise
        skipped = retriever.report.skipped_text()
        _log.info(
            "%d documents in %d passages%s",
            retriever.report.num_documents,
            retriever.num_passages,
            f"; skipped {skipped}" if skipped else "",
        )
        if not retriever.num_passages:
            _log.warning("no passages: %s holds no usable document", docs_dir)
        return retriever

    @property
    def num_documents(self) -> int:
        """Number of searchable documents."""
        return self._current().num_documents

    @property
    def num_passages(self) -> int:
        """Number of searchable passages."""
        return len(self._current())

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of the searchable documents, sorted."""
        return tuple(self._current().versions())

    def has_document(self, document_id: str) -> bool:
        """True if the document is searchable."""
        return self._current().has(document_id)

    def passages(self, document_id: str) -> list[Passage]:
        """All passages of a document in reading order, each with score 0; empty if it is unknown."""
        return [self._passage(row, 0.0) for row in self._current().document(document_id)]

    def neighbours(self, count: int) -> dict[str, tuple[str, ...]]:
        """Passage id -> ids of the `count` passages whose vectors are most similar to its own, the nearest first; fewer
        if fewer are similar."""
        index = self._current()
        ids = {row: f"{document_id}#{number}" for row, (document_id, number) in index.keys().items()}
        return {
            ids[row]: tuple(ids[other] for other in others if other in ids)
            for rows, found in index.neighbours(count)
            for row, others in zip(rows.tolist(), found.tolist(), strict=True)
            if row in ids
        }

    def warmup(self) -> None:
        """Embeds texts of the usual lengths of a question, so that the first question need not wait for compilation."""
        if self.embedder is not None:
            for num_words in _WARMUP_WORDS:
                self.embedder.embed(["word " * num_words])

    def search(
        self,
        query: str,
        top_k: int,
        *,
        earlier: str = "",
        filters: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        context_tokens: int = 0,
    ) -> list[Passage]:
        """The `top_k` passages that answer `query` best, best first and near-duplicates once; fewer if fewer exist.

        Args:
          query: a message; what was pasted into it beside a question is not searched for.
          earlier: the message that it follows; counts if `query` alone says little.
          filters: for the documents' metadata (`ccjax.retrieval.filters`).
          min_score: passages below this score are not found.
          context_tokens: as far as all passages have no more tokens, those before and after the found ones are returned
            too, where they are read, with the score of the found one.

        Raises:
          ValueError: `query` is blank, `top_k` is under 1, `filters` are invalid, or the retriever is closed.
        """
        how = {"earlier": earlier, "filters": filters, "min_score": min_score, "context_tokens": context_tokens}
        ((passages, _),) = self.stages(query, top_k, 1, **how)
        return passages

    def stages(
        self,
        query: str,
        top_k: int,
        num_stages: int,
        *,
        earlier: str = "",
        filters: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        context_tokens: int = 0,
    ) -> Iterator[tuple[list[Passage], bool]]:
        """Preliminary results of `search` after each of at most `num_stages` parts of the work (RAGCache sec. 5.3), and
        whether they are final: then they equal those of `search`.

        Raises:
          ValueError: as `search`, or `num_stages` is under 1; at once.
        """
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query: wanted a non-empty string, got {query!r}")
        for name, value in (("top_k", top_k), ("num_stages", num_stages)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: wanted an integer of at least 1, got {value!r}")
        where = None if filters is None else parse_filter(filters)
        index = self._current()
        query = own_words(query)
        earlier = " ".join(own_words(earlier).split()[-_EARLIER_WORDS:]) if is_follow_up(query) else ""
        vectors = self._vectors(query, earlier) if len(index) else None
        words = [earlier, query, query] if earlier.strip() else query

        def chosen() -> Iterator[tuple[list[Passage], bool]]:
            wanted, parts, is_all = top_k + _SPARE, num_stages, False
            while not is_all:
                for hits, is_all in index.stages(
                    words if self._by_words else None, vectors, wanted, parts, where=where
                ):
                    is_cut = len(hits) == wanted < _MOST_FOUND
                    hits = distinct([hit for hit in hits if min_score is None or hit[0] >= min_score], top_k)
                    if is_all and len(hits) < top_k and is_cut:
                        wanted, parts, is_all = 4 * wanted, 1, False
                        break
                    if context_tokens:
                        hits = with_neighbours(hits, context_tokens, self._count_tokens, index.some_of)
                    yield [self._passage(row, score) for score, row in hits], is_all

        return chosen()

    def _vectors(self, query: str, earlier: str) -> np.ndarray | None:
        """Of each window of a question, float32 [n, dim]; None without an encoder."""
        if self.embedder is None:
            return None
        windows = self.embedder.windows(query)
        if len(windows) > _MOST_WINDOWS:
            windows = [*windows[: _MOST_WINDOWS // 2], *windows[-_MOST_WINDOWS // 2 :]]
        if not earlier.strip():
            return self.embedder.embed(windows)
        *vectors, before = self.embedder.embed([*windows, self.embedder.windows(earlier)[-1]])
        sums = np.stack(vectors) + _EARLIER_WEIGHT * before
        return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)

    def refresh(self) -> RefreshReport:
        """Updates the index from the directory.

        Every file is read and hashed; only new and changed ones are parsed and embedded, other vectors are kept. A
        changed file that cannot be used any more is dropped, not served stale. If many passages have changed, their
        vectors are clustered anew in the background.
        """
        return self._update(strict=False, rebuilt=None)

    def close(self) -> None:
        """Frees the index; every later call except `close` raises ValueError."""
        with self._update_lock:
            index, self._index = self._index, None
            if index is not None:
                index.close()

    def _cluster(self) -> None:
        """Clusters the vectors while searches continue."""
        try:
            if (index := self._index) is not None and index.improve():
                _log.info("the vectors of %d passages were clustered", len(index))
        except Exception:
            if self._index is not None:  # else it was closed meanwhile
                _log.exception("clustering failed; all vectors are compared")

    def _current(self) -> PassageIndex:
        index = self._index
        if index is None:
            raise ValueError("the retriever is closed")
        return index

    def _passage(self, row: PassageRow, score: float) -> Passage:
        return Passage(
            document_id=row.document_id,
            passage_id=f"{row.document_id}#{row.number}",
            title=row.title,
            text=row.text,
            version=row.version,
            score=score,
            path=str(self._docs_dir / row.source),
            metadata=row.metadata,
        )

    def _load(self) -> str | None:
        """Opens the saved index, or a new one; returns why a saved one cannot be used, else None."""
        if self._index_dir is not None:
            self._index_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._index = PassageIndex.open(self._index_dir, self._settings)
        except IndexUnusableError as error:
            assert self._index_dir is not None
            _log.warning("the index in %s is rebuilt: %s", self._index_dir, error)
            Catalog.delete(self._index_dir)
            self._index = PassageIndex.open(self._index_dir, self._settings)
            return str(error)
        return None

    def _update(self, *, strict: bool, rebuilt: str | None) -> RefreshReport:
        with self._update_lock:
            index = self._current()
            versions = index.versions()
            # A link may lead elsewhere now; one refresh reads one directory.
            docs_dir = Path(os.path.realpath(self._docs_dir))
            changes = find_changes(
                docs_dir,
                versions,
                index.digests(),
                self._split,
                skip=self._index_dir,
                strict=strict,
                max_file_bytes=self._max_file_bytes,
                exclude=self._exclude,
                outside_links=self._outside_links,
                progress=lambda done, total: self._progress("read", done, total),
            )
            failed = tuple((problem.path, problem.reason) for problem in changes.problems)
            unsupported = tuple(changes.unsupported.most_common())
            self._problems.tell(failed, [suffix for suffix, _ in unsupported])
            for path, num_chars in changes.left_out.items():
                _log.warning("left out %d characters of base64, hex or minified code: %s", num_chars, path)
            self._apply(index, changes, at_once=self._root not in (None, docs_dir))
            self._root = docs_dir
            if self._clustering is None or not self._clustering.is_alive():
                self._clustering = threading.Thread(target=self._cluster, name="ccjax-cluster", daemon=True)
                self._clustering.start()
            changed = set(changes.changed)
            self.report = RefreshReport(
                added=tuple(document.document_id for document in changes.new if document.document_id not in changed),
                changed=tuple(changes.changed),
                removed=tuple(changes.removed),
                failed=failed,
                unsupported=unsupported,
                rebuilt=rebuilt,
                left_out=tuple(changes.left_out.items()),
                num_documents=index.num_documents,
            )
            return self.report

    def _split(self, loaded: LoadedDocument) -> tuple[str, ...]:
        passages = split(
            loaded.text,
            count_tokens=self._count_tokens,
            chunk_tokens=self._settings.chunk_tokens,
            overlap_tokens=self._settings.overlap_tokens,
            title=loaded.title,
            markdown=loaded.markdown,
        )
        return tuple(passages)

    def _apply(self, index: PassageIndex, changes: IndexChanges, *, at_once: bool) -> None:
        """Embeds new passages, but for those whose text was in a removed or changed document, and writes them batch by
        batch, so that little is lost if the process is killed; or `at_once`, together with what is removed."""
        known = index.known_vectors([*changes.removed, *changes.changed])
        if changes.removed and not (at_once and changes.new):
            index.write(removed=changes.removed)
        total = sum(len(document.passages) for document in changes.new)
        done = 0
        for group in [changes.new] if at_once and changes.new else _groups(changes.new):
            texts = [text for document in group for text in document.passages]
            vectors = np.empty((len(texts), self._settings.dim), np.float32)
            new = []
            for place, text in enumerate(texts):
                if text in known:
                    vectors[place] = known[text]
                else:
                    new.append(place)
            for start in range(0, len(new), _EMBED_BATCH):
                self._progress("embed", done + start, total)
                if self.embedder is None:
                    break
                batch = new[start : start + _EMBED_BATCH]
                embedded = self.embedder.embed([texts[place] for place in batch])
                if embedded.shape != (wanted := (len(batch), self._settings.dim)):
                    raise ValueError(f"embedder: wanted vectors of shape {wanted}, got {embedded.shape}")
                vectors[batch] = embedded
            index.write(group, vectors, removed=changes.removed if at_once else ())
            done += len(texts)
        self._progress("embed", total, total)
        if changes.digests:
            index.write(digests=changes.digests)


def _groups(documents: Sequence[IndexedDocument]) -> Iterator[list[IndexedDocument]]:
    """Batches of documents to write together."""
    group, num_passages = [], 0
    for document in documents:
        group.append(document)
        num_passages += len(document.passages)
        if num_passages >= _WRITE_BATCH:
            yield group
            group, num_passages = [], 0
    if group:
        yield group
