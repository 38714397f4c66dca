"""The retriever: keeps an index in step with a directory of documents and answers queries."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.config.documents import DocumentOptions
from ccjax.retrieval.background import BackgroundWork
from ccjax.retrieval.catalog import Catalog, IndexedDocument, IndexSettings, IndexUnusableError, Passage
from ccjax.retrieval.changes import Refused, find_changes
from ccjax.retrieval.chunking import split
from ccjax.retrieval.documents import LoadedDocument
from ccjax.retrieval.embedding import HOW_TO_INSTALL, Embedder, default_embedder, embed_each
from ccjax.retrieval.filters import parse_filter
from ccjax.retrieval.index import PassageIndex
from ccjax.retrieval.question import Question
from ccjax.retrieval.report import RefreshReport
from ccjax.retrieval.selection import distinct, with_neighbours

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total); stages are `read` (files) and `embed` (passages)."""

_EMBED_BATCH = 64  # passages between two progress reports: a second on two CPU cores
_PROGRESS_S = 1.0
_MOST_EMBEDDED_FIRST = 1024
"""New passages whose vectors are computed before they are searchable: some ten seconds on two CPU cores."""
_SPARE = 8
"""Passages that are found beyond those wanted, in place of near-duplicates and of those below a least score; if these
are more, four times as many, and so on up to `_MOST_FOUND`."""
_MOST_FOUND = 1000
_MOST_SCORED = 32
"""With a least score, passages without vectors whose scores are computed in a search, or `top_k` if that is more."""
_WARMUP_WORDS = (8, 24, 48)
_WRITE_BATCH = 1024  # most passages to compute again after a process was killed while embedding
_TOKEN_PROBES = ("The quick brown fox jumps over the lazy dog.", "naïve_id = f(x, 3.14159)\n\n\t", "日本語 Ελλάδα")


