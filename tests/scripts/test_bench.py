"""The benchmark program end to end at its smallest: what it prints is what each file's docstring promises."""

import importlib.util
import itertools

import pytest

from ccjax.cache import load_plan, reads
from ccjax.store import KVSpec
from scripts.benchmarks import decode, loading, peers, retrieval, retrieval_quality, store
from tests.scripts import in_process


def test_ttft_measures_the_default_in_every_state_of_the_store():
    states = ("empty", "alone", "prepared", "seen", "idle")
    options = ["--model", "demo", "--no-peers", "--repetitions", 1, "--context-tokens", 128, "--states", *states]
    options += ["--focus-window", 1]
    table, figures = in_process.figures("ttft", *options)
    assert {"benchmark", "date", "commit", "machine", "device", "python", "versions", "model"} <= figures.keys()
    assert figures["peers"] == figures["skipped"] == [] and figures["dtype"] == "float32"
    shares = {case["state"]: case["computed_share"] for case in figures["cases"] if case["focus_window"] is None}
    assert tuple(shares) == states and shares["empty"] == 1.0
    assert all(0.0 < share < 0.5 for state, share in shares.items() if state != "empty")
    (count,) = {case["context_tokens"] for case in figures["cases"]}
    assert 64 <= count <= 192 and all(case["runs_s"] == [case["ttft_s"]] for case in figures["cases"])
    assert any("default, empty" in line and "1.00x" in line for line in table)
    cut = [case for case in figures["cases"] if case["focus_window"] == 1]
    assert [case["state"] for case in cut] == [*states[1:]]
    (prepared,) = [case for case in cut if case["state"] == "prepared"]
    assert prepared["num_cut"] == 1 and prepared["computed_share"] < shares["prepared"], "the cut acts"


def test_peers_prefill_as_many_tokens_and_absent_ones_are_named(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "missing", lambda *packages: None)
    monkeypatch.setattr(peers, "full_prefill", lambda config: lambda count: asked.append(count) or 0.25)
    options = ["--model", "demo", "--repetitions", 1, "--context-tokens", 128, "--states", "empty"]
    _, figures = in_process.figures("ttft", *options)
    count = figures["cases"][0]["context_tokens"]
    assert asked == [count, count] and figures["skipped"] == ["llama.cpp: demo is no GGUF file"]
    assert figures["peers"] == [{"name": "transformers", "context_tokens": count, "ttft_s": 0.25, "runs_s": [0.25]}]
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert peers.missing("torch", "transformers") == "torch, transformers not installed"


def test_decode_counts_the_tokens_while_all_requests_are_decoded():
    lines, figures = in_process.figures("decode", "--model", "demo", "--requests", 1, 3)
    ways = ("default", "default, JSON schema", "int8")
    assert [(case["way"], case["requests"]) for case in figures["cases"]] == [*itertools.product(ways, (1, 3))]
    assert all(case["tokens_per_s"] > 0.0 and len(case["runs"]) == 1 for case in figures["cases"])
    (reason,) = figures["skipped"]
    assert reason.startswith("llama.cpp: ") and f"SKIPPED {reason}" in lines
    # From 2.0, the last one's first token, to 3.0, the first one's last: 3 of one answer and 2 of the other.
    assert decode.overlapping_rate([[1.0, 2.0, 2.25, 2.5, 3.0], [2.0, 2.5, 3.0, 3.5]]) == 5.0
    assert decode.overlapping_rate([[1.0, 2.0], [2.0, 3.0]]) == 0.0


