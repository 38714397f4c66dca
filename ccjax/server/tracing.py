"""Sends requests as OpenTelemetry spans by OTLP over HTTP; needs ccjax[tracing]. Attributes follow OpenTelemetry's
conventions for generative AI where these exist, and begin with `ccjax.` otherwise.

The spans of a request are created when it is over, so that the engine never waits for them.
"""

from __future__ import annotations

import importlib.util
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ccjax
from ccjax.errors import ConfigError
from ccjax.server.phases import phases

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from ccjax.server.telemetry import RequestTelemetry
    from ccjax.server.worker import Job

_OPERATIONS = {"chat": "chat", "completion": "text_completion"}


def check_installed() -> None:
    """Checks that spans can be created and sent.

    Raises:
      ConfigError: the required packages are missing.
    """
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a parent package is missing
            found = None
        if found is None:
            raise ConfigError(f"otlp_traces_endpoint: wanted the packages of ccjax[tracing], {name} is not installed")


class Tracing:
    """Sends spans in the background, sampled as OTEL_TRACES_SAMPLER says; spans that the collector does not accept in
    time are dropped.

    `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS` and OpenTelemetry's other variables
    apply as usual.
    """

    def __init__(self, endpoint: str) -> None:
        """Args:
          endpoint: OTLP URL, such as http://localhost:4318/v1/traces.

        Raises:
          ConfigError: the packages are missing.
        """
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        who = {"service.name": "ccjax", "service.version": ccjax.__version__, "service.instance.id": str(uuid.uuid4())}
        ours = Resource.create(who)
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer: Tracer = self._provider.get_tracer("ccjax", ccjax.__version__)

    def record(self, telemetry: RequestTelemetry, facts: Mapping[str, Any]) -> dict[str, str]:
        """Creates the spans of a finished request; returns the ids that link its log line to them.

        Args:
          facts: as collected by `telemetry`.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_s, now_ns = time.perf_counter(), time.time_ns()

        def at(seconds: float) -> int:
            return now_ns - round((now_s - seconds) * 1e9)

        parent = TraceContextTextMapPropagator().extract(dict(telemetry.headers))
        operation, job = _OPERATIONS[telemetry.kind], telemetry.job
        span = self._tracer.start_span(
            f"{operation} {telemetry.model}",
            parent,
            SpanKind.SERVER,
            _attributes(telemetry, operation, facts),
            start_time=at(telemetry.began_s),
        )
        if job is not None:
            self._record_phases(job, set_span_in_context(span), at)
        if facts["outcome"] != "answered":
            span.set_attribute("error.type", facts["outcome"])
        if facts.get("status", 0) >= 500:  # a client error is not an error of the server's span
            span.set_status(Status(StatusCode.ERROR))
        span.end(now_ns)
        context = span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def close(self) -> None:
        """Sends the remaining spans; takes at most as long as the exporter retries, ten seconds by default."""
        self._provider.shutdown()

    def _record_phases(self, job: Job, inside: Context, at: Callable[[float], int]) -> None:
        borders = (job.arrived_s, job.found_s, job.submitted_s, job.started_s, job.first_delta_s, job.ended_s)
        for name, start_s, end_s in phases(*borders):
            if end_s > start_s:
                span = self._tracer.start_span(name, inside, start_time=at(start_s))
                if name == "prefill" and job.response is not None:
                    span.set_attributes(_prefill_attributes(job))
                span.end(at(end_s))


def _attributes(telemetry: RequestTelemetry, operation: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ccjax",
        "gen_ai.request.model": telemetry.model,
    }
    job = telemetry.job
    if job is None:
        return attributes
    sampling = job.request.sampling
    if sampling.max_new_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_new_tokens
    attributes |= {
        "gen_ai.response.id": job.request.request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": sampling.n,
    }
    response = job.response
    if response is None:
        return attributes
    report = response.reuse
    return attributes | {
        "gen_ai.response.model": telemetry.model,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in response.choices],
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": response.num_answer_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.reused_tokens,
        "ccjax.time_to_first_token": facts["ttft_s"],
        "ccjax.documents": facts["documents"],
        "ccjax.reuse.mode": report.mode,
        "ccjax.reuse.strategy": report.strategy,
        "ccjax.reuse.exact": report.exact,
        "ccjax.reuse.recomputed_tokens": report.recomputed_tokens,
        "ccjax.reuse.computed_tokens": report.computed_tokens,
        "ccjax.reuse.computed_share": report.computed_share,
    }


def _prefill_attributes(job: Job) -> dict[str, Any]:
    assert job.response is not None
    report = job.response.reuse
    tiers = sorted({document.tier for document in report.per_document if document.tier is not None})
    return {
        "ccjax.load.bytes": report.loaded_bytes,
        "ccjax.load.wait_seconds": report.load_wait_s,
        "ccjax.load.failed": report.failed_loads,
        "ccjax.load.tiers": tiers,
        "ccjax.plan_seconds": report.plan_s,
    }
