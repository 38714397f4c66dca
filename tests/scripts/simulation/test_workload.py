"""Arrivals and passages, drawn and read."""

import json

import numpy as np
import pytest

from scripts.simulation import workload as made


def test_poisson_arrivals_have_their_rate_and_spread():
    gaps = np.diff(made.poisson(20_000, 4.0, seed=1))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_zipf_lists_are_skewed_and_have_distinct_passages():
    lists = made.zipf_lists(1000, 3000, 3, [7, 9], exponent=1.0, seed=2)
    assert all(len(set(passages.numbers)) == 3 for passages in lists)
    numbers = np.concatenate([passages.numbers for passages in lists])
    share = (numbers < 30).mean()  # 3 % of the passages
    flat = made.zipf_lists(1000, 3000, 3, [7, 9], exponent=0.0, seed=2)
    assert share > 0.45 and (np.concatenate([passages.numbers for passages in flat]) < 30).mean() < 0.05
    lengths = {}
    for passages in lists:
        for number, tokens in zip(passages.numbers, passages.num_tokens, strict=True):
            assert lengths.setdefault(number, tokens) == tokens
    with pytest.raises(ValueError, match="top_k"):
        made.zipf_lists(2, 1, 3, [1], exponent=1.0, seed=0)


def test_trace_is_parsed(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"docs": docs}) + "\n" for docs in ([5, 3, 5, 1], [2])))
    assert made.trace_lists(path, {5: 50, 3: 30, 2: 20}, 2) == [
        made.Passages((5, 3), (50, 30)),
        made.Passages((2,), (20,)),
    ]
    assert made.trace_lists(path, [10, 11], 3)[0].num_tokens == (11, 11, 11)
    with pytest.raises(ValueError, match="passage 3"):
        made.trace_lists(path, {5: 1, 2: 1}, 2)
    path.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="'docs' in line 1"):
        made.trace_lists(path, [1], 1)


def test_recorded_arrivals_are_parsed(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805900,1,0\n"
    )
    times, answers = made.recorded(azure)
    assert times.tolist() == pytest.approx([0.0, 0.5]) and answers.tolist() == [44, 1]
    mooncake = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": 1500, "output_length": 5}, {"timestamp": 500, "output_length": 9}]
    mooncake.write_text("".join(json.dumps(row) + "\n" for row in rows))
    times, answers = made.recorded(mooncake)
    assert times.tolist() == [0.0, 1.0] and answers.tolist() == [9, 5]
    azure.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="Azure"):
        made.recorded(azure)


def test_arrivals_repeat_and_stretch():
    times = made.in_turn(5, np.array([0.0, 1.0]))
    assert times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    lists = made.zipf_lists(5, 2, 1, [10], exponent=0.5, seed=0)
    work = made.Workload(times, np.zeros(5, int), lists, 3, np.ones(5, int))
    assert work.at_rate(10.0).arrival_s[-1] == pytest.approx(0.5)


def test_passage_lists_are_used_in_order_or_drawn_from_zipf():
    assert made.draw_which(5, 3, exponent=None, seed=0).tolist() == [0, 1, 2, 0, 1]
    drawn = made.draw_which(5000, 50, exponent=1.0, seed=0)
    assert (drawn == 0).mean() > 4 * (drawn == 20).mean() and drawn.max() < 50


def test_warmup_requests_can_be_spaced_out():
    arrivals = np.asarray([0.5, 1.0, 1.5, 4.0, 4.5])
    workload = made.Workload(arrivals, np.zeros(5, int), [made.Passages((0,), (8,))], 4, np.ones(5, int), 0)
    assert workload.unhurried(2, 60.0).arrival_s.tolist() == [0.0, 60.0, 120.0, 122.5, 123.0]
    assert workload.unhurried(5, 60.0).arrival_s.tolist() == [0.0, 60.0, 120.0, 180.0, 240.0]
    assert workload.unhurried(0, 60.0).arrival_s.tolist() == [0.0, 0.5, 1.0, 3.5, 4.0]
