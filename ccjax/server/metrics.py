"""Prometheus metrics of one server, in a registry of its own. Names follow vLLM's where it has the same metric."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ccjax.engine import Engine, Response
from ccjax.engine.speculation import SpeculativeAnswer
from ccjax.retrieval import Retriever
from ccjax.runner.compilations import Compilations, compilations
from ccjax.runner.device import kv_spec_of
from ccjax.server.preparing import DocumentPreparation
from ccjax.server.worker import Job
from ccjax.types import ReuseReport

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STORE_GAUGES = ("used_bytes", "budget_bytes", "num_variants")

_SHADOW_COUNTERS = {
    "checks": "Answers over approximate reuse that were compared with a full prefill",
    "greedy": "Compared answers that were sampled greedily",
    "same": "Greedy answers that equal full prefill's, token by token",
    "tokens": "Tokens of the greedy answers",
    "agreed_tokens": "Tokens that full prefill would have chosen in their place",
    "first_kl": "Sum of KL(full prefill, answer) in nats, of the first token's distribution",
    "dropped": "Answers that were not compared for lack of idle time",
}
_ORDER_COUNTERS = {
    "placed": "Orders for KV that waiting requests will need",
    "taken": "Orders that this process took",
    "failed": "Orders taken that failed",
    "computed_tokens": "Tokens that ran through the model for orders",
}
_MAINTENANCE_COUNTERS = {
    "repaired": "Approximate variants replaced by exact ones in idle time",
    "repair_failed": "Approximate variants that could not be repaired",
    "prepared": "Passages that requests brought, computed behind the frame in idle time",
    "adopted": "Variants that another process stored in the same store",
    "vanished": "Variants that another process removed from the same store",
}


class ServerMetrics:
    """Counts requests, tokens and reuse; reads the store, the queue and the index when it is scraped."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # process_resident_memory_bytes and others, on Linux
        registry.register(_Scraped(functools.partial(_compilations, compilations())))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ccjax_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"ccjax_{name}", text, registry=registry, buckets=_SECONDS)

        self._success = counter("request_success", "Requests answered", "finished_reason")
        self._errors = counter("request_errors", "Requests refused, failed or abandoned by the client", "reason")
        self._reuse_mode = counter("request_reuse", "Requests answered, by reuse mode and exactness", "mode", "exact")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of the prompts")
        self._generation_tokens = counter("generation_tokens", "Tokens of the answers")
        self._tokens_by_role = {
            name: counter(f"{name}_tokens", f"Prompt tokens {text}", "role")
            for name, text in (
                ("reused", "whose stored KV was used unchanged"),
                ("recomputed", "of reused chunks that were computed again"),
            )
        }
        text = "Prompt tokens that were computed without stored KV, and why (docs/serving.md)"
        self._computed_tokens = counter("computed_tokens", text, "role", "cause")
        # vLLM's names, in tokens: queries and hits of a prefix-only cache.
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens for which a stored prefix was looked up")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens in a stored prefix")
        labels = ("cache_source", "match", "strategy")
        text = "stored KV, by tier, and by whether it was computed behind the same tokens (prefix) or others (chunk)"
        self._cached_tokens = counter("cached_tokens", f"Prompt tokens with {text}", *labels)
        self._cached_bytes = counter("cached_bytes", f"Bytes of {text}", *labels)
        self._bytes_per_token = 0
        self._admin = counter("cache_admin", "Calls of the admin API", "operation", "outcome")
        self._warmed = counter("warmed_documents", "Finished documents of warm jobs", "status")
        text = "Passages of the server's own documents processed in idle time"
        self._prepared = counter("prepared_passages", text, "status")
        self._speculations = counter("speculations", "Answers that began while passages were searched for", "outcome")
        self._loaded_bytes = counter("loaded_bytes", "KV bytes loaded for reuse")
        self._preloaded_bytes = counter("preloaded_bytes", "KV bytes of disk variants read before they were needed")
        self._load_s = counter("load_seconds", "Time that loading took or would have taken by itself, hidden or not")
        self._given_up_loads = counter("given_up_loads", "Loads abandoned because computing was quicker")
        self._failed_loads = counter("failed_loads", "Stored variants that could not be loaded and were computed")
        self._load_wait_s = counter("load_wait_seconds", "Time that prefills waited for stored KV")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token, queue included")
        self._queue_time = histogram("request_queue_time_seconds", "Time in the queue, of requests that were started")
        self._prefill_time = histogram("request_prefill_time_seconds", "Prefill alone")
        text = "Mean time between two tokens of an answer; of the longest answer if there are several"
        self._token_time = histogram("request_time_per_output_token_seconds", text)
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token")
        self.retrieval_time = histogram("retrieval_seconds", "Search for passages")
        self._info = Gauge("ccjax_build_info", "Always 1", ["version", "model_name"], registry=registry)

    def attach(
        self,
        *,
        version: str,
        model: str,
        engine: Engine,
        retriever: Retriever | None,
        preparation: DocumentPreparation | None = None,
        prepares_passages: bool = True,
    ) -> None:
        """Adds metrics that are read at scrape time; once per server. `prepares_passages`: whether idle time prepares
        those of requests."""
        self._info.labels(version, model).set(1)
        self._bytes_per_token = kv_spec_of(engine.model_config, engine.config.dtype).num_bytes(1)
        readers: dict[str, tuple[str, Callable[[], float]]] = {
            "num_variants": ("Chunk variants that can be reused", lambda: engine.cache.num_variants),
            "cached_documents": ("Versions of documents in the cache", lambda: engine.documents.counts.documents),
            "sizes_to_compile": ("Sizes of steps that idle time still has to compile", lambda: engine.num_sizes_left),
            "pins": ("Pins that have not expired", lambda: engine.documents.counts.pins),
            "unfinished_erasures": (
                "Erasures that could not delete everything yet",
                lambda: engine.documents.counts.unfinished_erasures,
            ),
        }
        if retriever is not None:
            readers["num_documents"] = ("Documents in the index", lambda: retriever.num_documents)
            readers["num_passages"] = ("Passages in the index", lambda: retriever.num_passages)
            text = "Passages found by words alone, since their vectors are still computed"
            readers["vectors_pending"] = (text, lambda: retriever.num_pending)
            self._registry.register(_Scraped(functools.partial(_skipped, retriever)))
        if prepares_passages:
            text = "Passages of requests that idle time still has to prepare"
            readers["passages_to_prepare"] = (text, lambda: engine.cache.num_unprepared)
        if preparation is not None:
            text = "Documents with passages that idle time still has to prepare"
            readers["documents_to_prepare"] = (text, lambda: preparation.num_documents_left)
        for name, (text, read) in readers.items():
            Gauge(f"ccjax_{name}", text, registry=self._registry).set_function(read)
        for read in (_batch, _store, _change_feed, _maintenance, _orders, _shadow, _rates):
            self._registry.register(_Scraped(functools.partial(read, engine)))

    def count_error(self, reason: str) -> None:
        """Counts a request without a complete answer; `reason` is an `ApiError.reason` or "cancelled"."""
        self._errors.labels(reason).inc()

    def count_admin(self, operation: str, status: int) -> None:
        """Counts a call of the admin API; `operation` is one of its few operations."""
        outcome = "ok" if status < 400 else "refused" if status < 500 else "failed"
        self._admin.labels(operation, outcome).inc()

    def count_warmed(self, status: str) -> None:
        """Counts a warmed document; `status` is a `WarmStatus`."""
        self._warmed.labels(status).inc()

    def count_prepared(self, status: str) -> None:
        """Counts a prepared passage; `status` is a `WarmStatus`."""
        self._prepared.labels(status).inc()

    def count_speculations(self, begun: SpeculativeAnswer) -> None:
        """Counts the answers that began during a search."""
        num_right = int(begun.was_right is True)
        for outcome, count in (("right", num_right), ("wrong", begun.num_started - num_right)):
            self._speculations.labels(outcome).inc(count)

    def start(self, job: Job) -> None:
        """Records how long a job was queued, when it starts."""
        assert job.started_s is not None
        self._queue_time.observe(job.started_s - job.submitted_s)

    def end(self, job: Job) -> None:
        """Counts a job that has its response or was cancelled."""
        if job.response is None:
            self.count_error("cancelled")
            return
        assert job.first_delta_s is not None and job.ended_s is not None
        self._ttft.observe(job.first_delta_s - job.submitted_s)
        self._latency.observe(job.ended_s - job.submitted_s)
        num_more = max(len(choice.token_ids) for choice in job.response.choices) - 1
        if num_more > 0:
            self._token_time.observe((job.ended_s - job.first_delta_s) / num_more)
        self._count_response(job.response)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _count_response(self, response: Response) -> None:
        report = response.reuse
        for choice in response.choices:
            self._success.labels(choice.finish_reason).inc()
        self._reuse_mode.labels(report.mode, str(report.exact).lower()).inc()
        self._prompt_tokens.inc(report.prompt_tokens)
        self._generation_tokens.inc(response.num_answer_tokens)
        self._prefill_time.observe(report.prefill_s)
        self._loaded_bytes.inc(report.loaded_bytes)
        self._preloaded_bytes.inc(report.preloaded_bytes)
        self._load_s.inc(report.load_s)
        self._given_up_loads.inc(report.given_up_loads)
        self._failed_loads.inc(report.failed_loads)
        self._load_wait_s.inc(report.load_wait_s)
        if report.mode != "off":
            self._count_cached(report)
        for name, metric in self._tokens_by_role.items():
            field = f"{name}_tokens"
            for document in report.per_document:
                metric.labels(document.role).inc(getattr(document, field))
            listed = sum(getattr(document, field) for document in report.per_document)
            metric.labels("question").inc(getattr(report, field) - listed)
        computed = [part for part in report.per_document if part.computed_tokens]
        for part in computed:
            self._computed_tokens.labels(part.role, part.cause).inc(part.computed_tokens)
        listed = sum(part.computed_tokens for part in computed)
        self._computed_tokens.labels("question", "question").inc(report.computed_tokens - listed)

    def _count_cached(self, report: ReuseReport) -> None:
        self._prefix_queries.inc(report.prompt_tokens)
        for document in report.per_document:
            if document.tier is None or not document.reused_tokens:
                continue
            match = "prefix" if document.exact else "chunk"
            labels = (document.tier, match, report.strategy)
            self._cached_tokens.labels(*labels).inc(document.reused_tokens)
            self._cached_bytes.labels(*labels).inc(document.reused_tokens * self._bytes_per_token)
            if document.exact:
                self._prefix_hits.inc(document.reused_tokens)


