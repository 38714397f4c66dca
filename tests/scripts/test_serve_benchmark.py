"""The serving benchmark: its workload and arrivals, its figures by hand, and a real run."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.cli.options import part
from ccjax.cli.serving.options import engine_settings, serve_options
from ccjax.server import ServerSettings, Service
from ccjax.server.loading import load_engine
from scripts.benchmarks import serve, serve_report, serve_soak
from scripts.benchmarks import serve_workload as workload
from scripts.benchmarks.common import BenchmarkError
from scripts.benchmarks.serve_client import RequestRecord
from scripts.benchmarks.serve_figures import figures, is_bounded
from scripts.benchmarks.serve_soak import changed_answers, lost_pages, trend
from tests.data import data_path
from tests.scripts import in_process
from tests.server.conftest import running
from tests.server.tiny_model import write_tiny_model

# -- arrivals ----------------------------------------------------------------------------------------------------------


def test_recorded_arrivals_keep_their_shape(tmp_path):
    folder = tmp_path / "arrivals"
    folder.mkdir()
    stamps = ("15:46.6000000", "15:47.6000000", "15:47.6000000", "15:50.6000005", "15:50.7000000")
    lines = [f"2023-11-16 18:{stamp},374,44" for stamp in stamps]
    (folder / "azure_2023_conv.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    rows = [json.dumps({"timestamp": ms, "input_length": 1, "output_length": 1}) for ms in (0, 3000, 3000, 9000)]
    (folder / "mooncake_conversation.jsonl").write_text("\n".join(rows))
    gaps = workload.recorded_gaps(tmp_path, "azure", 3, 0)
    np.testing.assert_allclose(gaps, np.asarray([1.0, 0.0, 3.0]) * 3 / 4, atol=1e-6)
    np.testing.assert_allclose(workload.recorded_gaps(tmp_path, "azure", 2, 2), np.asarray([3.0, 0.1]) * 2 / 3.1, 1e-4)
    np.testing.assert_allclose(workload.recorded_gaps(tmp_path, "mooncake", 3, 0), [1.0, 0.0, 2.0])
    with pytest.raises(BenchmarkError, match="requests: wanted at most 2 from arrival 2 on, got 3"):
        workload.recorded_gaps(tmp_path, "azure", 3, 2)
    with pytest.raises(BenchmarkError, match="wanted some time between 1 arrivals of mooncake"):
        workload.recorded_gaps(tmp_path, "mooncake", 1, 1)


def write_trace(data: Path, docs: list[list[int]]) -> Path:
    """A folder in the shape of the real one: every passage a sentence of its own."""
    (data / "rag_trace").mkdir(parents=True)
    texts = [
        {"id": n, "title": f"Town {n}", "text": f"Town {n} has {n + 3} bridges. " + "The river is wide. " * (n % 3 + 1)}
        for n in range(max(max(row) for row in docs) + 1)
    ]
    rows = [{"i": n, "docs": row} for n, row in enumerate(docs)]
    for name, values in (("musique_docs", texts), ("musique_trace", rows)):
        (data / "rag_trace" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, values)))
    return data


def test_history_selects_requests_sharing_passages_with_the_window(tmp_path):
    docs = [[0, 1], [2, 3], [1, 4], [5, 6], [7, 0], [8, 9], [0, 5], [9, 2]]
    trace = workload.load_trace(write_trace(tmp_path, docs), 2)
    assert trace[0].text == "What do the passages say about Town 0?"

    def found(most, *, is_prefix):
        past = workload.history(trace, 6, 8, most, is_prefix=is_prefix)
        return [trace.index(question) for question in past]

    assert found(9, is_prefix=False) == [0, 1, 3, 4, 5]  # passages 0, 5, 9 and 2; [1, 4] shares none
    assert found(2, is_prefix=False) == [4, 5]
    assert found(9, is_prefix=True) == [0]  # 0 or 9 in front
    assert found(0, is_prefix=False) == []
    cut = workload.load_trace(tmp_path, 1)
    assert [passage.id for passage in cut[3].passages] == [5]


def test_precomputed_passages_are_requested_one_by_one_without_repeats(tmp_path):
    docs = [[8, 9], [0, 1], [2, 0], [1, 3], [4, 5]]
    trace = workload.load_trace(write_trace(tmp_path, docs), 2)
    found = workload.one_by_one(trace, 1, 4)
    assert [[passage.id for passage in question.passages] for question in found] == [[0], [1], [2], [3]]
    assert found[1].text == "What does the passage say about Town 1?"
    assert found[1].body(max_tokens=1)["documents"] == [trace[1].body(max_tokens=1)["documents"][1]]


def test_windows_end_with_the_trace_and_never_overlap():
    assert workload.windows(10, 3, 2) == [range(4, 6), range(6, 8), range(8, 10)]
    with pytest.raises(BenchmarkError, match="requests: wanted at most 3 a run .*3 runs.* got 4"):
        workload.windows(11, 3, 4)


def test_real_traces_are_loaded_completely():
    data = data_path("rag_trace").parent
    trace = workload.load_trace(data, 5)
    assert len(trace) == 1000 and all(len(question.passages) == 5 for question in trace)
    assert sum(not question.text.startswith("What do the passages say about") for question in trace) == 362
    body = trace[0].body(max_tokens=7)
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (7, True, True)
    assert [document["title"] for document in body["documents"]][0] == "FC Barcelona"


def answered(number: int, at: float, text_s: list[float], end_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(number, at, at, text_s, end_s, "ok", None, str(number), 100, tokens, 40.0)


def test_figures_match_values_computed_by_hand():
    records = [
        answered(0, 1.0, [2.0, 2.5, 3.5], 3.5, 3),
        answered(1, 2.0, [5.0, 5.25], 6.0, 3),  # two tokens came in one piece
        RequestRecord(2, 2.5, 2.5, [], 3.0, "refused", "HTTP 429"),
        RequestRecord(3, 3.0, 3.5, [4.0, 4.1], 11.0, "failed", "broken"),
    ]
    before = {"ccjax_request_queue_time_seconds_sum": 10.0, "ccjax_request_queue_time_seconds_count": 4.0}
    after = {"ccjax_request_queue_time_seconds_sum": 13.0, "ccjax_request_queue_time_seconds_count": 6.0}
    after |= {"ccjax_compilations_total": 7.0, "process_resident_memory_bytes": 5e8}
    row = figures(records, 1.5, {**before, "ccjax_compilations_total": 5.0}, after)
    assert (row["completed"], row["refused"], row["failed"], row["duration_s"]) == (2, 1, 1, 10.0)
    rates = [row[key] for key in ("request_throughput", "output_throughput", "request_goodput")]
    assert rates == pytest.approx([0.2, 0.6, 0.1])
    assert row["ttft_ms"]["mean"] == 2000.0 and row["ttft_ms"]["p50"] == 2000.0
    assert row["itl_ms"]["mean"] == pytest.approx((500 + 1000 + 250) / 3)
    assert row["tpot_ms"]["mean"] == pytest.approx((750 + 125) / 2)
    assert row["e2el_ms"]["mean"] == 3250.0 and row["queue_ms"] == 1500.0
    assert (row["computed_share"], row["compilations"], row["rss_bytes"]) == (0.4, 2.0, 5e8)
    assert row["send_lag_ms"]["mean"] == 125.0 and row["errors"] == ["HTTP 429", "broken"]
    assert not is_bounded(row, 100.0), "somebody got no answer"
    whole = figures(records[:2], 1.5, {}, {})
    assert whole["queue_ms"] is None and whole["rss_bytes"] is None
    assert is_bounded(whole, 3.0) and not is_bounded(whole, 2.9)
    nothing = figures(records[2:], 1.5, {}, {})
    assert nothing["request_throughput"] == 0.0 and nothing["ttft_ms"]["p99"] is None and not is_bounded(nothing, 9.0)


def test_comparison_with_the_paper_is_reported():
    def row(strategy, rate, bounded, throughput, latency, p99):
        times = {"e2el_ms": {"mean": latency}, "ttft_ms": {"p99": p99}}
        return {"strategy": strategy, "load": "open", "rate": rate, "bounded": bounded, "completed": 9,
                "request_throughput": throughput, **times}  # fmt: skip

    rows = [row("prefix", 1.0, True, 1.0, 500, 900), row("cachecraft", 1.0, True, 1.0, 400, 700)]
    assert serve_report.compare(rows) is None and "nothing to compare" in serve_report.line(None)
    rows += [row("prefix", 4.0, False, 1.1, 9e3, 2e4), row("cachecraft", 4.0, False, 1.9, 3e3, 1e4)]
    rows += [row("prefix", 2.0, False, 1.2, 6000, 9000), row("cachecraft", 2.0, True, 1.8, 2000, 1800)]
    found = serve_report.compare(rows)
    wanted = {"rate": 2.0, "throughput": 1.5, "latency": 3.0, "p99_ttft": 5.0}
    assert found == pytest.approx(wanted)
    text = serve_report.line(found)
    assert "at 2 requests a second, where prefix saturates, cachecraft has 1.50x the throughput (paper 1.6x)" in text
    assert "3.00x lower mean latency (paper 2.1x), 5.00x lower p99 TTFT (paper 3x)" in text
    assert serve_report.compare(rows[:1] + rows[2:3]) is None


def test_memory_is_judged_once_the_store_is_full():
    filling = [(float(n), 1e9 + min(n, 8) * 1e8, 40.0 + min(n, 6)) for n in range(16)]
    assert trend(filling) == {"rss_growth_bytes": 0.0, "rss_max_bytes": 1.8e9, "late_compilations": 0.0}
    leaking = [(float(n), 1e9 + n * 1e6, float(n)) for n in range(16)]
    assert trend(leaking) == {"rss_growth_bytes": 4e6, "rss_max_bytes": 1.015e9, "late_compilations": 7.0}
    assert trend(filling[:3])["rss_growth_bytes"] is None


def test_changed_answers_and_lost_pages_are_counted():
    name = "ccjax_kv_cache_usage_perc"
    assert lost_pages({name: 0.0}, {name: 0.0}) == []
    assert lost_pages({name: 0.0}, {name: 0.25}) == [f"{name}: wanted 0 as before the first request, got 0.25"]
    records = [answered(number, 0.0, [1.0], 1.0, 1) for number in range(6)]
    for record, text in zip(records, ("a", "b", "a", "c", "a", "b"), strict=True):
        record.text = text
    assert changed_answers(records, 2) == 1 and changed_answers(records, 6) == 0
    records[3].status = "failed"
    assert changed_answers(records, 2) == 0


@contextlib.contextmanager
def serving_here(flags: Sequence[str], on_progress: Any = None) -> Iterator[str]:
    """`serve_server.serving` with the server on a thread of this process."""
    args = serve_options(flags)
    service = Service(part(args, ServerSettings))
    with running(service) as url:
        service.open(load_engine(args.model, engine_settings(args), lambda stage, done, total: None), None)
        yield url


@pytest.fixture
def servers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All servers are on threads of this process."""
    monkeypatch.setattr(serve, "serving", serving_here)
    monkeypatch.setattr(serve_soak, "serving", serving_here)


