"""The load generator against a real server that streams by a script: what it measures, what it counts as a failure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import pytest

from scripts.benchmarks.serve_client import closed_loop, open_loop
from scripts.benchmarks.serve_figures import itl_s, ttft_s
from tests.scripts.scripted_server import Scripted, body, scripted_server

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server() as running:
        yield running


def test_ttft_and_itl_are_what_was_scripted(server: Scripted) -> None:
    """The role comes at once and does not count. The server's own clock tells what it really did on a busy machine."""
    bodies = [body(number, 5, first_s=0.3, gap_s=0.1) for number in range(4)]
    records = open_loop(server.url, bodies, [0.0, 0.05, 0.1, 0.15], TIMEOUT_S)
    assert [record.status for record in records] == ["ok"] * 4
    lags = []
    for record in records:
        number, sent = record.number, server.sent_s[record.number]
        assert record.text == f"{number}." * 5 and len(record.text_s) == 5
        assert ttft_s(record) >= 0.3 and record.end_s >= record.text_s[-1]
        lags.append(ttft_s(record) - (sent[0] - server.came_s[number]) - (record.sent_s - record.scheduled_s))
        lags += [seen - done for seen, done in zip(itl_s(record), map(_gap, itertools.pairwise(sent)), strict=True)]
        assert record.text_s[-1] - record.text_s[0] == pytest.approx(sent[-1] - sent[0], abs=0.5)
        assert (record.prompt_tokens, record.completion_tokens, record.computed_tokens) == (40, 5, 10.0)
    assert abs(statistics.median(lags)) < 0.03  # a third of the gap between two tokens


def _gap(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


def test_the_open_loop_does_not_wait_for_answers(server: Scripted) -> None:
    """Twelve requests arrive within 0.6 s at a server that takes 2 s for each: all of them are under way at once."""
    times = [0.05 * number for number in range(12)]
    server.most_at_once = 0
    records = open_loop(server.url, [body(n, first_s=2.0) for n in range(12)], times, TIMEOUT_S)
    assert server.most_at_once == 12
    came = [server.came_s[number] - server.came_s[0] for number in range(12)]
    assert max(came) < 2.0  # the last one came before the first one was answered
    for record, at in zip(records, times, strict=True):
        assert record.scheduled_s == at and 0.0 <= record.sent_s - at < 1.0
        assert ttft_s(record) >= 2.0


def test_latencies_count_from_the_time_that_was_planned(server: Scripted) -> None:
    """A client that is late must not hide that time: here the second request is due before the run begins."""
    first, late = open_loop(server.url, [body(0, first_s=0.1), body(1, first_s=0.1)], [0.0, -5.0], TIMEOUT_S)
    assert ttft_s(late) >= 5.1 and late.sent_s >= 0.0 > late.scheduled_s and ttft_s(first) < 5.0


def test_the_closed_loop_keeps_so_many_under_way(server: Scripted) -> None:
    server.most_at_once = 0
    records = closed_loop(server.url, [body(n, first_s=0.1) for n in range(9)], 3, TIMEOUT_S)
    assert server.most_at_once == 3 and sorted(record.number for record in records) == list(range(9))
    assert all(record.status == "ok" and record.scheduled_s == record.sent_s for record in records)
    endless = (body(n, first_s=0.1) for n in itertools.count())
    records = closed_loop(server.url, endless, 2, TIMEOUT_S, stop_after_s=0.5)
    assert records and max(record.sent_s for record in records) < 0.5
    assert all(record.status == "ok" for record in records), "what is under way is finished"


@pytest.mark.parametrize(
    "script, status, error",
    [
        ({"status": 429}, "refused", "HTTP 429"),
        ({"status": 500}, "failed", "HTTP 500"),
        ({"ending": "abort"}, "failed", "RemoteProtocolError"),
        ({"ending": "hang"}, "failed", "TimeoutError"),
        ({"ending": "no done"}, "failed", "ended before"),
        ({"ending": "error"}, "failed", "the server failed"),
        ({"ending": "short"}, "failed", "wanted 3 tokens of answer, got 2"),
        ({"ending": "mute"}, "ok", None),
        ({"ending": "split"}, "ok", None),
    ],
)
def test_only_a_whole_answer_is_a_success(server: Scripted, script: dict, status: str, error: str | None) -> None:
    timeout_s = 1.0 if script.get("ending") == "hang" else TIMEOUT_S
    (record,) = closed_loop(server.url, [body(1, gap_s=0.01, **script)], 1, timeout_s)
    assert record.status == status and record.end_s > 0.0
    assert record.error is None if error is None else error in (record.error or "")
    if script.get("ending") == "mute":  # as many tokens as asked for, none of them visible
        assert record.text == "" and record.text_s == [record.end_s]
    elif status == "ok":  # an event is there once its last byte is, 0.05 s after its first; the role is the first event
        assert record.text == "1." * 3
        assert all(seen - record.sent_s >= 0.05 * number for number, seen in enumerate(record.text_s, start=2))


def test_a_server_that_is_not_there_is_a_failure() -> None:
    (record,) = closed_loop("http://127.0.0.1:9", [body(1)], 1, TIMEOUT_S)
    assert record.status == "failed" and "ConnectError" in (record.error or "")
