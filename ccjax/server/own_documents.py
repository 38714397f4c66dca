"""The server's own documents: what is searched in them, asked for by name, and dropped from the cache once it
changed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from ccjax.engine import Engine
from ccjax.engine.speculation import SpeculativeAnswer
from ccjax.errors import EraseIncompleteError, ReadOnlyError, RequestError, UnknownDocumentError
from ccjax.retrieval import Passage, RefreshReport, Retriever
from ccjax.server.worker import EngineWorker, QueueFullError, WorkerClosedError
from ccjax.types import Document

logger = logging.getLogger(__name__)


def search(ask: Callable[[], Iterator[tuple[list[Passage], bool]]], begun: SpeculativeAnswer | None) -> list[Document]:
    """What is found in the end; an answer from what is found before may begin meanwhile.

    Args:
      ask: `Retriever.stages`, with its arguments.
    """
    documents: list[Document] = []
    for passages, is_all in ask():
        documents = [passage.as_document() for passage in passages]
        if begun is not None and not is_all:
            begun.offer(documents)
    return documents


def chosen(retriever: Retriever | None, document_ids: Sequence[str]) -> list[Document]:
    """All passages of the documents with these ids; "all" for every one.

    Raises:
      RequestError: `document_ids` names a document that is not there, or there are none.
    """
    if retriever is None:
        raise RequestError("document_ids", "this server has no documents of its own; send documents")
    documents: list[Document] = []
    for number, document_id in enumerate(retriever.document_ids if document_ids == "all" else document_ids):
        if not retriever.has_document(document_id):
            raise UnknownDocumentError(f"document_ids[{number}]", f"this server has no document {document_id!r}")
        documents += [passage.as_document() for passage in retriever.passages(document_id)]
    return documents


def refresh(retriever: Retriever | None, engine: Engine, worker: EngineWorker) -> bool:
    """Brings the index in step with the files, and drops from the cache what they do not say any more; True where
    there are new or changed documents."""
    if retriever is None:
        return False
    report = retriever.refresh()
    drop_old_versions(retriever, engine, worker, report)
    if report.added or report.changed or report.removed:
        counts = len(report.added), len(report.changed), len(report.removed)
        logger.info("documents: %d added, %d changed, %d removed", *counts)
    return bool(report.added or report.changed)


def drop_old_versions(retriever: Retriever, engine: Engine, worker: EngineWorker, report: RefreshReport) -> None:
    """Takes what changed or vanished since out of the cache. No question finds that text any more, it only takes room;
    unchanged passages of a changed document stay."""
    for document_id in (*report.changed, *report.removed):
        kept = [passage.as_document() for passage in retriever.passages(document_id)]
        try:
            worker.call(functools.partial(engine.documents.invalidate, document_id, keep=kept)).result()
        except (UnknownDocumentError, ReadOnlyError):  # never asked for, or not to be changed
            pass
        except (EraseIncompleteError, QueueFullError, WorkerClosedError) as error:
            logger.warning("documents: the old version of %s stays in the cache: %r", document_id, error)
