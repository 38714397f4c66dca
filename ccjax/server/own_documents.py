"""The server's own documents: searching, looking up by id, and dropping changed ones from the cache."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from ccjax.engine import Engine
from ccjax.engine.speculation import NUM_STAGES, SearchTimes, SpeculativeAnswer
from ccjax.errors import EraseIncompleteError, ReadOnlyError, RequestError, UnknownDocumentError
from ccjax.retrieval import RefreshReport, Retriever
from ccjax.server.idle_thread import QueueFullError, WorkerClosedError
from ccjax.server.schemas import Generation, RetrievalIn
from ccjax.server.settings import ServerSettings
from ccjax.server.worker import EngineWorker
from ccjax.types import Document

logger = logging.getLogger(__name__)

_DROPPED_TOGETHER = 256
"""Documents that are dropped from the cache while nothing else is done in idle time."""
NOTHING_FOUND = Document(
    "No passage of the documents matches this question: nothing was found about it.", "nothing-found", score=0.0
)
"""Stands in the prompt, and in the documents and the report of the answer, if a search finds nothing."""


def search(
    retriever: Retriever,
    body: Generation,
    settings: ServerSettings,
    begun: SpeculativeAnswer | None = None,
    times: SearchTimes | None = None,
) -> list[Document] | None:
    """Searches for a request's passages; `NOTHING_FOUND` if nothing matches, None if it has no question. An answer may
    begin meanwhile, from preliminary results. The time of the search is added to `times`."""
    query = body.query()
    if query is None:
        return None
    options = body.retrieval or RetrievalIn.model_validate({})
    num_stages = 1 if begun is None else NUM_STAGES
    top_k = options.top_k or settings.top_k
    found = retriever.stages(
        query,
        top_k,
        num_stages,
        earlier=body.earlier_query(),
        filters=options.filters,
        min_score=settings.min_score,
        context_tokens=settings.context_tokens,
    )
    documents: list[Document] = []
    search_s, from_s = 0.0, time.perf_counter()
    for passages, is_all in found:
        search_s += time.perf_counter() - from_s
        documents = [passage.as_document() for passage in passages]
        if begun is not None and documents and not is_all:
            begun.offer(documents)
        from_s = time.perf_counter()
    if times is not None:
        times.add(search_s)
    return documents or [NOTHING_FOUND]


def chosen(retriever: Retriever | None, document_ids: Sequence[str]) -> list[Document]:
    """All passages of the documents with these ids; "all" for every document.

    Raises:
      RequestError: `document_ids` names an unknown document, or there are none.
    """
    if retriever is None:
        raise RequestError("document_ids", "this server has no documents of its own; send documents")
    documents: list[Document] = []
    for number, document_id in enumerate(retriever.document_ids if document_ids == "all" else document_ids):
        if not retriever.has_document(document_id):
            raise UnknownDocumentError(f"document_ids[{number}]", f"this server has no document {document_id!r}")
        documents += [passage.as_document() for passage in retriever.passages(document_id)]
    return documents


def index_summary(retriever: Retriever | None) -> dict[str, Any]:
    """How much is searchable, `num_vectors_pending` passages of it by words alone so far, and how many files, lines and
    directories are not, by kind of reason. Waits for no search and no update."""
    report = RefreshReport() if retriever is None else retriever.report
    return {
        "num_documents": report.num_documents,
        "num_passages": 0 if retriever is None else retriever.num_passages,
        "num_vectors_pending": 0 if retriever is None else retriever.num_pending,
        "skipped": report.skipped,
    }


def refresh(retriever: Retriever | None, engine: Engine, worker: EngineWorker) -> bool:
    """Updates the index from the files, and drops from the cache what they no longer contain; True if there are new or
    changed documents."""
    if retriever is None:
        return False
    report = retriever.refresh()
    drop_old_versions(retriever, engine, worker, report)
    if report.added or report.changed or report.removed:
        counts = len(report.added), len(report.changed), len(report.removed)
        logger.info("documents: %d added, %d changed, %d removed", *counts)
    return bool(report.added or report.changed)


def drop_old_versions(retriever: Retriever, engine: Engine, worker: EngineWorker, report: RefreshReport) -> None:
    """Drops changed and deleted passages from the cache. No question can find their text any more, so they only take
    space; unchanged passages of a changed document stay."""
    changed = (*report.changed, *report.removed)
    for start in range(0, len(changed), _DROPPED_TOGETHER):
        some = changed[start : start + _DROPPED_TOGETHER]
        kept = {name: [passage.as_document() for passage in retriever.passages(name)] for name in some}
        try:
            worker.thread.call(functools.partial(engine.documents.invalidate_old, kept)).result()
        except ReadOnlyError:
            return
        except (EraseIncompleteError, QueueFullError, WorkerClosedError) as error:
            logger.warning("documents: old versions of %r and others stay in the cache: %r", some[0], error)
