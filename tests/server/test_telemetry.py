"""Reports on a request besides its answer: the log line, OpenTelemetry's spans, tokens by kind of match."""

from __future__ import annotations

import http.server
import importlib.util
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ccjax.errors import ConfigError
from ccjax.server import ServerSettings
from ccjax.server.openai_format import Formatter
from ccjax.server.phases import PHASES, phases
from ccjax.server.tracing import Tracing
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import Server, StartServer
from tests.server.test_traffic import busy, metrics

PASSAGES = [
    {"id": f"p{number}", "text": f"The {name} hides in a hollow."} for number, name in enumerate(("fox", "owl"))
]
SECRET = "zebra"


def body(**more: Any) -> dict[str, Any]:
    question = f"Where is the {SECRET}?"
    return {"messages": [{"role": "user", "content": question}], "documents": PASSAGES, "max_tokens": 3} | more


def ask(server: Server, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return patience.post(f"{server.url}/v1/chat/completions", json=body(**more), headers=headers)


# -- phases ------------------------------------------------------------------------------------------------------------


def test_phases_are_contiguous_up_to_the_last_one_reached():
    assert list(phases(1.0, 2.0, 2.5, 4.0, None, None)) == [
        ("retrieval", 1.0, 2.0),
        ("preparation", 2.0, 2.5),
        ("queue", 2.5, 4.0),
    ]
    assert list(phases(1.0, None, None, None, None, None)) == []


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[logging.LogRecord]]:
    """`lines(n)` waits for the first n records of requests, and returns them."""
    caplog.set_level(logging.INFO, "ccjax.request")

    def get(count: int) -> list[logging.LogRecord]:
        found: list[logging.LogRecord] = []

        def are_there() -> bool:
            found[:] = [record for record in list(caplog.records) if record.name == "ccjax.request"]
            return len(found) >= count

        wait_until(are_there)
        assert len(found) == count
        return found

    return get


@pytest.mark.parametrize("stream", [False, True])
def test_a_log_line_has_the_figures_of_the_answer(server: Server, lines, stream: bool) -> None:
    response = ask(server, stream=stream)
    if stream:
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        answers = [json.loads(event) for event in events]
        (answer,) = (answer for answer in answers if "reuse" in answer)
    else:
        answer = response.json()
    (record,) = lines(1)
    told = vars(record)
    assert (told["outcome"], told["status"], told["kind"], told["documents"]) == ("answered", 200, "chat", 2)
    assert told["request_id"] == answer["id"]
    for name in ("prompt_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens", "exact", "strategy"):
        assert told[name] == answer["reuse"][name], name
    assert 0 < told["ttft_s"] <= told["latency_s"]
    assert answer["id"] in record.getMessage()
    everything = str(told)
    assert SECRET not in everything and "hollow" not in everything and "fox" not in everything


def test_refusals_and_disconnects_are_logged(server: Server, lines) -> None:
    assert ask(server, model="another").status_code == 404
    assert ask(server, max_tokens=100_000).status_code == 400
    with busy(server), patience.leaving(server.url, body()):
        wait_until(lambda: server.service.backend.worker.num_waiting == 1)
    refused, too_long, left = lines(3)
    assert (refused.outcome, refused.status) == ("model_not_found", 404)
    assert (too_long.outcome, too_long.status) == ("context_length_exceeded", 400)
    assert left.outcome == "cancelled" and not hasattr(left, "ttft_s") and left.request_id
    assert "-" in left.getMessage()


def test_failure_before_the_answer_is_logged_once(server: Server, lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine, "assemble", lambda request: 1 / 0)
    assert ask(server).status_code == 500
    (record,) = lines(1)
    assert (record.outcome, record.status) == ("internal_error", 500)