class _Scraped:
    """Metrics that a function reads at every scrape."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect


def _skipped(retriever: Retriever) -> Iterator[Metric]:
    """What the index leaves out."""
    text = "Files, lines and directories of --docs that cannot be used or read"
    problems = GaugeMetricFamily("ccjax_document_problems", text, labels=["reason"])
    for kind, count in retriever.report.skipped.items():
        problems.add_metric([kind], count)
    yield problems


def _batch(engine: Engine) -> Iterator[Metric]:
    """The batch and its page pool."""
    counts = engine.batch_counts
    yield GaugeMetricFamily("ccjax_num_requests_running", "Requests that run", value=counts.running)
    yield GaugeMetricFamily("ccjax_num_requests_waiting", "Requests waiting", value=counts.waiting)
    text = "Requests that lost their pages to more important ones and ran again"
    yield CounterMetricFamily("ccjax_num_preemptions", text, value=counts.preemptions)
    text = "Answers that were retried because a step of the model failed"
    yield CounterMetricFamily("ccjax_num_retries", text, value=counts.retries)
    used = counts.num_pages - counts.free_pages
    pages = GaugeMetricFamily(
        "ccjax_kv_cache_pages", "Pages of device memory; those of cached chunks are used", labels=["state"]
    )
    pages.add_metric(["free"], counts.free_pages)
    pages.add_metric(["used"], used)
    yield pages
    yield GaugeMetricFamily("ccjax_kv_cache_usage_perc", "Share of pages in use, 0 to 1", value=used / counts.num_pages)
    text = "KV copied from the device to host memory; by the thread that waited for it"
    copied = CounterMetricFamily("ccjax_kv_bytes_to_host", text, labels=["thread"])
    for thread, num_bytes in counts.bytes_to_host.items():
        copied.add_metric([thread], num_bytes)
    yield copied
    text = "Pages of reused text that requests read in place, copied, or wrote because their tokens were recomputed"
    reused = CounterMetricFamily("ccjax_reused_pages", text, labels=["how"])
    for how, count in counts.reused_pages.items():
        reused.add_metric([how], count)
    yield reused
    text = "KV bytes copied to the device for queued requests"
    yield CounterMetricFamily("ccjax_device_preloaded_bytes", text, value=counts.preloaded_bytes)


def _store(engine: Engine) -> Iterator[Metric]:
    """The store's own counters by tier."""
    usage = engine.cache.usage()
    names = [field.name for tier in usage.values() for field in dataclasses.fields(tier)]
    for name in dict.fromkeys(names):
        family = GaugeMetricFamily if name in _STORE_GAUGES else CounterMetricFamily
        metric = family(f"ccjax_store_{name}", f"{name.replace('_', ' ')} of a tier of the store", labels=["tier"])
        for tier, values in usage.items():
            value = getattr(values, name)
            metric.add_metric([tier], float("inf") if value is None else value)  # None: no limit
        yield metric


