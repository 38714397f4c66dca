"""The replay of retrieval traces: its hits against independent counts and the real engine, sizing by hand, a run."""

from __future__ import annotations

import collections
import json
import random

import pytest

from ccjax.engine import Engine
from ccjax.models.llama3.config import LLAMA3_8B
from ccjax.requests import Request, SamplingParams
from ccjax.types import Document
from scripts.benchmarks.trace import prefill_grid, replicas_for
from scripts.benchmarks.trace_replay import KV_SPEC, Replay
from tests.scripts import in_process
from tests.server.tiny_model import write_tiny_model

GRID = prefill_grid(LLAMA3_8B, 4.9e14)


def test_replicas_match_the_queue_worked_out_by_hand():
    """E[S] = 2 and E[S^2] = 5: with three replicas each waits 5/3 / (2 (1 - 2/3)) = 2.5 s and takes 2 s."""
    assert replicas_for([1.0, 3.0], 1.0, 4.5) == 3
    assert replicas_for([1.0, 3.0], 1.0, 4.49) == 4
    assert replicas_for([1.0, 3.0], 1.0, 2.0) is None, "a request takes as long without any wait"
    assert replicas_for([0.01], 0.1, 1.0) == 1


def test_prefill_takes_the_seconds_of_its_flops():
    """8B: 6.98e9 weights in the layers: 28 us a token at half an H100's peak, and 9 us more behind 8,192 others."""
    assert GRID.prefill_s(0, 1) == pytest.approx(2 * 6.979e9 / 4.9e14, rel=1e-3)
    pairs = 4 * 32 * 4096 * 8192
    assert GRID.prefill_s(8192, 1) - GRID.prefill_s(0, 1) == pytest.approx(pairs / 4.9e14, rel=1e-3)


def requests(count: int, passages: int, seed: int) -> list[list[tuple[int, int]]]:
    draw = random.Random(seed)
    numbers = [draw.sample(range(12), passages) for _ in range(count)]
    return [[(number, 10 + number) for number in each] for each in numbers]


def test_a_passage_is_a_hit_behind_the_same_passages_if_everything_is_kept():
    asked, seen, replay = requests(80, 3, 0), set(), Replay("prefix", "lru", 10**6, grid=GRID)
    for passages in asked:
        prefixes = [tuple(passages[: place + 1]) for place in range(3)]
        wanted = sum(prefix in seen for prefix in prefixes)
        served = replay.answer(passages)
        assert served.hits == wanted
        assert served.computed == 32 + sum(n for _, n in passages[wanted:]) + 32 * (not seen)
        seen.update(prefixes)
    assert len(replay.index) == 1 + len(seen)
    replay.store.close()


@pytest.mark.parametrize("budget", [100, 160])
def test_least_recently_used_passages_are_evicted(budget):
    held: collections.OrderedDict[int, int] = collections.OrderedDict()
    replay, hits = Replay("prefix", "lru", 32 + budget, grid=GRID), 0
    for [(number, size)] in requests(200, 1, 1):
        is_hit = held.pop(number, None) is not None
        while sum(held.values()) + size > budget:
            held.popitem(last=False)
        held[number] = size
        assert replay.answer([(number, size)]).hits == is_hit
        hits += is_hit
    assert 0 < hits < 190 and replay.store.usage()["host"].used_bytes <= KV_SPEC.num_bytes(32 + budget)
    replay.store.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    texts = [f"Town {n} has {n + 3} bridges. " + "The river is wide. " * (n % 5 + 1) for n in range(12)]
    write_tiny_model(folder, texts)
    return folder, texts