class Retriever:
    """Ranked passages from the files below a directory; `refresh` updates their index, at first when it is opened.

    `search` may run in several threads and during `refresh`: it sees every document as it is before or after. Many new
    passages are searchable by words at once, while their vectors are computed in the background (`wait`).

    Attributes:
      embedder: None in a search by words alone.
      report: of the last update of the index.
    """

    def __init__(
        self,
        docs_dir: str | Path,
        *,
        count_tokens: Callable[[str], int],
        embedder: Embedder | None = None,
        progress: Progress | None = None,
        others: Path | None = None,
        **options: Any,
    ) -> None:
        """Opens the index and updates it. A directory that cannot be read now is answered from its index.

        Args:
          count_tokens: length of a text in the engine's tokens; determines where passages end.
          embedder: None = `default_embedder()`; a `lexical` search has none. Without an encoder a `hybrid` search is
            `lexical`, with a log line.
          progress: called while files are read and passages embedded, but not from the background.
          others: directory of the indexes of other folders. Documents that one of them holds are not embedded again, so
            a folder may be moved.
          options: of `DocumentOptions`. Without `index_dir` the index is kept in memory only. A saved index made with
            another embedder, tokenizer or chunk size, or a damaged one, is rebuilt with a log line.

        Raises:
          ValueError: an argument is out of range, or `docs_dir` is not a directory and there is no index of it.
        """
        self._docs_dir, self._options = Path(docs_dir).absolute(), DocumentOptions(**options)
        self._index_dir = None if self._options.index_dir is None else Path(self._options.index_dir).resolve()
        if not self._docs_dir.is_dir() and (self._index_dir is None or not self._index_dir.is_dir()):
            raise ValueError(f"docs_dir: wanted a directory, got {str(docs_dir)!r}")
        if self._index_dir == self._docs_dir.resolve():
            raise ValueError(f"index_dir: wanted a directory other than docs_dir, got {self._options.index_dir!r}")
        if self._options.search == "lexical":
            embedder = None
        elif embedder is None and (embedder := default_embedder()) is None:
            if self._options.search == "dense":
                raise ValueError(f"search: wanted hybrid or lexical without a sentence encoder ({HOW_TO_INSTALL})")
            _log.warning("no sentence encoder installed: documents are searched by words alone (%s)", HOW_TO_INSTALL)
        self.embedder = embedder
        self._count_tokens = count_tokens
        self._refused: Refused = {}
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._update_lock = threading.Lock()
        self._root: Path | None = None
        self._others = others
        self.report = RefreshReport()
        settings = IndexSettings(
            embedder="" if embedder is None else embedder.name,
            dim=0 if embedder is None else embedder.dim,
            chunk_tokens=self._options.chunk_tokens,
            token_probe=tuple(count_tokens(text) for text in _TOKEN_PROBES),
        )
        rebuilt = None
        if self._index_dir is not None:
            self._index_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._index: PassageIndex | None = PassageIndex(self._index_dir, settings)
        except IndexUnusableError as error:
            assert self._index_dir is not None
            rebuilt = str(error)
            _log.warning("the index in %s is rebuilt: %s", self._index_dir, rebuilt)
            Catalog.delete(self._index_dir)
            self._index = PassageIndex(self._index_dir, settings)
        self._background = BackgroundWork(self._index, self._embed)
        try:
            self.report = dataclasses.replace(self.refresh(), rebuilt=rebuilt)
        except BaseException:
            self.close()
            raise
        counts = self.report.num_documents, self.num_passages
        _log.info("%d documents in %d passages%s", *counts, self.report.skipped_text())
        if not self.num_passages:
            _log.warning("no passages: %s holds no usable document", docs_dir)

    @property
    def num_documents(self) -> int:
        """Number of searchable documents."""
        return self._current().catalog.count_documents()

    @property
    def num_passages(self) -> int:
        """Number of searchable passages."""
        return len(self._current())

    @property
    def num_pending(self) -> int:
        """Number of passages whose vectors are still computed, so that they are found by words alone."""
        return self._current().num_pending

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all vectors are computed, or that failed; False if it took longer."""
        return self._background.wait(timeout_s)

    def complete(self) -> None:
        """Waits until all vectors are computed, with progress.

        Raises:
          ValueError: some could not be computed.
        """
        total = self.num_pending
        while not self.wait(_PROGRESS_S):
            self._progress("embed", total - self.num_pending, total)
        if self.num_pending:
            raise ValueError("embedder: the vectors of some passages could not be computed")

    def give_way(self, is_wanted: Callable[[], bool]) -> None:
        """While `is_wanted` returns True, vectors in the background are computed more slowly."""
        self._background.is_wanted = is_wanted

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of the searchable documents, sorted."""
        return tuple(self._current().catalog.versions())

    def has_document(self, document_id: str) -> bool:
        """True if the document is searchable."""
        return self._current().catalog.has(document_id)

    def passages(self, document_id: str) -> list[Passage]:
        """All passages of a document in reading order; none if it is unknown."""
        return self._current().catalog.document(document_id)

    def neighbours(self, count: int) -> dict[str, tuple[str, ...]]:
        """Passage id -> ids of the `count` passages most similar to it, the nearest first, or without vectors of those
        that share most words with it; fewer if fewer are similar."""
        index, found = self._current(), dict[str, tuple[str, ...]]()
        for document_id in self.document_ids:
            vectors = index.catalog.known_vectors([document_id])
            for passage in index.catalog.document(document_id):
                vector = vectors.get(passage.text)
                by_meaning = vector is not None and vector.any()
                hits = index.search(None if by_meaning else passage.text, vector if by_meaning else None, count + 1)
                others = [hit.passage_id for hit in hits if hit.score > 0 and hit.passage_id != passage.passage_id]
                found[passage.passage_id] = tuple(others[:count])
        return found

    def warmup(self) -> None:
        """Embeds texts of the usual lengths of a question, so that the first question need not wait for compilation."""
        if self.embedder is not None:
            for num_words in _WARMUP_WORDS:
                self.embedder.embed(["word " * num_words])

    def search(self, query: str, top_k: int, **options: Any) -> list[Passage]:
        """The `top_k` passages that answer `query` best, best first and near-duplicates once; fewer if fewer exist.

        Args and errors: those of `stages`.
        """
        ((passages, _),) = self.stages(query, top_k, 1, **options)
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

        Args:
          query: a message; what was pasted into it beside a question is not searched for.
          earlier: the message that it follows; counts if `query` alone says little.
          filters: for the documents' metadata (`ccjax.retrieval.filters`).
          min_score: passages below this score are not found, nor, while vectors are still computed, those without one
            that are far behind the best.
          context_tokens: as far as all passages have no more tokens, those before and after the found ones are returned
            too, where they are read, with the score of the found one.

        Raises:
          ValueError: at once, if `query` is blank, another argument of the wrong type or out of range, or the retriever
            is closed.
        """
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query: wanted a non-empty string, got {query!r}")
        for name, value, least in (
            ("top_k", top_k, 1),
            ("num_stages", num_stages, 1),
            ("context_tokens", context_tokens, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: wanted an integer of at least {least}, got {value!r}")
        if isinstance(min_score, bool) or not isinstance(min_score, int | float | None) or min_score != min_score:
            raise ValueError(f"min_score: wanted a number or None, got {min_score!r}")
        where = None if filters is None else parse_filter(filters)
        index = self._current()
        asked = Question.of(query, earlier)
        vectors = None
        if self.embedder is not None and len(index):
            try:
                vectors = asked.vectors(self.embedder, self._embed)
            except Exception as error:
                if self._options.search == "dense":
                    raise
                _log.warning("a question is searched for by words alone, as the encoder fails on it: %r", error)
                min_score = None  # which is for another kind of score
        weight = 1.0 if self.embedder is None else asked.weight(self.embedder)
        words = None if self._options.search == "dense" else asked.words

        def chosen() -> Iterator[tuple[list[Passage], bool]]:
            wanted, parts, is_all = top_k + _SPARE, num_stages, False
            scores: dict[str, float] = {}
            while not is_all:
                for passages, is_all in index.stages(words, vectors, wanted, parts, where=where, weight=weight):
                    is_cut = len(passages) == wanted < _MOST_FOUND
                    if min_score is not None:
                        scored = self._scored(passages, vectors, scores, max(top_k, _MOST_SCORED))
                        passages = [passage for passage in scored if passage.score >= min_score]
                    found = self._scored(distinct(passages, top_k), vectors, scores, top_k)
                    if is_all and len(found) < top_k and is_cut:
                        wanted, parts, is_all = 4 * wanted, 1, False
                        break
                    if context_tokens:
                        found = with_neighbours(found, context_tokens, self._count_tokens, index.catalog.document)
                    yield found, is_all

        return chosen()

    def _scored(
        self, passages: Sequence[Passage], vectors: np.ndarray | None, scores: dict[str, float], most: int
    ) -> list[Passage]:
        """With scores for the first `most` of those whose vectors are not in the index yet; the others have NaN. They
        are kept in `scores`, by passage id."""
        pending = [passage for passage in passages if math.isnan(passage.score)][:most]
        new = [passage for passage in pending if passage.passage_id not in scores]
        if new and vectors is not None:
            found = (vectors @ embed_each(self._embed, [passage.text for passage in new]).T).max(axis=0)
            scores |= zip((passage.passage_id for passage in new), found.tolist(), strict=True)
        known = {passage.passage_id: scores[passage.passage_id] for passage in pending if vectors is not None}
        return [dataclasses.replace(one, score=known.get(one.passage_id, one.score)) for one in passages]

    def refresh(self) -> RefreshReport:
        """Updates the index from the directory.

        Every file is read and hashed; only new and changed ones are parsed and embedded, other vectors are kept. A
        changed file that cannot be used any more is dropped, not served stale. In the background, the vectors of many
        new passages are computed, and all are clustered anew if many have changed.
        """
        with self._update_lock:
            index, before = self._current(), self.report
            # A link may lead elsewhere now; one refresh reads one directory.
            docs_dir = Path(os.path.realpath(self._docs_dir))
            new, digests, report = find_changes(
                docs_dir,
                index.catalog.versions(),
                index.catalog.digests(),
                self._split,
                self._options,
                self._refused,
                skip=self._index_dir,
                progress=lambda done, total: self._progress("read", done, total),
            )
            report.log_new(before)
            if digests:  # if writing fails, what is read is not known to be complete
                index.write(digests=dict.fromkeys(digests))
            self._apply(index, new, report, at_once=self._root not in (None, docs_dir))
            if digests:
                index.write(digests=digests)
            index.keep_up()
            self._root = docs_dir
            self._background.start()
            if self._options.search == "dense":
                self.complete()
            num_documents = index.catalog.count_documents()
            self.report = dataclasses.replace(report, num_documents=num_documents)
            return self.report

    def close(self) -> None:
        """Frees the index; every later call except `close` raises ValueError."""
        with self._update_lock:
            index, self._index = self._index, None
            if index is not None:
                self._background.close()
                index.close()

    def _current(self) -> PassageIndex:
        index = self._index
        if index is None:
            raise ValueError("the retriever is closed")
        return index

    def _split(self, loaded: LoadedDocument) -> tuple[str, ...]:
        how = {"count_tokens": self._count_tokens, "chunk_tokens": self._options.chunk_tokens}
        return tuple(split(loaded.text, title=loaded.title, markdown=loaded.markdown, **how))

    def _apply(
        self, index: PassageIndex, new: Sequence[IndexedDocument], report: RefreshReport, *, at_once: bool
    ) -> None:
        """Writes new documents with the vectors of their passages: those known from removed and changed documents, and
        of few others, or of a dense search, those computed first; of many, `_background` adds them. Batch by batch, so
        that little is lost if the process is killed; or `at_once`, together with what is removed."""
        known = index.catalog.known_vectors([*report.removed, *report.changed])
        if self._others is not None and self._root is None and new and self.embedder is not None:
            known |= Catalog.known_to_others(self._others, index.settings, new)
        at_once = at_once and bool(new)
        if report.removed and not at_once:
            index.write(removed=report.removed)
        unknown = sum(text not in known for document in new for text in document.passages)
        if self._options.search == "hybrid" and unknown > _MOST_EMBEDDED_FIRST:
            unknown = 0
        done = 0
        for group in [new] if at_once else _groups(new):
            texts = [text for document in group for text in document.passages]
            names = [f"{document.document_id}#{n}" for document in group for n in range(len(document.passages))]
            vectors = np.full((len(texts), index.settings.dim), np.nan, np.float32)
            for place, text in enumerate(texts):
                if text in known:
                    vectors[place] = known[text]
            places = [place for place, text in enumerate(texts) if text not in known]
            for start in range(0, len(places) if unknown and self.embedder is not None else 0, _EMBED_BATCH):
                self._progress("embed", done, unknown)
                batch = places[start : start + _EMBED_BATCH]
                vectors[batch] = embed_each(
                    self._embed, [texts[place] for place in batch], [names[place] for place in batch]
                )
                done += len(batch)
            index.write(group, vectors, removed=report.removed if at_once else ())
        if unknown:
            self._progress("embed", unknown, unknown)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 [len(texts), dim].

        Raises:
          ValueError: the embedder gives something else.
        """
        assert self.embedder is not None
        vectors, wanted = self.embedder.embed(texts), (len(texts), self.embedder.dim)
        if vectors.shape != wanted or not np.isfinite(vectors).all():
            raise ValueError(f"embedder: wanted finite vectors of shape {wanted}, got {vectors.shape}")
        return vectors


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
