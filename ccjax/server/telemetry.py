"""Reports each finished request besides its answer: a log line, and spans if tracing is on. Contains no text, key or
tenant."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ccjax.server.errors import ApiError
from ccjax.server.openai_format import Kind
from ccjax.server.worker import Job

logger = logging.getLogger("ccjax.request")


@dataclasses.dataclass(eq=False)
class RequestTelemetry:
    """Telemetry of one request.

    Attributes:
      job: once the request is submitted; None if it ended before.
      headers: of the HTTP request.
      record: sends spans (`ccjax.server.tracing`) and returns their ids; None where tracing is off.
      began_s: `time.perf_counter` when it arrived.
    """

    kind: Kind
    headers: Mapping[str, str]
    model: str
    record: Callable[[RequestTelemetry, Mapping[str, Any]], Mapping[str, str]] | None
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    job: Job | None = None
    _is_over: bool = False

    def end(self, refusal: ApiError | None = None) -> None:
        """Reports the request as answered, refused or, without either, abandoned by its client. Only the first call has
        an effect."""
        if self._is_over:
            return
        self._is_over = True
        facts = self._facts(refusal)
        where = {} if self.record is None else self.record(self, facts)
        # Text logs show the essentials, JSON logs all fields.
        line = (
            "%(outcome)s %(request_id)s (%(x_request_id)s): first token after %(ttft_s)s s, all after %(latency_s)s s"
        )
        shown = {"request_id": "before it had an id", "ttft_s": "-", **facts}
        logger.info(line, shown, extra={"kind": self.kind, **facts, **where})

    def _facts(self, refusal: ApiError | None) -> dict[str, Any]:
        now_s, job = time.perf_counter(), self.job
        facts: dict[str, Any] = {"latency_s": _rounded(now_s - self.began_s)}
        facts["x_request_id"] = self.headers.get("x-request-id", "")
        if job is not None:
            facts["request_id"] = job.request.request_id
            if job.first_delta_s is not None:
                facts["ttft_s"] = _rounded(job.first_delta_s - job.arrived_s)
        if refusal is not None:
            return facts | {"outcome": refusal.reason, "status": refusal.status}
        if job is None or job.response is None:
            return facts | {"outcome": "cancelled"}
        response = job.response
        report = response.reuse
        names = ("prompt_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens", "exact", "strategy")
        facts |= {name: getattr(report, name) for name in names} | {"reuse": report.mode}
        facts |= {"answer_tokens": response.num_answer_tokens, "loaded_bytes": report.loaded_bytes}
        return facts | {"documents": len(job.request.documents), "outcome": "answered", "status": 200}


def _rounded(seconds: float) -> float:
    """Rounds to tenths of a millisecond."""
    return round(seconds, 4)