@pytest.mark.parametrize("budget", [1 << 30, 60_000], ids=["everything is kept", "some is evicted"])
@pytest.mark.parametrize("strategy", ["prefix", "cachecraft", "auto"])
def test_a_replay_computes_as_many_tokens_as_the_engine(model, strategy, budget):
    folder, texts = model
    lists = [[number for number, _ in passages] for passages in requests(40, 3, 0)]
    ratio = 0.3 if strategy == "cachecraft" else None
    settings = {"strategy": strategy, "eviction_policy": "lru", "host_cache_bytes": budget, "recompute_ratio": ratio}
    settings["frame"] = "none"  # a replay prepares nothing
    with Engine.from_pretrained(str(folder), focus_window=None, max_model_len=512, **settings) as engine:
        one_token = SamplingParams(max_new_tokens=1, ignore_eos=True)
        question = [{"role": "user", "content": "Who?"}]
        asked = [tuple(Document(texts[number]) for number in numbers) for numbers in lists]
        reports = [engine.run(Request(messages=question, documents=each, sampling=one_token)).reuse for each in asked]
    real = [report.computed_tokens + report.recomputed_tokens for report in reports]

    lengths = [[part.num_tokens for part in report.per_document if part.role == "passage"] for report in reports]
    system = reports[0].per_document[0].num_tokens
    fixed = {"system_tokens": system, "question_tokens": reports[0].prompt_tokens - system - sum(lengths[0])}
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, their size, float32
    replay = Replay(strategy, "lru", budget // token_bytes, grid=GRID, recompute_ratio=ratio, **fixed)
    pairs = [list(zip(numbers, tokens, strict=True)) for numbers, tokens in zip(lists, lengths, strict=True)]
    served = [replay.answer(passages) for passages in pairs]
    replay.store.close()

    assert [one.computed + one.reused for one in served] == [report.prompt_tokens for report in reports]
    assert sum(real) < 0.7 * sum(report.prompt_tokens for report in reports)
    if budget > 60_000:
        assert [one.computed for one in served] == real
    else:  # which of two variants goes first may differ
        assert sum(one.computed for one in served) == pytest.approx(sum(real), rel=0.03)


def test_bench_replays_a_trace_with_texts_of_known_length(tmp_path):
    docs = [{"id": n, "title": f"Town {n}", "text": "bridges " * (n + 1)} for n in range(4)]
    rows = [{"docs": [0, 1, 0]}, {"docs": [2, 3]}, {"docs": [0, 1]}, {"docs": [3, 2]}]
    write_tiny_model(tmp_path / "tokenizer_llama3", [row["text"] for row in docs])
    for name, values in (("docs", docs), ("trace", rows)):
        (tmp_path / f"our_{name}.jsonl").write_text("\n".join(map(json.dumps, values)))
    options = ["--data", tmp_path, "--trace", tmp_path / "our_trace.jsonl", "--budgets", 2, "--policies", "lru"]
    table, figures = in_process.figures("trace", *options, "--strategies", "prefix", "reuse")
    hits = {case["strategy"]: (case["hits"], case["documents"]) for case in figures["cases"]}
    assert hits == {"prefix": (2, 4), "reuse": (4, 4)}
    (reuse,) = (case for case in figures["cases"] if case["strategy"] == "reuse")
    assert figures["full"]["prompt_tokens"] == 2 * 64 + figures["shapes"]["distinct_tokens"]
    assert reuse["computed_tokens"] == 2 * 32, "the questions; all else is held"
    assert any("prefix" in line for line in table)


def test_bench_draws_popular_passages_and_names_bad_options():
    options = ["--drawn", 40, "--requests", 400, "--budgets", 0.5, "--policies", "lru", "--strategies", "prefix"]
    shares = [in_process.figures("trace", *options, "--zipf", zipf)[1]["cases"][0]["hit_ratio"] for zipf in (0, 1.2)]
    assert shares[0] < 0.5 * shares[1]
    for bad, word in ((["--drawn", 2], "--passages"), (["--model", "x"], "llama3-8b"), (["--trace", "/no"], "/no")):
        done = in_process.bench("trace", "--quick", *bad)
        assert done.returncode == 1 and word in done.stderr and done.stderr.startswith("bench.py trace: ")
