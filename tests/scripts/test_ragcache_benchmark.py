"""The RAGCache benchmark: what it counts and computes, by hand, its drawn vectors, its tree, and a real run."""

from __future__ import annotations

import argparse
import datetime
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.loading.model import load_model
from ccjax.requests import Delta, Request, Response
from ccjax.types import DocumentReuse, ReuseReport
from scripts.benchmarks import ragcache
from scripts.benchmarks import ragcache_order as order
from scripts.benchmarks import ragcache_policies as policies
from scripts.benchmarks import ragcache_replay as replay
from scripts.benchmarks import ragcache_report as report
from scripts.benchmarks import ragcache_scheduling as scheduling
from scripts.benchmarks import ragcache_speculation as speculation
from scripts.benchmarks.common import BenchmarkError, CallCost, _markers
from scripts.benchmarks.ragcache_corpus import ReplayCorpus, build, differences_to_nearest, draw_vectors
from scripts.benchmarks.serve_workload import WorkloadPassage, WorkloadQuestion
from tests.scripts import in_process
from tests.server.tiny_model import write_tiny_model


def tiny_data(folder: Path, num_passages: int) -> list[str]:
    """Options that name a trace of few passages, so that they recur, and a tiny model with their words."""
    draw = random.Random(0)
    texts = [
        {"id": n, "title": f"Town {n}", "text": f"Town {n} has {n + 3} bridges. " + "The river is wide. " * (n % 3 + 1)}
        for n in range(num_passages)
    ]
    rows = [{"i": n, "docs": draw.sample(range(num_passages), 3)} for n in range(40)]
    (folder / "data" / "rag_trace").mkdir(parents=True)
    for name, values in (("musique_docs", texts), ("musique_trace", rows)):
        (folder / "data" / "rag_trace" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, values)))
    write_tiny_model(folder / "tiny", [json.dumps(row) for row in texts])
    return ["--data", str(folder / "data"), "--model", str(folder / "tiny")]


# -- requests ----------------------------------------------------------------------------------------------------------


def reused(*documents: tuple[int, int, int]) -> ReuseReport:
    """The report of a prompt behind a reused system prompt; of each passage (reused, recomputed, computed) tokens."""
    rows = [
        DocumentReuse("instructions", None, 10, 10, 0, 0),
        *(DocumentReuse("passage", None, 9, *counts) for counts in documents),
    ]
    question = DocumentReuse("question", None, 5, 0, 0, 5)
    return ReuseReport("bounded", "prefix", 42, 0, 0, 0, 0.5, True, per_document=(*rows, question))


def test_hits_are_counted_as_in_the_paper():
    """Behind cached [D1, D2], [D1, D3] hits half. What was partly computed again is one; the system prompt is none."""
    assert replay.count_hits(reused((9, 0, 0), (0, 0, 9))) == (1, 2)
    assert replay.count_hits(reused((6, 3, 0), (0, 9, 0))) == (2, 2)
    assert replay.count_hits(reused()) == (0, 0)


def test_distinct_bytes_counts_each_passage_once(tmp_path):
    passages = [WorkloadPassage(n, f"Town {n}", f"It has {n} bridges.") for n in range(3)]
    write_tiny_model(tmp_path, [passage.text for passage in passages])
    model = load_model(tmp_path, dtype="float32")
    assert model.tokenizer is not None
    texts = [f"{passage.title}\n{passage.text}\n\n" for passage in passages]
    num_tokens = sum(len(model.tokenizer.encode(text, allow_special=False)) for text in texts)
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, their size, float32
    questions = [WorkloadQuestion("?", (passages[0], passages[1])), WorkloadQuestion("?", (passages[2], passages[0]))]
    assert replay.distinct_bytes(model, questions) == num_tokens * token_bytes


QUESTIONS = [
    WorkloadQuestion(f"What about {n}?", (WorkloadPassage(n, f"Town {n}", f"It has {n} bridges."),)) for n in range(6)
]


ANSWER = Delta("x", response=Response("x", (1,), "length", reused((9, 0, 0), (0, 0, 9)), 9, 0.0, 0.0))


class ScriptedEngine:
    """Answers each request on a thread of its own."""

    def __init__(self, error: Exception | None = None) -> None:
        self._event = error or ANSWER

    def submit(self, request: Request, emit: Any, *, on_start: Any = lambda: None) -> Any:
        threading.Thread(target=lambda: (on_start(), emit(self._event))).start()
        return lambda: None