def _change_feed(engine: Engine) -> Iterator[Metric]:
    """The change feed of the shared index; nothing without one."""
    counts = engine.cache.change_feed_counts
    if counts is not None:
        yield GaugeMetricFamily("ccjax_store_index_up", "1 while the shared index answers", value=int(counts.is_up))
        text = "Variants that other processes stored or deleted, received through the shared index"
        yield CounterMetricFamily("ccjax_store_index_changes", text, value=counts.num_applied)


def _compilations(counter: Compilations) -> Iterator[Metric]:
    """Compiled steps: an increase while requests run means that a request waited for a compilation."""
    text = "Steps compiled for a new size, including those found in the compilation cache"
    yield CounterMetricFamily("ccjax_compilations", text, value=counter.count)
    text = "Steps compiled in idle time, for which no request waited"
    yield CounterMetricFamily("ccjax_background_compilations", text, value=counter.background_count)


def _maintenance(engine: Engine) -> Iterator[Metric]:
    """Changes of the variants by idle work and by other processes."""
    counts = engine.cache.maintenance_counts
    for name, text in _MAINTENANCE_COUNTERS.items():
        yield CounterMetricFamily(f"ccjax_variants_{name}", text, value=getattr(counts, name))


def _orders(engine: Engine) -> Iterator[Metric]:
    """Orders placed for waiting requests."""
    counts = engine.orders.counts
    for name, text in _ORDER_COUNTERS.items():
        yield CounterMetricFamily(f"ccjax_orders_{name}", text, value=getattr(counts, name))