def test_a_failure_during_a_stream_is_reported_once(server: Server, lines, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, calls = Formatter.chunks, []

    def fail_later(self, delta, *, include_usage):
        calls.append(delta)
        if len(calls) > 1:
            raise RuntimeError("pipe burst")
        return chunks(self, delta, include_usage=include_usage)

    monkeypatch.setattr(Formatter, "chunks", fail_later)
    assert "internal_error" in ask(server, stream=True, max_tokens=4, ignore_eos=True).text
    monkeypatch.undo()
    ask(server)
    failed, next_one = lines(2)
    assert (failed.outcome, failed.status, next_one.outcome) == ("internal_error", 500, "answered")


LOG_SOMETHING = """
import logging
logging.basicConfig(format="before: %(message)s")
from ccjax.server.logs import configure_logging
configure_logging("INFO", {log_format!r})
told = {{"outcome": "answered", "ttft_s": 0.25}}
logging.getLogger("ccjax.request").info("%(outcome)s é", told, extra=told)
logging.getLogger("a").debug("not this")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("b").exception("two\\nlines")
"""


def logged(log_format: str) -> str:
    program = LOG_SOMETHING.format(log_format=log_format)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr


def test_json_logs_have_one_object_per_line_with_all_fields():
    first, second = (json.loads(line) for line in logged("json").splitlines())
    assert first | {"timestamp": ""} == {
        "timestamp": "",
        "level": "INFO",
        "logger": "ccjax.request",
        "message": "answered é",
        "outcome": "answered",
        "ttft_s": 0.25,
    }
    at = datetime.fromisoformat(first["timestamp"])
    assert at.utcoffset() == timedelta(0)
    assert second["message"] == "two\nlines" and "ZeroDivisionError" in second["exc_info"]


def test_text_logs_are_readable():
    first, *rest = logged("text").splitlines()
    assert first.endswith(" INFO ccjax.request: answered é")
    assert "not this" not in "".join(rest) and "ZeroDivisionError" in rest[-1]


# -- spans -------------------------------------------------------------------------------------------------------------


class Collector:
    """Accepts OTLP over HTTP, parsed with OpenTelemetry's own protocol files."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for group in request.resource_spans:
                    collector.resources.append(
                        {item.key: item.value.string_value for item in group.resource.attributes}
                    )
                    for scope in group.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_request_span_joins_the_callers_trace_with_phases_as_children(
    start_server: StartServer, collector: Collector, lines
) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with start_server(ServerSettings(otlp_traces_endpoint=collector.url)) as server:
        first = ask(server).json()
        second = ask(server, {"traceparent": f"00-{trace_id}-{parent_id}-01"}).json()
    roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [attributes(span)["gen_ai.response.id"] for span in roots] == [first["id"], second["id"]]
    root = roots[1]
    assert root.name == f"chat {second['model']}"
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (trace_id, parent_id)
    assert not roots[0].parent_span_id and roots[0].trace_id != root.trace_id
    told, reuse = attributes(root), second["reuse"]
    assert told["gen_ai.usage.input_tokens"] == second["usage"]["prompt_tokens"] == reuse["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == second["usage"]["completion_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] == reuse["reused_tokens"] > 0
    assert told["ccjax.reuse.computed_share"] == reuse["computed_share"] and told["ccjax.reuse.exact"] is True
    assert told["gen_ai.request.max_tokens"] == 3 and "error.type" not in told
    assert root.status.code == Status.STATUS_CODE_UNSET
    inside = sorted(
        (span for span in collector.spans if span.parent_span_id == root.span_id),
        key=lambda span: (span.start_time_unix_nano, PHASES.index(span.name)),
    )
    assert [span.name for span in inside] == list(PHASES)
    for before, after in zip(inside, inside[1:], strict=False):
        assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 1000
    assert root.start_time_unix_nano <= inside[0].start_time_unix_nano + 1000
    assert inside[-1].end_time_unix_nano <= root.end_time_unix_nano + 1000
    prefill = attributes(inside[PHASES.index("prefill")])
    assert prefill["ccjax.load.bytes"] == reuse["loaded_bytes"]
    assert abs(inside[PHASES.index("decode")].start_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(
        told["ccjax.time_to_first_token"], abs=0.05
    )
    assert {resource["service.name"] for resource in collector.resources} == {"ccjax"}
    assert SECRET not in str(collector.spans) and "hollow" not in str(collector.spans)
    assert [record.trace_id for record in lines(2)] == [span.trace_id.hex() for span in roots]


def test_refused_and_failed_requests_are_spans_too(
    start_server: StartServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "library")
    with start_server(ServerSettings(otlp_traces_endpoint=collector.url)) as server:
        assert ask(server, model="another").status_code == 404
        monkeypatch.setattr(server.engine, "assemble", lambda request: 1 / 0)
        assert ask(server).status_code == 500
    refused, failed = collector.spans
    assert attributes(refused)["error.type"] == "model_not_found" and refused.status.code == Status.STATUS_CODE_UNSET
    assert attributes(failed)["error.type"] == "internal_error" and failed.status.code == Status.STATUS_CODE_ERROR
    assert {resource["service.name"] for resource in collector.resources} == {"library"}


def test_sampler_set_in_the_environment_applies(
    start_server: StartServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with start_server(ServerSettings(otlp_traces_endpoint=collector.url)) as server:
        ask(server)
        ask(server, {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    assert {span.trace_id.hex() for span in collector.spans} == {"1" * 32}


def test_without_a_collector_requests_are_still_answered(start_server: StartServer) -> None:
    with start_server(ServerSettings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")) as server:
        assert ask(server).status_code == 200


def test_tracing_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: wanted a URL such as http.*got 'localhost:4318'"):
        ServerSettings(otlp_traces_endpoint="localhost:4318")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("opentelemetry.exp") else find_spec(name)
    )
    with pytest.raises(ConfigError, match=r"ccjax\[tracing\], opentelemetry.exporter.otlp.proto.http is not installed"):
        Tracing("http://localhost:4318/v1/traces")


# -- tokens by kind of match -------------------------------------------------------------------------------------------


def test_prefix_hits_are_counted_separately_in_tokens_and_bytes(start_server: StartServer) -> None:
    with start_server(ServerSettings()) as server:
        reports = [ask(server, documents=docs).json()["reuse"] for docs in (PASSAGES, PASSAGES, PASSAGES[::-1])]
        ask(server, reuse="off")
        found = metrics(server)
        config = server.engine.model_config
    assert [report["reused_tokens"] > 0 for report in reports] == [False, True, True]
    wanted: dict[tuple[str, ...], int] = {}
    for report in reports:
        for document in report["per_document"]:
            if document["reused_tokens"]:
                key = (document["tier"], "prefix" if document["exact"] else "chunk", report["strategy"])
                wanted[key] = wanted.get(key, 0) + document["reused_tokens"]
    assert {match for _, match, _ in wanted} == {"prefix", "chunk"}
    for name, unit in (
        ("tokens", 1),
        ("bytes", config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4),
    ):
        counted = {key[1:]: value for key, value in found.items() if key[0] == f"ccjax_cached_{name}_total"}
        assert counted == {key: value * unit for key, value in wanted.items()}
    by_prefix = sum(value for (_, match, _), value in wanted.items() if match == "prefix")
    assert found[("ccjax_prefix_cache_hits_total",)] == by_prefix
    assert found[("ccjax_prefix_cache_queries_total",)] == sum(report["prompt_tokens"] for report in reports)


def test_time_per_token_covers_the_tokens_after_the_first(server: Server) -> None:
    name = "ccjax_request_time_per_output_token_seconds"
    before = metrics(server)
    ask(server, max_tokens=1, ignore_eos=True)
    assert metrics(server)[(f"{name}_count",)] == before[(f"{name}_count",)]
    ask(server, max_tokens=5, ignore_eos=True)
    after = metrics(server)
    assert after[(f"{name}_count",)] == before[(f"{name}_count",)] + 1
    latency, ttft = (f"ccjax_{metric}_sum" for metric in ("e2e_request_latency_seconds", "time_to_first_token_seconds"))
    one_token = {name: after[(name,)] - before[(name,)] for name in (latency, ttft)}
    spent = after[(f"{name}_sum",)] - before[(f"{name}_sum",)]
    assert 0 < 4 * spent <= one_token[latency] - one_token[ttft] + 1e-6
