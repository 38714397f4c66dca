"""Live state of the server for the page: queue, tiers, recent reuse, and the most used documents. Covers this process
only and is not persisted; use /metrics for history."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import threading
import time
from typing import Any

from ccjax.engine import Engine, Response
from ccjax.retrieval import Retriever
from ccjax.server.own_documents import index_summary
from ccjax.server.worker import Job

NUM_RECENT = 120
_MOST_DOCUMENTS = 4096
NUM_HOTTEST = 10


@dataclasses.dataclass
class _Use:
    """Use of one of the server's own documents so far."""

    title: str | None
    requests: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    last_used: float = 0.0


class LiveCounts:
    """Counts of recent answers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_at = time.time()
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=NUM_RECENT)
        self._tokens = collections.Counter({"reused": 0, "recomputed": 0, "computed": 0})
        self._num_answered = 0
        self._uses: collections.OrderedDict[str, _Use] = collections.OrderedDict()

    def record(self, job: Job) -> None:
        """Records a job that has its response."""
        response = job.response
        assert response is not None and job.first_delta_s is not None
        report, now = response.reuse, time.time()
        tokens = {name: getattr(report, f"{name}_tokens") for name in ("reused", "recomputed", "computed")}
        ttft_s = job.first_delta_s - job.submitted_s
        with self._lock:
            self._num_answered += 1
            self._tokens.update(tokens)
            self._recent.append({"at": now, "ttft_s": ttft_s, "exact": report.exact} | tokens)
            self._record_documents(job, response, now)

    def _record_documents(self, job: Job, response: Response, now: float) -> None:
        told = {reuse.document_id: reuse for reuse in response.reuse.per_document}
        seen = set()
        # Documents that clients bring are private, and have no `source_id`.
        for document in job.request.documents:
            key, reuse = document.source_id, told.get(document.id)
            if key is None or reuse is None:
                continue
            use = self._uses.setdefault(key, _Use(document.title))
            self._uses.move_to_end(key)
            use.requests += key not in seen
            seen.add(key)
            use.tokens += reuse.num_tokens
            use.reused_tokens += reuse.reused_tokens
            use.last_used = now
        while len(self._uses) > _MOST_DOCUMENTS:
            self._uses.popitem(last=False)

    def to_json(self) -> dict[str, Any]:
        """The counts as plain JSON types."""
        with self._lock:
            hottest = heapq.nlargest(
                NUM_HOTTEST, self._uses.items(), key=lambda item: (item[1].requests, item[1].last_used)
            )
            return {
                "uptime_s": time.time() - self._started_at,
                "answered": self._num_answered,
                "tokens": dict(self._tokens),
                "recent": list(self._recent),
                "documents": [{"id": key} | dataclasses.asdict(use) for key, use in hottest],
            }


def live_json(engine: Engine, retriever: Retriever | None, model: str, counts: LiveCounts) -> dict[str, Any]:
    """The current state of the server; waits for no request."""
    batch = engine.batch_counts
    return (
        {
            "object": "live",
            "model": model,
            "strategy": engine.config.strategy,
            "queue": {
                "running": batch.running,
                "waiting": batch.waiting,
                "waiting_tokens": batch.waiting_tokens,
                "preemptions": batch.preemptions,
            },
            "pages": {"used": batch.num_pages - batch.free_pages, "total": batch.num_pages},
            "tiers": [{"tier": tier} | dataclasses.asdict(usage) for tier, usage in engine.cache.usage().items()],
            "num_variants": engine.cache.num_variants,
        }
        | index_summary(retriever)
        | counts.to_json()
    )
