"""The components behind a server that is ready."""

from __future__ import annotations

import dataclasses

from ccjax.engine import Engine
from ccjax.retrieval import Retriever
from ccjax.server.embeddings import SentenceVectors
from ccjax.server.preparing import DocumentPreparation
from ccjax.server.warming import WarmJobs
from ccjax.server.worker import EngineWorker


@dataclasses.dataclass(frozen=True)
class Backend:
    """The components that answer requests, once loaded."""

    engine: Engine
    worker: EngineWorker
    retriever: Retriever | None
    model: str
    warm_jobs: WarmJobs
    preparation: DocumentPreparation | None
    vectors: SentenceVectors