def _shadow(engine: Engine) -> Iterator[Metric]:
    """Comparison of answers with approximate reuse with a full prefill."""
    counts, strategy = engine.cache.shadow_counts, engine.config.strategy
    for name, text in _SHADOW_COUNTERS.items():
        metric = CounterMetricFamily(f"ccjax_shadow_{name}", text, labels=["strategy"])
        metric.add_metric([strategy], getattr(counts, name))
        yield metric
    text = "Factor by which more is recomputed than configured, because answers differed"
    factor = GaugeMetricFamily("ccjax_shadow_factor", text, labels=["strategy"])
    factor.add_metric([strategy], counts.factor)
    yield factor


def _rates(engine: Engine) -> Iterator[Metric]:
    """Measured loading and computing rates; left out while unknown."""
    rates = engine.rates
    costs = {tier: rate.cost for tier, rate in rates.tiers.items()}
    text = "Measured time to load from a tier of the store"
    fixed = GaugeMetricFamily("ccjax_load_latency_seconds", f"{text}, whatever the size", labels=["tier"])
    unit = GaugeMetricFamily("ccjax_load_seconds_per_byte", f"{text}, by size", labels=["tier"])
    for tier, cost in costs.items():
        if cost is not None:
            fixed.add_metric([tier], cost.fixed_s)
            unit.add_metric([tier], cost.unit_s)
    yield fixed
    yield unit
    token_s = rates.seconds_per_token
    per_token = GaugeMetricFamily("ccjax_compute_seconds_per_token", "Measured time of one more computed token")
    if token_s is not None:
        per_token.add_metric([], token_s)
    yield per_token