class TimedEngine:
    """Answers when it is told to; time is its own, in which whoever uses `replay` sleeps, too.

    Args:
      slow_s: what handing a request in takes, and what an answer takes.
      last: with so many requests handed in, all are answered.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow_s: float, last: int) -> None:
        self.now_s, self.most_under_way = 100.0, 0
        self._slow_s, self._left, self._under_way = slow_s, last, []
        clock = argparse.Namespace(perf_counter=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(replay, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def submit(self, request: Request, emit: Any) -> Any:
        self.sleep(self._slow_s)
        self._left -= 1
        self._under_way.append(emit)
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        while self._left == 0 and self._under_way:
            self.answer()
        return lambda: None

    def answer(self) -> None:
        """Answers who waits longest."""
        self.sleep(self._slow_s)
        self._under_way.pop(0)(ANSWER)


def test_ttft_counts_from_the_planned_arrival(monkeypatch):
    engine = TimedEngine(monkeypatch, 0.25, 4)
    served = replay.open_loop(engine, QUESTIONS[:4], [0.0, 0.0, 0.0, 1.5])  # type: ignore[arg-type]
    # All are handed in by 1.75 s; then each answer takes a quarter of a second.
    assert [answer.ttft_s for answer in served] == [2.0, 2.25, 2.5, 1.25]
    assert [(answer.num_hits, answer.num_documents) for answer in served] == [(1, 2)] * 4


def test_closed_loop_keeps_the_set_number_of_requests_in_flight(monkeypatch):
    engine = TimedEngine(monkeypatch, 0.25, 6)

    class Free:
        """Who finds none free has the engine answer, instead of waiting."""

        def __init__(self, count: int) -> None:
            self._count = count

        def acquire(self, timeout: float) -> bool:
            if self._count == 0:
                engine.answer()
            self._count -= 1
            return self._count >= 0

        def release(self) -> None:
            self._count += 1

    monkeypatch.setattr(replay, "threading", argparse.Namespace(Semaphore=Free))
    rate = replay.closed_loop(engine, QUESTIONS, 3)  # type: ignore[arg-type]
    assert engine.most_under_way == 3 and rate == 6 / (12 * 0.25)


def test_a_failed_request_ends_the_run():
    engine = ScriptedEngine(error=RuntimeError("no device"))
    with pytest.raises(BenchmarkError, match="RuntimeError: no device"):
        replay.open_loop(engine, QUESTIONS[:2], [0.0, 0.0])  # type: ignore[arg-type]


def served(*ttfts_s: float, hits: int = 0) -> list[replay.Served]:
    return [replay.Served(seconds, hits, 2, 0.5) for seconds in ttfts_s]


def test_policy_figures_match_values_computed_by_hand():
    found = policies.figures({"pgdsf": served(0.1, 0.2, 0.3, hits=1), "lru": served(0.2, 0.4, 0.6)})
    own, other = found["pgdsf"], found["lru"]
    assert (own["hits"], own["documents"], own["hit_ratio"], own["ttft_over_pgdsf"]) == (3, 6, 0.5, None)
    assert own["ttft_ms"]["mean"] == pytest.approx(200.0)
    assert 100.0 <= own["ttft_ms"]["low"] < 200.0 < own["ttft_ms"]["high"] <= 300.0
    # In pairs every request takes twice as long, so chance has no part in it.
    assert other["ttft_over_pgdsf"] == pytest.approx({"mean": 2.0, "low": 2.0, "high": 2.0})


def test_policies_take_turns_at_every_request(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(policies, "ask", lambda engine, question: asked.append(engine))
    found = policies.in_turns({"a": "a", "b": "b"}, QUESTIONS[:3])  # type: ignore[dict-item]
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(answers) for name, answers in found.items()} == {"a": 3, "b": 3}


def test_order_gains_and_median_round():
    off, on = order.figures(served(0.2, 0.6, hits=1)), order.figures(served(0.1, 0.3))
    assert off["ttft_ms"]["mean"] == pytest.approx(400.0) and (off["hit_ratio"], on["hit_ratio"]) == (0.5, 0.0)
    assert order.gains(off, on) == pytest.approx({"mean_gain": 2.0, "p99_gain": 2.0})
    rounds = [{"mean_gain": gain, "number": number} for number, gain in enumerate((1.5, 0.9, 1.2, 3.0))]
    assert [order.median_round(rounds[:count])["number"] for count in (1, 2, 3, 4)] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("begun_s", "was_right", "wanted_s"), [([3.0], True, 3.0), ([9.0], True, 8.0), ([], True, 8.0), ([3.0], False, 8.0)]
)
def test_exposed_search_time_ends_when_the_right_answer_begins(begun_s, was_right, wanted_s):
    """It ends at 8 s, before or after that the answer leaves the queue."""
    assert speculation.exposed_until(begun_s, 8.0, was_right=was_right) == wanted_s


@pytest.mark.parametrize(
    ("lists", "wanted"),
    [(((1, 2), (2, 1), (1, 2), (1, 2)), (3.0, True)), (((1, 2), (2, 1)), (2.0, False)), (((1,),), (1.0, False))],
)
def test_result_is_known_from_when_the_list_stops_changing(lists, wanted):
    assert speculation.known_at([(float(number), ids) for number, ids in enumerate(lists, 1)]) == wanted


def test_only_the_start_of_the_last_submission_counts():
    begins: list[Any] = []
    engine = argparse.Namespace(submit=lambda request, emit, on_start: begins.append(on_start))
    starts, heard = speculation.Starts(engine), []  # type: ignore[arg-type]
    for name in ("first", "second"):
        starts.submit(replay.request_of("?", ()), print, on_start=lambda name=name: heard.append(name))
    begins[0]()
    assert starts.last == [] and heard == ["first"]
    begins[1]()
    assert len(starts.last) == 1 and heard == ["first", "second"]


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clustered(count: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """Vectors in groups of four, so that neighbours are much nearer than others."""
    centres = np.repeat(rng.standard_normal((count // 4, dim)), 4, axis=0)
    return unit(centres + 0.4 * rng.standard_normal((count, dim)))


def test_drawn_vectors_are_as_close_as_real_neighbours():
    rng = np.random.default_rng(0)
    real = clustered(400, 32, rng)
    drawn, parents = draw_vectors(real, differences_to_nearest(real), 4000, rng)
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), 1.0, rtol=1e-5)
    similar = real @ real.T
    np.fill_diagonal(similar, -1.0)
    wanted = np.quantile(similar.max(axis=1), (0.1, 0.5, 0.9))
    found = np.quantile((drawn * real[parents]).sum(axis=1), (0.1, 0.5, 0.9))
    np.testing.assert_allclose(found, wanted, atol=0.05)
    noise = unit(rng.standard_normal((4000, 32)))
    assert abs(np.median((noise * real[parents]).sum(axis=1)) - wanted[1]) > 0.3, "and not just anywhere"
    twice = unit(np.asarray([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]]))
    apart = np.linalg.norm(differences_to_nearest(twice), axis=1)
    np.testing.assert_allclose(apart, np.linalg.norm(twice[0] - twice[2]), rtol=1e-5, err_msg="duplicates do not count")


@pytest.fixture(scope="module")
def corpus() -> ReplayCorpus:
    real = clustered(64, 16, np.random.default_rng(1))
    passages = [WorkloadPassage(number, f"Town {number}", f"It has {number} bridges.") for number in range(64)]
    return build(passages, real, 3000, 8, seed=0)


def test_corpus_rows_map_to_passages(corpus):
    assert corpus.index.ntotal == len(corpus.topics) == 3000
    real, drawn = corpus.documents([5, 1000])
    assert (real.id, real.title) == ("5", "Town 5")
    parent = corpus.passages[corpus.topics[1000] % 64]
    assert drawn.id == "-1000" and drawn.text == parent.text and drawn.title == f"{parent.title} (1000)"


@pytest.mark.parametrize("num_stages", [1, 8])
def test_staged_search_starts_answers_early(corpus, num_stages):
    engine = ScriptedEngine()
    engine.batch_counts = argparse.Namespace(waiting=0)  # type: ignore[attr-defined]
    corpus.index.nprobe = 8
    corpus.index.make_direct_map()
    how = argparse.Namespace(passages=2), num_stages
    searched = speculation.search(engine, corpus, "?", corpus.index.reconstruct(3), *how)  # type: ignore
    assert searched.exposed_s <= searched.search_s and searched.ttft_s >= searched.search_s, (
        "nobody gets it before it is known to be right"
    )
    assert searched.was_right == searched.is_early == (num_stages > 1) == (searched.num_started > 0)
    assert (
        searched.known_s < searched.search_s
        if num_stages > 1
        else searched.exposed_s == searched.search_s == searched.known_s
    )


def test_search_figures_match_values_computed_by_hand():
    def searched(search_s, exposed_s, num_started, was_right, ttft_s):
        return speculation.Searched(search_s, exposed_s, exposed_s, was_right, num_started, was_right, ttft_s)

    off = [searched(0.2, 0.2, 0, False, 0.5), searched(0.4, 0.4, 0, False, 0.7)]
    on = [searched(0.3, 0.1, 2, True, 0.2), searched(0.5, 0.2, 1, False, 0.4)]
    found = speculation.figures(off, on)
    assert found["search_ms"]["mean"] == pytest.approx(300.0) and found["exposed_ms"]["mean"] == pytest.approx(150.0)
    assert found["gain"]["mean"] == pytest.approx(2.0), "against the baseline's search, not the slower staged one"
    assert found["wrong_per_request"] == 1.0 and found["right_share"] == found["known_early_share"] == 0.5
    assert found["ttft_gain"]["mean"] == pytest.approx(2.0) and found["staged_search_ms"] == pytest.approx(400.0)


@pytest.fixture(scope="module")
def tree():
    tree = scheduling.Tree(101, 2)
    yield tree
    tree.store.close()


def test_prefix_tree_stays_full_under_eviction(tree):
    assert len(tree.index) == 101
    known = {chunk.chunk_id for prompt in tree.prompts for chunk in prompt.chunks}
    kept = [[chunk.chunk_id in known for chunk in tree.drawn(number).chunks] for number in range(3)]
    assert kept == [[True, True, True], [True, True, False], [True, False, False]], "repeated, sharing a prefix, new"
    for number in range(12):
        prompt = tree.drawn(number)
        plan = tree.plan(prompt)
        tree.use(plan)
        tree.insert(prompt, plan)
        assert 98 <= len(tree.index) <= 101
        assert scheduling.computed_tokens(tree.plan(prompt)) == scheduling.QUESTION_TOKENS, "all of it is held now"
    held = {meta.variant_id for meta in tree.index}
    parents = {
        scheduling.make_variant_id(m.prefix_ids[-1], m.prefix_ids[:-1], "exact") for m in tree.index if m.prefix_ids
    }
    assert parents <= held, "only leaves were evicted"


def test_p99_of_a_sum_is_not_the_sum_of_p99s():
    costs = [[CallCost(1e-3 * (number == slow), 0.0) for number in range(4)] for slow in range(4)]
    rows = {row["part"]: row for row in scheduling.figures(scheduling.Spent(*costs, window=[CallCost(5.0, 0.0)] * 4))}
    assert rows["total"]["mean_ms"] == rows["total"]["p99_ms"] == pytest.approx(1.0)
    assert rows["plan"]["mean_ms"] == pytest.approx(0.25)


def case(policy: str, share: float, hits: int, low: float = 0.9, high: float = 1.1) -> dict[str, Any]:
    over = None if policy == "pgdsf" else {"mean": (low + high) / 2, "low": low, "high": high}
    return {"strategy": "prefix", "budget_share": share, "policy": policy, "hits": hits, "ttft_over_pgdsf": over}


def test_the_page_says_where_pgdsf_loses():
    others = ("lfu", "saved_seconds")
    cases = [case("pgdsf", 0.1, 10), case("gdsf", 0.1, 20, 0.8, 0.9), case("lru", 0.1, 5, 1.1, 1.3)]
    cases += [case(name, 0.1, 10, 0.95, 1.2) for name in others]
    cases += [case("pgdsf", 0.2, 30), case("gdsf", 0.2, 20), case("lru", 0.2, 30)] + [case(n, 0.2, 0) for n in others]
    most, hits, times = report.policy_lines(cases, "prefix")
    assert most == "prefix: no policy has more hits than PGDSF at 1 of 2 budgets."
    assert "0.50 to 1.50 times those of gdsf, paper 1.02 to 1.32; 1.00 to 2.00 times those of lru" in hits
    assert "1.00 to 1.00 times those of lfu" in hits
    assert "gdsf higher at 0, lower at 1; lru higher at 1, lower at 0; lfu higher at 0, lower at 0" in times


def test_the_page_says_which_targets_are_missed():
    line = report.order_line([{"mean_gain": gain} for gain in (0.9, 1.1, 1.2, 2.0)])
    assert "0.90 to 2.00 times lower" in line and "at least 1.2 times in 2 of 4 runs" in line
    cases = [{"search_ratio": ratio, "gain": {"mean": gain}} for ratio, gain in ((0.5, 1.4), (1.0, 3.9))]
    first, whole = report.speculation_lines(cases)
    assert "1.40 to 3.90 times" in first and "at 1 of 2 ratios" in first and "missed" in whole
    cases[1]["gain"]["mean"] = 4.0
    assert "reached" in report.speculation_lines(cases)[1]
    total = {"part": "total", "mean_ms": 0.99, "p99_ms": 3.0}
    assert ": on average below 1 ms" in report.scheduling_line([total])
    assert "not below 1 ms" in report.scheduling_line([{**total, "mean_ms": 1.0}])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model, a trace of few passages, so that they recur, and arrivals a second apart."""
    folder = tmp_path_factory.mktemp("ragcache")
    found = tiny_data(folder, 7)
    (folder / "data/arrivals").mkdir()
    start = datetime.datetime(2023, 11, 16, 18)
    stamps = [f"{start + datetime.timedelta(seconds=number)}.0000000,1,1" for number in range(60)]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]
    (folder / "data/arrivals/azure_2023_conv.csv").write_text("\n".join(lines))
    return [*found, "--max-model-len", "512"]