@pytest.fixture(scope="module")
def tiny_bench(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a run against `scripts/serve.py` with a tiny model and a small trace: soon all seven passages are
    stored, but seldom in the order asked for."""
    return tiny_options(tmp_path_factory.mktemp("serve"), num_passages=7)


def tiny_data(folder: Path, num_passages: int) -> list[str]:
    """Options that name a trace of few passages, so that they recur, and a tiny model with their words."""
    draw = random.Random(0)
    data = write_trace(folder / "data", [draw.sample(range(num_passages), 3) for _ in range(40)])
    write_tiny_model(folder / "tiny", (data / "rag_trace/musique_docs.jsonl").read_text().splitlines())
    return ["--data", str(data), "--model", str(folder / "tiny")]


def tiny_options(folder: Path, num_passages: int) -> list[str]:
    serve_args = f"--no-warmup --compile-cache-dir {folder / 'compiled'}"
    return [*tiny_data(folder, num_passages), "--serve-args", serve_args]


def test_real_run_compares_two_strategies(tiny_bench, monkeypatch):
    """The first server is a process of its own."""
    servers = iter([serve.serving, serving_here])
    monkeypatch.setattr(serve, "serving", lambda *given: next(servers)(*given))
    options = ["--rates", 4, 200, "--requests", 3, "--slo-s", 0.001]
    lines, figures = in_process.figures("serve", *tiny_bench, *options)
    loads = [(case["strategy"], case["load"], case["rate"]) for case in figures["cases"]]
    rates = [("closed", None), ("open", 4.0), ("open", 200.0)]
    assert loads == [(strategy, *load) for strategy in ("prefix", "cachecraft") for load in rates]
    for case in figures["cases"]:
        assert (case["completed"], case["refused"], case["failed"], case["errors"]) == (3, 0, 0, [])
        assert case["output_throughput"] == pytest.approx(4 * case["request_throughput"])
        assert 0 < case["ttft_ms"]["p50"] <= case["ttft_ms"]["p99"] <= case["e2el_ms"]["p99"]
        assert case["itl_ms"]["p50"] > 0 and case["queue_ms"] > 0 and case["rss_bytes"] > 1e8
        assert case["request_goodput"] == 0.0 and not case["bounded"], "no first token within a millisecond"
        assert 0 < case["computed_share"] < 1
    assert sum(case["compilations"] for case in figures["cases"]) > 0
    shares = {name: [c["computed_share"] for c in figures["cases"] if c["strategy"] == name] for name, *_ in loads}
    assert sum(shares["cachecraft"]) < sum(shares["prefix"])
    assert figures["comparison"]["rate"] == 4.0
    assert any("where prefix saturates, cachecraft has" in line for line in lines)


def test_precompute_lowers_the_ratio_computed_by_cachecraft(tmp_path, servers_here):
    """Of 80 passages few come twice: what is reused without it was asked for by chance."""
    options = tiny_options(tmp_path, num_passages=80)
    shares = {}
    for more in ([], ["--precompute"]):
        few = ["--history", 0, "--rates", 4, "--requests", 3]
        _, figures = in_process.figures("serve", *options, *few, *more)
        assert figures["shapes"]["precompute"] == bool(more)
        for case in figures["cases"]:
            shares[case["strategy"], case["load"], bool(more)] = case["computed_share"]
    assert shares["cachecraft", "closed", True] < min(0.5, shares["cachecraft", "closed", False] - 0.2)
    assert shares["prefix", "closed", True] < shares["prefix", "closed", False]


def test_soak_run_checks_that_every_answer_is_complete(tiny_bench, servers_here):
    _, figures = in_process.figures("serve", *tiny_bench, "--soak", "inf", "--requests", 30, "--concurrency", 4)
    (case,) = figures["cases"]
    assert (case["strategy"], case["load"], case["completed"]) == ("cachecraft", "soak", 30)
    assert figures["failures"] == [] and figures["samples"] and case["compilations"] >= 0
    assert case["page_usage"] == [0.0, 0.0]
    late = ["--soak", "inf", "--requests", 2, "--timeout-s", 0.001]
    done = in_process.bench("serve", "--quick", "--json", *tiny_bench, *late)
    assert done.returncode == 1 and "2 of 2 answers were incomplete: TimeoutError" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["failures"]


@pytest.mark.slow
def test_server_start_failure_is_reported_with_the_reason(tiny_bench):
    done = in_process.bench("serve", "--quick", "--json", *tiny_bench, "--serve-args=--alpha -1")
    assert done.returncode == 1 and "the server did not start" in done.stderr and "--alpha" in done.stderr


def test_a_server_that_fails_without_load_is_not_measured(tiny_bench, servers_here):
    done = in_process.bench("serve", "--quick", "--json", *tiny_bench, "--timeout-s", "0.001")
    assert done.returncode == 1 and done.stdout == "" and "prefix: 12 requests failed before any load" in done.stderr
