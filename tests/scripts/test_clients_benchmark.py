"""The benchmark of real clients: what is sent for each way and case, what comes back, and the sums by hand."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from scripts.benchmarks import client_packages, clients
from scripts.benchmarks.client import RequestRecord
from scripts.benchmarks.clients import WAYS, Proxy, schedule, summary
from scripts.benchmarks.wrappers import Turn, before_question, in_question, in_system, in_tools
from tests.scripts.test_load_client import DONE, ROLE, TEXT, answering, event

POOL = [{"title": f"Town {n}", "text": f'Town {n} has {n} "old" bridges.'} for n in range(7)]
PASSAGES = tuple(passage["text"] for passage in POOL[:5])
TURN, EARLIER = Turn("And now?", PASSAGES), [Turn("First?", PASSAGES[:2], answer="So.")]


@pytest.mark.parametrize("place", [in_system, in_question, before_question, in_tools])
@pytest.mark.parametrize("shape", ["openwebui", "openwebui tools", "ragflow"])
def test_documents_take_the_passages_out_of_the_messages(place, shape):
    """Also where JSON escapes their quotation marks, and those of earlier turns."""
    messages = place(shape, TURN, EARLIER)
    assert json.dumps(messages).count("bridges") >= 5
    body = {"messages": messages, "model": "m"}
    changed = WAYS["documents"](body, [*PASSAGES, *PASSAGES[:2]])
    assert changed["documents"] == [{"text": text} for text in PASSAGES] and changed["model"] == "m"
    assert not any("bridges" in message["content"] for message in changed["messages"])
    assert [message["role"] for message in changed["messages"]] == [message["role"] for message in messages]
    assert WAYS["plain"](body, PASSAGES) == body and WAYS["exact"](body, PASSAGES) == body | {"reuse": "exact"}


def test_shapes_put_passages_where_the_clients_do():
    def where(place) -> list[tuple[str, int]]:
        return [(m["role"], m["content"].count("bridges")) for m in place("dify", TURN, EARLIER)]

    before = [("user", 0), ("assistant", 0)]
    assert where(in_system) == [("system", 5), *before, ("user", 0)]
    assert where(in_question) == [("system", 0), *before, ("user", 5)]
    assert where(before_question) == [("system", 0), *before, ("system", 5), ("user", 0)]
    call = [("user", 0), ("assistant", 0)]
    assert where(in_tools) == [("system", 0), *call, ("tool", 2), ("assistant", 0), *call, ("tool", 5)]
    dated = in_system("dify", Turn("?", PASSAGES, date="Today."), [])
    assert dated[0]["content"].startswith("Today.\n") and not where(in_system)[0][0].startswith("Today.")


def test_cases_are_asked_in_an_order_in_which_each_is_what_its_name_says():
    steps, after = schedule(POOL, 5)
    turns = {step.case: step.turn for step in steps if step.case}
    assert list(turns)[:5] == ["first", "same", "permuted", "three kept", "date"]
    assert list(turns)[5:] == ["turn 2", "turn 5", "turn 2 changed", "turn 5 changed"]
    assert turns["first"] == turns["same"] and turns["permuted"].passages == turns["first"].passages[::-1]
    assert len(set(turns["three kept"].passages) & set(PASSAGES)) == 3
    dated = [step.turn for step in steps if step.turn.date]
    assert dated[0].passages == dated[1].passages == PASSAGES and dated[0].question == dated[1].question
    assert dated[0].date != dated[1].date and dated[1] == turns["date"]
    kept = [step for step in steps if step.conversation == "conversation"]
    changed = [step for step in steps if step.conversation == "conversation changed"]
    assert len(kept) == len(changed) == 5 and {step.turn.passages for step in kept} == {PASSAGES}
    assert len({step.turn.passages for step in changed}) == 5
    assert [step.case for step in after] == ["prepared"] and set(after[0].turn.passages) == set(PASSAGES)
    assert {step.conversation for step in schedule(POOL, 0)[0]} == {None}


def test_proxy_bounds_and_times_an_answer_and_passes_errors_on():
    received: list[dict[str, Any]] = []
    report = {"computed_share": 0.25, "prompt_tokens": 40, "per_document": [{"cause": "new", "computed_tokens": 7}]}
    usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 30}}
    stream = ROLE + TEXT + event({"choices": [], "usage": usage, "reuse": report}) + DONE

    def answer(handler) -> None:
        handler.send_response(200 if len(received) < 2 else 400)
        handler.end_headers()
        handler.wfile.write(stream if len(received) < 2 else b"no tools here")

    def change(body):
        received.append(body)
        return body | {"reuse": "exact"}

    with answering(answer) as url, Proxy(url, 2, 60.0) as proxy:
        proxy.change = change
        got = []
        for _ in range(2):
            connection = http.client.HTTPConnection(proxy.url.removeprefix("http://").removesuffix("/v1"))
            connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": []}))
            response = connection.getresponse()
            got.append((response.status, json.loads(response.read())))
            connection.close()
    (status, whole), (refused, error) = got
    assert (status, refused) == (200, 400) and "no tools here" in error["error"]["message"]
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert whole["usage"] == {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}
    figures = clients._figures(proxy.records[0])
    assert figures["cached_tokens"] == 30 and figures["computed_tokens"] == 10 and figures["computed_share"] == 0.25
    assert figures["causes"] == {"new": 7} and figures["ttft_s"] > 0.0


def test_bound_replaces_both_names_of_the_limit():
    body = clients.bounded({"max_completion_tokens": 900, "temperature": 0.1, "model": "m"}, 3)
    assert body["max_tokens"] == 3 and body["temperature"] == 0 and "max_completion_tokens" not in body
    assert body["stream"] and body["stream_options"] == {"include_usage": True}


def test_sums_match_values_computed_by_hand():
    def row(client: str, case: str, way: str, cached: int, seconds: float) -> dict[str, Any]:
        own = {"prompt_tokens": 100, "cached_tokens": cached, "computed_tokens": 100 - cached, "ttft_s": seconds}
        return {"client": client, "case": case, "way": way, **own}

    rows = [row(c, "first", way, 0, 9.0) for c in "ab" for way in WAYS]
    rows += [row("a", "permuted", "plain", 60, 1.0), row("b", "permuted", "plain", 80, 2.0)]
    rows += [row("a", "permuted", "documents", 70, 1.0), row("b", "permuted", "documents", 90, 3.0)]
    rows += [row("a", "permuted", "exact", 10, 4.0), row("b", "permuted", "exact", 30, 6.0)]
    first, permuted, whole = summary(rows)
    assert first["saved_of_documents"] is None and first["saved_over_exact"] is None
    assert permuted["clients"] == 2 and permuted["ways"]["plain"]["computed_tokens"] == 60
    assert [permuted["ways"][way]["ttft_s"] for way in WAYS] == [1.5, 2.0, 5.0]
    assert permuted["saved_of_documents"] == pytest.approx(140 / 160) and permuted["saved_over_exact"] == 3.5
    assert whole | {"case": "permuted"} == permuted, "without `first`"


def test_absent_packages_and_short_traces_are_named(tmp_path):
    assert client_packages.missing(None) is None and client_packages.missing("pytest") is None
    assert client_packages.missing("no-such-client") == "no-such-client is not installed: make bench-clients"
    (tmp_path / "rag_trace").mkdir()
    rows = [{"id": n, **passage} for n, passage in enumerate(POOL)]
    (tmp_path / "rag_trace/musique_docs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = [{"docs": [0, 1, 2]}, {"docs": [1, 3, 4]}, {"docs": [6, 5]}]
    (tmp_path / "rag_trace/musique_trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    (pool,) = clients.passage_pools(tmp_path, 1)
    assert [passage["id"] for passage in pool] == [0, 1, 2, 3, 4, 6, 5]
    with pytest.raises(clients.BenchmarkError, match="wanted a trace of 14 passages, got 7"):
        clients.passage_pools(tmp_path, 2)
    assert clients.complete(RequestRecord(0.0, 0.0, error="HTTP 400: tools"), "m")["error"]["message"].endswith("tools")
