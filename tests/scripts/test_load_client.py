"""Load over HTTP: when requests are sent, what is measured, what counts as a failure, and the figures by hand."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripts.benchmarks import client, cluster, serve
from scripts.benchmarks.client import RequestRecord, closed_loop, figures, open_loop, ttft_s
from scripts.benchmarks.common import spread

TIMEOUT_S = 60.0
BODY = client.chat("What?", [], 3)


def event(value: Any) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
TEXT = event({"choices": [{"delta": {"content": "ab"}}]})
DONE = event("[DONE]")


def usage(num_tokens: int = 3) -> bytes:
    reuse = {"computed_share": 0.25, "prompt_tokens": 40}
    return event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": num_tokens}, "reuse": reuse})


@contextlib.contextmanager
def answering(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server that answers every request this way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'ccjax_a_total{kind="x"} 2\nccjax_a_total{kind="y"} 3\n')

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def whole(handler: http.server.BaseHTTPRequestHandler, status: int = 200) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(ROLE + TEXT + usage() + DONE if status == 200 else b"busy")


class Crowd:
    """Answers nobody before `until` requests are in progress; `most` were at once."""

    def __init__(self, until: int) -> None:
        self.until, self.most, self._num_open = until, 0, 0
        self._changed = threading.Condition()

    def __call__(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        with self._changed:
            self._num_open += 1
            self.most = max(self.most, self._num_open)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self.until, TIMEOUT_S)
        whole(handler)
        with self._changed:
            self._num_open -= 1


def test_open_loop_does_not_wait_for_answers() -> None:
    """Latencies count from the planned time: a client that is late, as for the first request here, must not hide it."""
    crowd = Crowd(until=12)
    times = [-5.0, *(0.01 * number for number in range(11))]
    with answering(crowd) as url:
        records = open_loop(url, [BODY] * 12, times, TIMEOUT_S)
    assert crowd.most == 12 and [record.scheduled_s for record in records] == times
    assert all(record.sent_s >= max(0.0, at) for record, at in zip(records, times, strict=True))
    assert all(record.status == "ok" for record in records) and ttft_s(records[0]) >= 5.0


def test_closed_loop_keeps_the_set_number_of_requests_in_progress() -> None:
    crowd = Crowd(until=3)
    with answering(crowd) as url:
        records = closed_loop(url, [BODY] * 9, 3, TIMEOUT_S)
    assert crowd.most == 3 and len(records) == 9
    assert all(record.status == "ok" and record.scheduled_s == record.sent_s for record in records)


def test_refused_broken_and_unreachable_are_told_apart() -> None:
    statuses = iter([429, 500, 200])
    with answering(lambda handler: whole(handler, next(statuses))) as url:
        records = closed_loop(url, [BODY] * 3, 1, TIMEOUT_S)
        assert client.scrape(url) == {"ccjax_a_total": 5.0}
    records += closed_loop("http://127.0.0.1:9", [BODY], 1, TIMEOUT_S)
    assert [record.status for record in records] == ["refused", "failed", "ok", "failed"]
    assert [record.error for record in records[:3]] == ["HTTP 429: busy", "HTTP 500: busy", None]
    assert (records[3].error or "").startswith("ConnectionRefusedError")


def read(*parts: bytes, error: str | None = None) -> RequestRecord:
    """The record of a stream, each part of which comes a second after the other."""
    record = RequestRecord(0.5, 0.5, end_s=9.0, error=error)
    client.read_stream(record, [(1.0 + second, part) for second, part in enumerate(parts)], 3)
    return record


def test_times_are_those_of_each_events_last_byte() -> None:
    """The role comes first and does not count."""
    record = read(ROLE, TEXT[:9], TEXT[9:] + TEXT, usage(), DONE)
    assert (record.status, record.error, record.text_s, ttft_s(record)) == ("ok", None, [3.0, 3.0], 2.5)
    assert (record.prompt_tokens, record.completion_tokens, record.computed_tokens) == (40, 3, 10.0)
    mute = read(ROLE, usage(), DONE)  # as many tokens as asked for, none of them visible
    assert (mute.status, mute.text_s) == ("ok", [9.0])


@pytest.mark.parametrize(
    ("parts", "before", "error"),
    [
        ([TEXT, usage()], None, "the stream ended early"),
        ([TEXT, event({"error": {"message": "the server failed"}}), usage(), DONE], None, "the server failed"),
        ([TEXT, usage(2), DONE], None, "wanted 3 tokens of answer, got 2"),
        ([TEXT, usage(), DONE], "IncompleteRead: cut", "IncompleteRead: cut"),
    ],
)
def test_only_a_complete_answer_counts_as_success(parts: list[bytes], before: str | None, error: str) -> None:
    record = read(*parts, error=before)
    assert (record.status, record.error) == ("failed", error)


def answered(at: float, text_s: list[float], end_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(at, at, text_s, end_s, "ok", None, 100, tokens, 40.0)


def test_figures_match_values_computed_by_hand() -> None:
    records = [
        answered(1.0, [2.0, 2.5, 3.5], 3.5, 3),
        answered(2.0, [5.0, 5.25], 6.0, 3),  # two tokens came in one piece
        RequestRecord(2.5, 2.5, [], 3.0, "refused", "HTTP 429"),
        RequestRecord(3.0, 3.5, [4.0, 4.1], 11.0, "failed", "broken"),
    ]
    before, after = {"ccjax_compilations_total": 5.0}, {"ccjax_compilations_total": 7.0}
    row = figures(records, 1.5, before, {**after, "process_resident_memory_bytes": 5e8})
    assert (row["completed"], row["refused"], row["failed"], row["duration_s"]) == (2, 1, 1, 10.0)
    rates = [row[key] for key in ("request_throughput", "output_throughput", "request_goodput")]
    assert rates == pytest.approx([0.2, 0.6, 0.1])
    assert row["ttft_ms"]["mean"] == 2000.0 and row["ttft_ms"]["p50"] == 2000.0
    assert row["itl_ms"]["mean"] == pytest.approx((500 + 1000 + 250) / 3)
    assert row["tpot_ms"]["mean"] == pytest.approx((750 + 125) / 2)
    assert row["e2el_ms"]["mean"] == 3250.0 and row["send_lag_ms"]["mean"] == 125.0
    assert (row["computed_share"], row["compilations"], row["rss_bytes"]) == (0.4, 2.0, 5e8)
    assert row["errors"] == ["HTTP 429", "broken"] and not row["bounded"], "somebody got no answer"
    assert figures(records[:2], 3.0, {}, {})["bounded"] and not figures(records[:2], 2.9, {}, {})["bounded"]
    nothing = figures(records[2:], 9.0, {}, {})
    assert nothing["request_throughput"] == 0.0 and nothing["ttft_ms"]["p99"] is None and not nothing["bounded"]


def test_percentiles_are_interpolated() -> None:
    found = spread([0.001 * number for number in range(1, 102)])
    assert found == pytest.approx({"mean": 51.0, "p50": 51.0, "p90": 91.0, "p99": 100.0})


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    slow, fast = client.poisson_times(4000, 2.0), client.poisson_times(4000, 4.0)
    assert fast == pytest.approx([at / 2 for at in slow]) and sorted(slow) == slow
    assert 4000 / slow[-1] == pytest.approx(2.0, rel=0.05)


def test_history_shares_passages_with_the_measured_requests(tmp_path) -> None:
    docs = [[0, 1], [2, 3], [1, 4], [5, 6], [7, 0], [8, 9], [0, 5], [9, 2]]
    (tmp_path / "rag_trace").mkdir()
    rows = {
        "musique_docs": [{"id": n, "title": f"Town {n}", "text": f"Town {n} has {n + 3} bridges."} for n in range(10)],
        "musique_trace": [{"i": n, "docs": row} for n, row in enumerate(docs)],
    }
    for name, values in rows.items():
        (tmp_path / "rag_trace" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, values)))
    questions = serve.load_questions(tmp_path, 2)
    assert questions[3][0] == "What do the passages say about Town 5?"
    found = [questions.index(question) for question in serve.history(questions, 6, 9)]
    assert found == [0, 1, 3, 4, 5]  # passages 0, 5, 9 and 2; [1, 4] shares none
    assert serve.history(questions, 6, 2) == questions[4:6] and serve.history(questions, 6, 0) == []
    drawn = serve.load_questions(None, 5)
    assert len(drawn) == 1000 and all(len({p["id"] for p in passages}) == 5 for _, passages in drawn)
    assert len(serve.history(drawn, 900, 1000)) > 500


def test_gains_of_a_cluster_are_over_the_same_pass() -> None:
    def case(system: str, number: int, throughput: float, mean: float) -> dict[str, Any]:
        about = {"system": system, "documents": 1, "pass": number}
        return {**about, "throughput": throughput, "latency_ms": {"mean": mean}}

    cases = [case("default", 1, 3.0, 50.0), case("default", 2, 4.0, 10.0), case("no store", 1, 2.0, 100.0)]
    cluster.add_gains(cases)
    gains = [(case["throughput_gain"], case["latency_gain"]) for case in cases]
    assert gains == [(1.5, 2.0), (None, None), (1.0, 1.0)]