def test_real_run_covers_all_parts(options, tmp_path, monkeypatch):
    monkeypatch.setattr(ragcache, "cache_folder", lambda: tmp_path / "cache")
    page = tmp_path / "page.md"
    page.write_text("\n".join(f"## {name}\n{chr(10).join(_markers(report.part(name)))}" for name in ragcache.PARTS))
    more = ["--requests", "16", "--budgets", "0.3", "1", "--order-requests", "2", "--ratios", "1"]
    more += ["--embedded", "4", "--searches", "2", "--decisions", "5"]
    monkeypatch.setattr(replay, "PROFILED_CACHED", replay.PROFILED_CACHED[:2])
    monkeypatch.setattr(replay, "PROFILED_NEW", replay.PROFILED_NEW[:2])
    for module in (policies, report):
        monkeypatch.setattr(module, "POLICIES", ("pgdsf", "lru", "saved_seconds"))
    _, figures = in_process.figures("ragcache", *options, *more, "--markdown", page)
    rows = {(row["strategy"], row["budget_share"], row["policy"]): row for row in figures["policies"]["cases"]}
    assert list(rows) == [(s, b, p) for s in ("prefix", "cachecraft") for b in (0.3, 1.0) for p in policies.POLICIES]
    for row in rows.values():
        assert row["documents"] == 16 and row["hits"] == round(16 * row["hit_ratio"])
        assert 0 < row["ttft_ms"]["low"] <= row["ttft_ms"]["mean"] <= row["ttft_ms"]["high"]
    hits = {
        (strategy, share): sum(rows[strategy, share, policy]["hits"] for policy in policies.POLICIES)
        for strategy in ("prefix", "cachecraft")
        for share in (0.3, 1.0)
    }
    assert hits["cachecraft", 1.0] > hits["prefix", 1.0] > 0, "behind other passages a prefix is another one"
    assert all(hits[strategy, 0.3] < hits[strategy, 1.0] for strategy in ("prefix", "cachecraft"))
    cases = figures["order"]["cases"]
    assert [row["workload"] for row in cases] == ["trace"] * 2 + ["drawn"] * 2
    for row in cases:
        assert row["rate"] == pytest.approx(1.1 * row["saturation"])
        assert row["mean_gain"] == pytest.approx(row["off"]["ttft_ms"]["mean"] / row["on"]["ttft_ms"]["mean"])
        assert len(row["mean_gains"]) == 2 and row["mean_gain"] == min(row["mean_gains"])
    assert figures["speculation"]["vectors"] == 4000
    (searched,) = figures["speculation"]["cases"]
    assert searched["num_probes"] == 16 and 0 <= searched["known_early_share"] <= 1
    assert searched["gain"]["mean"] == pytest.approx(searched["search_ms"]["mean"] / searched["exposed_ms"]["mean"])
    assert [row["part"] for row in figures["scheduling"]["cases"]][-2:] == ["total", "window"]
    assert figures["scheduling"]["nodes"] == 300 and len(figures["profile"]["seconds"]) > 1
    text = page.read_text()
    assert text.count("\n## ") == 3 and text.count("jax ") == 4 and text.count("\n|---|") == 6


def test_only_option_runs_a_single_part():
    _, figures = in_process.figures("ragcache", "--only", "scheduling", "--data", "/no/such/folder", "--nodes", 50)
    assert "scheduling" in figures and not {"policies", "order", "speculation"} & figures.keys()