@pytest.mark.slow
def test_store_opens_with_and_without_a_catalog_and_compares_the_disk_tier(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHAPES", {"small": (KVSpec(2, 2, 8, "bfloat16"), 16)})
    _, figures = in_process.figures("store", "--variants", 400, "--directory", tmp_path)
    assert [(case["catalog"], case["variants"]) for case in figures["cases"]] == [(False, 420), *[(True, 420)] * 2]
    times = ("open", "index", "plan_first", "plan_again", "refresh_unchanged", "refresh_changed", "tidy")
    assert all(case[f"{name}_s"] > 0 for case in figures["cases"] for name in times)
    (case,) = figures["disk"]
    for rates in (case["write"], case["cold_read"], case["warm_read"]):
        assert len(rates["tier_runs_s"]) == len(rates["plain_runs_s"]) == 2
        assert rates["ratio"] == pytest.approx(rates["tier_gb_per_s"] / rates["plain_gb_per_s"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_serve_measures_the_default_first_and_at_equal_load():
    """Servers are processes; their client is this one."""
    few = ["--rates", 4, "--requests", 3, "--concurrency", 2, "--strategies", "default", "--slo-s", 1e-3]
    lines, figures = in_process.figures("serve", "--model", "demo", *few)
    loads = [(case["strategy"], case["load"], case["rate"], case["concurrency"]) for case in figures["cases"]]
    assert loads == [("default", "closed", None, 2), ("default", "open", 4.0, None)]
    for case in figures["cases"]:
        assert (case["completed"], case["refused"], case["failed"], case["errors"]) == (3, 0, 0, [])
        assert case["output_throughput"] == pytest.approx(4 * case["request_throughput"])
        assert 0 < case["ttft_ms"]["p50"] <= case["ttft_ms"]["p99"] <= case["e2el_ms"]["p99"]
        assert case["request_goodput"] == 0.0 and not case["bounded"], "no first token within a millisecond"
        # Passages of a first prompt are prepared, and then a part of them is computed again.
        assert 0 < case["computed_share"] < 1.15 and case["rss_bytes"] > 1e8
    assert figures["rates"] == [4.0] and any("2 at a time" in line for line in lines)


@pytest.mark.slow
def test_serve_sustained_asks_for_known_passages_in_new_orders():
    few = ["--sustained", "--requests", 6, "--concurrency", 2, "--strategies", "default", "full"]
    _, figures = in_process.figures("serve", "--model", "demo", *few)
    assert [(case["strategy"], case["load"]) for case in figures["cases"]] == [
        ("default", "closed"),
        ("full", "closed"),
    ]
    shares = [case["computed_share"] for case in figures["cases"]]
    assert figures["sustained"] and shares[0] < 0.7 and shares[1] == 1.0, shares


@pytest.mark.slow
def test_serve_mixed_compares_short_and_long_prompts_with_each_alone():
    _, figures = in_process.figures("serve", "--model", "demo", "--mixed")
    cases = {case["prompts"]: case for case in figures["cases"]}
    assert list(cases) == ["short alone", "long alone", "long beside short", "short beside long"]
    assert all(0 < case["ttft_p50_ms"] <= case["ttft_p95_ms"] for case in figures["cases"])
    assert cases["short alone"]["prompt_tokens"] <= 300 < 600 < cases["long alone"]["prompt_tokens"]
    for kind, other in (("short", "long"), ("long", "short")):
        ratio = cases[f"{kind} beside {other}"]["ttft_p95_ms"] / cases[f"{kind} alone"]["ttft_p95_ms"]
        assert cases[f"{kind} beside {other}"]["of_alone"] == pytest.approx(ratio)
    assert figures["health"]["status"] == 400 and 0 < figures["health"]["beside_max_ms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "/no/such/folder"], ["musique_docs.jsonl", "/no/such/folder", "CCJAX_TEST_DATA"]),
        (["--requests", "700"], ["--requests: wanted at most 500 for 2 runs, got 700"]),
        (["--model", "demo", "--serve-args=--max-num-seqs 0"], ["the server did not start", "--max-num-seqs"]),
    ],
)
def test_bad_options_print_a_one_line_error(options, words):
    done = in_process.bench("serve", "--quick", *options)
    assert done.returncode == 1 and done.stdout == ""
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("bench.py serve: ")]
    assert all(word in error for word in words), error


@pytest.mark.parametrize("link", ["disk", "device"])
def test_loading_shows_what_each_way_hides(monkeypatch, link):
    """No load is late or too slow for what computing takes here."""
    monkeypatch.setattr(load_plan, "loads_to_give_up", lambda loads, hidden_s, habit: frozenset())
    monkeypatch.setattr(reads, "longest_load_wait_s", lambda num_tokens, seconds_per_token: 3600.0)
    _, figures = in_process.figures("loading", "--model", "demo", "--link", link)
    host, *others = figures["cases"]
    assert (host["tier"], host["loading"], host["load_s"]) == ("host", "layerwise", None)
    ways = list(loading.WAYS) if link == "disk" else [("layerwise", False)]
    assert figures["link"] == link and {row["tier"] for row in others} == {"disk" if link == "disk" else "host"}
    assert [(row["loading"], row["queue_s"] > 0) for row in others] == ways
    for row in others:
        assert row["hidden_share"] == 1 - (row["prefill_s"] - host["prefill_s"]) / row["load_s"]
        # The link is real: without time in the queue nothing is quicker than loading.
        assert row["queue_s"] or all(run_s > row["load_s"] for run_s in row["runs_s"])
        assert row["lost_loads"] == 0
    of = {(row["loading"], row["queue_s"] > 0): row["allowed_share"] for row in others}
    assert of.get(("sync", False), 0.0) == 0.0 < of["layerwise", False] < of.get(("layerwise", True), 1.0)


def test_loading_compares_requests_that_wait_with_copies_ahead_and_without(monkeypatch):
    monkeypatch.setattr(load_plan, "loads_to_give_up", lambda loads, hidden_s, habit: frozenset())
    _, figures = in_process.figures("loading", "--model", "demo", "--queued", 2)
    assert [row["is_preloaded"] for row in figures["queued"]] == [True, False] * 2
    assert len({row["link_bytes_per_s"] for row in figures["queued"]}) == 2 and "cases" not in figures
    for row in figures["queued"]:
        assert row["is_preloaded"] or row["preloaded_bytes"] == 0
        assert row["lost_loads"] == 0
        assert row["runs_s"] == [row["ttft_s"]] and row["ttft_s"] > row["prefill_s"] > row["wait_s"] >= 0.0


def test_least_exposed_time_is_equation_16_and_that_of_a_simulated_pipeline():
    # L = 5, Tprefill : Tload = 1 : 2 gives Lp = 3: of 2 s the first 3/5 must be there before.
    assert loading.least_exposed_s("layerwise", 5, 1.0, 2.0, 0.0) == pytest.approx(1.2)
    for queue_s, load_s in itertools.product((0.0, 0.5, 1.0, 5.0), (0.5, 1.0, 2.0, 4.0)):
        num_layers, clock = 16, 0.0
        for layer in range(num_layers):
            clock = max(clock, (layer + 1) * load_s / num_layers - queue_s) + 1.0 / num_layers
        found = loading.least_exposed_s("layerwise", num_layers, 1.0, load_s, queue_s)
        assert found == pytest.approx(clock - 1.0), (queue_s, load_s)
        assert loading.least_exposed_s("sync", num_layers, 1.0, load_s, queue_s) == max(0.0, load_s - queue_s)


def test_recognition_finds_all_known_text_in_its_prompts():
    out, figures = in_process.figures("recognition", "--chunks", "2000", "--prompts", "5")
    assert figures["found_share"] == 1.0 and any("100.0% of the known tokens" in line for line in out)
    assert 4.0 < figures["bytes_per_token"] < 8.0 and figures["chunks"] == 2000
    for name in ("find_ms", "cpu_ms", "repetitive_ms"):
        assert 0.0 < figures[name]["p50"] <= figures[name]["p95"] <= figures[name]["p99"]


@pytest.mark.slow
def test_retrieval_measures_search_changes_and_filters(test_data, monkeypatch):
    """Over few real texts, which take by far the longest to embed."""
    texts = retrieval._texts
    monkeypatch.setattr(retrieval, "_texts", lambda data, *counts: texts(data, 20, 8))
    _, figures = in_process.figures("retrieval", "--passages", "4000", "--data", test_data())
    assert figures["passages"] == 4000 and 0.8 < figures["recall_of_questions"] <= 1.0
    assert [case["per_mille"] for case in figures["filtered"]] == [1, 10, 100, 500]
    assert figures["changed"]["documents"] == 8
    assert 0.0 < figures["staged"]["mean_known_after_share"] <= 1.0
    for latency in (
        *(figures[kind] for kind in ("flat", "dense", "lexical", "hybrid", "changed")),
        *figures["filtered"],
    ):
        assert 0.0 < latency["p50_ms"] <= latency["p95_ms"]
    assert figures["bytes"]["sqlite"] > 4000 * 384 * 2  # vectors included


def test_retrieval_quality_scores_each_search_by_what_answers_need(tmp_path, monkeypatch):
    pages = [("Anna", "Anna sails on Monday."), ("Bob", "Bob is the brother of Anna."), ("Cy", "Cy bakes bread.")]

    def collections(*_):
        numbers = retrieval_quality._written(tmp_path / "pages", pages)
        by_name = {title: ((numbers[text], text),) for title, text in pages}
        asked = [
            retrieval_quality.Question("Who bakes bread?", (by_name["Cy"],)),
            retrieval_quality.Question("When does the sister of Bob sail?", (by_name["Anna"], by_name["Bob"])),
            retrieval_quality.Question("Who bakes bread?", (by_name["Anna"], (("corpus.jsonl/2", "cakes"),))),
        ]
        yield retrieval_quality.Collection("pages", tmp_path / "pages", asked)
        yield retrieval_quality._error_codes(tmp_path / "codes")
        paragraphs = [
            {"context": "月亮吸引海水。", "qas": [{"question": "月亮吸引什么？"}]},
            {"context": "蜜蜂在蜂巢里跳舞。", "qas": [{"question": "蜜蜂在哪里跳舞？"}]},
        ]
        file = {"data": [{"title": "Sea", "paragraphs": paragraphs}]}
        yield retrieval_quality._xquad(file, tmp_path / "zh", "zh", 2)

    monkeypatch.setattr(retrieval_quality, "_collections", collections)
    table, figures = in_process.figures("retrieval", "--quality", "--quick")
    own, codes, chinese = figures["quality"]
    assert (own["collection"], own["passages"], own["questions"], codes["passages"]) == ("pages", 3, 3, 40)
    for kind in ("hybrid", "dense", "lexical"):
        assert own[kind]["five"] == 2 and own[kind]["first"] >= 2, "the third question needs a text that no page has"
        assert codes[kind]["first"] <= codes[kind]["five"] <= 40
    assert codes["lexical"]["first"] >= 38 and codes["hybrid"]["five"] >= 38
    assert (chinese["collection"], chinese["passages"], chinese["lexical"]) == ("XQuAD zh", 2, {"first": 2, "five": 2})
    for name, module in (("bm25s", "bm25s"), ("haystack", "haystack")):
        is_installed = importlib.util.find_spec(module) is not None
        assert (own[name] is not None) == is_installed
        assert is_installed or any(f"{name}: skipped" in line for line in table)
    assert any("XQuAD: skipped de, es, ru, th, no" in line for line in table)
    assert figures["answers"] is None
