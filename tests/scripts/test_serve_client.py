"""The load generator against a real server that streams by a script: what it measures, what it counts as a failure."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import pytest

from scripts.benchmarks import serve_client
from scripts.benchmarks.serve_client import closed_loop, open_loop
from scripts.benchmarks.serve_figures import itl_s, ttft_s
from tests.polling import wait_until
from tests.scripts.scripted_server import Scripted, body, scripted_server

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server() as running:
        yield running


class Noted:
    """The client's clock. Every time that it was asked for is kept; with `step_s` each is so much later."""

    def __init__(self, step_s: float | None = None) -> None:
        self.all_s: list[float] = []
        self._step_s = step_s

    def perf_counter(self) -> float:
        now_s = time.perf_counter() if self._step_s is None else self._step_s * len(self.all_s)
        self.all_s.append(now_s)
        return now_s


def test_measured_ttft_and_itl_match_the_script(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role comes at once and does not count. The server sends nothing more before the client has noted what came:
    so each time lies between that of its text and that of the next one."""
    noted = Noted()
    monkeypatch.setattr(serve_client, "time", noted)
    monkeypatch.setattr(server, "noted", noted.all_s)
    (record,) = open_loop(server.url, [body(0, 5, first_s=0.1, gap_s=0.01)], [0.05], TIMEOUT_S)
    assert record.status == "ok" and record.text == "0." * 5 and len(record.text_s) == 5
    start_s, sent_s = noted.all_s[0], [*server.sent_s[0], math.inf]
    for seen_s, since_s, until_s in zip(record.text_s, sent_s, sent_s[1:], strict=False):
        assert since_s - 1e-6 <= start_s + seen_s <= until_s + 1e-6
    assert ttft_s(record) == record.text_s[0] - 0.05 >= 0.1 and record.end_s >= record.text_s[-1]
    assert len(itl_s(record)) == 4 and min(itl_s(record)) >= 0.009
    assert (record.prompt_tokens, record.completion_tokens, record.computed_tokens) == (40, 5, 10.0)


def forget_others(server: Scripted) -> None:
    """From now on the most requests at once are the test's own, none of which an earlier test has left open."""
    wait_until(lambda: not server.num_open)
    server.most_at_once = 0


def test_the_open_loop_does_not_wait_for_answers(server: Scripted) -> None:
    """None of twelve requests is answered before all of them have come."""
    times = [0.01 * number for number in range(12)]
    forget_others(server)
    records = open_loop(server.url, [body(n, until=12) for n in range(12)], times, TIMEOUT_S)
    assert server.most_at_once == 12 and [record.status for record in records] == ["ok"] * 12
    for record, at in zip(records, times, strict=True):
        assert record.scheduled_s == at <= record.sent_s + 1e-6
        assert record.text_s[0] >= times[-1] and ttft_s(record) == record.text_s[0] - at


def test_latencies_count_from_the_planned_time(server: Scripted) -> None:
    """A client that is late must not hide that time: here the second request is due before the run begins, by more
    than any answer is waited for."""
    late_s = 10 * TIMEOUT_S
    first, late = open_loop(server.url, [body(0, first_s=0.1), body(1, first_s=0.1)], [0.0, -late_s], TIMEOUT_S)
    assert ttft_s(late) >= late_s + 0.1 and late.sent_s >= 0.0 > late.scheduled_s and ttft_s(first) < late_s


def test_closed_loop_keeps_the_set_number_of_requests_in_flight(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_others(server)
    records = closed_loop(server.url, [body(n, first_s=0.01, until=3) for n in range(9)], 3, TIMEOUT_S)
    spans = [(record.sent_s, record.text_s[-1]) for record in records]  # the server hears of an end a little later
    assert max(sum(first <= sent_s < last for first, last in spans) for sent_s, _ in spans) == 3
    assert server.most_at_once >= 3 and sorted(record.number for record in records) == list(range(9))
    assert all(record.status == "ok" and record.scheduled_s == record.sent_s for record in records)
    monkeypatch.setattr(serve_client, "time", Noted(step_s=0.01))
    endless = (body(n, first_s=0.01) for n in itertools.count())
    records = closed_loop(server.url, endless, 2, TIMEOUT_S, stop_after_s=0.5)
    assert len(records) > 2 and max(record.sent_s for record in records) < 0.5
    assert all(record.status == "ok" for record in records), "what is under way is finished"


@pytest.mark.parametrize(
    "script, status, error",
    [
        ({"status": 429}, "refused", "HTTP 429"),
        ({"status": 500}, "failed", "HTTP 500"),
        ({"ending": "abort"}, "failed", "RemoteProtocolError"),
        ({"ending": "hang"}, "failed", "TimeoutError"),
        ({"ending": "no done"}, "failed", "ended early"),
        ({"ending": "error"}, "failed", "the server failed"),
        ({"ending": "short"}, "failed", "wanted 3 tokens of answer, got 2"),
        ({"ending": "mute"}, "ok", None),
        ({"ending": "split"}, "ok", None),
    ],
)
def test_only_a_complete_answer_counts_as_success(
    server: Scripted, script: dict, status: str, error: str | None
) -> None:
    timeout_s = 1.0 if script.get("ending") == "hang" else TIMEOUT_S
    (record,) = closed_loop(server.url, [body(1, gap_s=0.01, **script)], 1, timeout_s)
    assert record.status == status and record.end_s > 0.0
    assert record.error is None if error is None else error in (record.error or "")
    if script.get("ending") == "mute":  # as many tokens as asked for, none of them visible
        assert record.text == "" and record.text_s == [record.end_s]
    elif status == "ok":  # an event is there once its last byte is, 0.05 s after its first; the role is the first event
        assert record.text == "1." * 3
        assert all(seen - record.sent_s >= 0.05 * number for number, seen in enumerate(record.text_s, start=2))


def test_unreachable_server_is_a_failure() -> None:
    (record,) = closed_loop("http://127.0.0.1:9", [body(1)], 1, TIMEOUT_S)
    assert record.status == "failed" and "ConnectError" in (record.error or "")
