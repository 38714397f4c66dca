"""`trace` in requests: it agrees with the reuse report, with the text and with the clock."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ccjax.requests import RequestTrace, Span
from ccjax.server import ServerSettings
from ccjax.server.phases import PHASES
from ccjax.server.trace_format import token_texts, trace_json
from ccjax.text import ByteTokenizer
from tests.server import patience
from tests.server.conftest import DOCUMENTS, Server, StartServer
from tests.server.tiny_model import write_tiny_model

COUNTS = ("reused_tokens", "recomputed_tokens", "computed_tokens")
PASSAGES = [{"id": f"é{number}", "text": f"{text} Größe {number}."} for number, text in enumerate(DOCUMENTS.values())]


def ask(server: Server, order: list[int], *, question: str = "Who sails?", **more: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": question}],
        "documents": [PASSAGES[number] for number in order],
        "max_tokens": 4,
        "trace": True,
    } | more
    response = patience.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def marked(segment: dict[str, Any]) -> dict[str, int]:
    """Numbers of tokens by action, counted one by one as on the page."""
    again = set(segment["recomputed_offsets"])
    if segment["action"] == "compute":
        assert not again
        return dict(zip(COUNTS, (0, 0, len(segment["tokens"])), strict=True))
    recomputed = sum(offset in again for offset in range(len(segment["tokens"])))
    return dict(zip(COUNTS, (len(segment["tokens"]) - recomputed, recomputed, 0), strict=True))


def check_agrees(answer: dict[str, Any]) -> None:
    trace, reuse = answer["trace"], answer["reuse"]
    assert [segment["role"] for segment in trace["segments"]][-1] == "question"
    for segment, told in zip(trace["segments"], reuse["per_document"], strict=False):
        for name in ("role", "tier", "cfo", "exact", "focused", "document_id", "title", *COUNTS):
            assert segment[name] == told[name], name
    for segment in trace["segments"]:
        assert marked(segment) == {name: segment[name] for name in COUNTS}
        assert len(segment["tokens"]) == segment["num_tokens"]
        assert (segment["cci"] is None) == (segment["action"] == "compute")
        assert bool(segment["recomputed_layers"]) == bool(segment["recomputed_offsets"])
        assert segment["recomputed_layers"] <= trace["num_layers"]
    starts = itertools.accumulate((segment["num_tokens"] for segment in trace["segments"]), initial=0)
    assert [*starts] == [*(segment["start"] for segment in trace["segments"]), reuse["prompt_tokens"]]
    for name in COUNTS:
        assert sum(segment[name] for segment in trace["segments"]) == reuse[name], name


def check_clock(trace: dict[str, Any], layers: list[int]) -> None:
    phases = trace["phases"]
    assert tuple(phase["name"] for phase in phases) == PHASES
    assert phases[0]["start_s"] == 0.0 and phases[-1]["end_s"] == trace["total_s"]
    assert all(before["end_s"] == after["start_s"] for before, after in itertools.pairwise(phases))
    assert sum(phase["end_s"] - phase["start_s"] for phase in phases) == pytest.approx(trace["total_s"])
    prefill = phases[3]
    assert prefill["end_s"] == trace["ttft_s"] == trace["token_s"][0] and trace["token_s"] == sorted(trace["token_s"])
    assert [span["layer"] for span in trace["layers"]] == layers
    assert all(before["end_s"] == after["start_s"] for before, after in itertools.pairwise(trace["layers"]))
    for span in (*trace["layers"], *trace["loads"]):
        assert prefill["start_s"] <= span["start_s"] <= span["end_s"] <= prefill["end_s"]


def test_trace_covers_every_token_and_matches_the_reuse_report(start_server: StartServer) -> None:
    with start_server() as server:  # that has none of the passages
        first = ask(server, [0, 1, 2])
        second = ask(server, [2, 0, 1])
        for answer in (first, second):
            check_agrees(answer)
            assert answer["trace"]["num_layers"] == server.engine.model_config.num_layers == 2
            check_clock(answer["trace"], [0, 1])
        assert first["reuse"]["reused_tokens"] == 0 and not first["trace"]["loads"]
        assert min(second["reuse"][name] for name in COUNTS) > 0, "an order that was never seen recomputes something"
        assert [span["layer"] for span in second["trace"]["loads"]] == [0, 1]
        documents = [segment for segment in second["trace"]["segments"] if segment["role"] == "passage"]
        for segment, number in zip(documents, [2, 0, 1], strict=True):
            assert PASSAGES[number]["text"] in "".join(segment["tokens"])
            assert segment["tier"] == "host" and 0.5 <= segment["cci"] <= 1.0
        assert "Who sails?" in "".join(second["trace"]["segments"][-1]["tokens"])


def test_a_stream_has_the_trace_in_its_last_chunk(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Who?"}], "documents": PASSAGES[:2], "max_tokens": 3}
    for more in ({}, {"stream_options": {"include_usage": True}}):
        json_body = body | {"stream": True, "trace": True} | more
        lines = patience.post(f"{server.url}/v1/chat/completions", json=json_body).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert ["trace" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        check_agrees(chunks[-1])
        check_clock(chunks[-1]["trace"], [0, 1])


def test_no_tracer_is_created_unless_requested(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a tracer without a request for one")

    monkeypatch.setattr("ccjax.engine.batch.group.Tracer", never)
    for wanted in (None, False):
        assert "trace" not in ask(server, [0], trace=wanted)
    refused = patience.post(
        f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "trace": "yes"}
    )
    assert refused.status_code == 400 and "trace" in refused.json()["error"]["message"]


def test_several_choices_share_one_traced_prefill(server: Server) -> None:
    answer = ask(server, [3, 4], n=3, temperature=1.0, ignore_eos=True)
    check_agrees(answer)
    check_clock(answer["trace"], [0, 1])
    assert len(answer["trace"]["token_s"]) == 12


@pytest.mark.parametrize("strategy", ["cacheblend", "full"])
def test_trace_marks_are_right_with_recompute_and_without_reuse(start_server: StartServer, strategy: str) -> None:
    ratio = {"recompute_ratio": 0.3} if strategy == "cacheblend" else {}
    with start_server(strategy=strategy, **ratio) as server:
        ask(server, [0, 1, 2])
        answer = ask(server, [2, 1, 0])
        check_agrees(answer)
        assert bool(answer["reuse"]["recomputed_tokens"]) == bool(ratio)
        assert bool(answer["reuse"]["reused_tokens"]) == (strategy != "full")


def test_question_chooses_tokens_of_passages_seen_once(start_server: StartServer, tmp_path: Path) -> None:
    """15 % of them, in every layer; which ones depends on the question."""
    write_tiny_model(tmp_path / "deep", list(DOCUMENTS.values()), num_layers=20)
    passages = [{"id": document["id"], "text": " ".join([document["text"]] * 2)} for document in PASSAGES]
    chosen = []
    for question in ("Who sails?", "A smith?"):
        with start_server(model=tmp_path / "deep") as server:  # a new one: the first answer leaves variants behind
            ask(server, [], documents=passages)
            answer = ask(server, [], documents=passages[::-1], question=question)
        check_agrees(answer)
        trace, reuse = answer["trace"], answer["reuse"]
        segments = [segment for segment in trace["segments"] if segment["recomputed_offsets"]]
        assert all(segment["recomputed_layers"] == 20 for segment in segments)
        chosen.append([(segment["start"], segment["recomputed_offsets"]) for segment in segments])
        reused = sum(told["num_tokens"] for told in reuse["per_document"] if not told["exact"])
        assert 0.1 * reused <= reuse["recomputed_tokens"] <= 0.15 * reused + len(passages), "rounded up"
        # The question runs through all layers twice.
        num_computed = reuse["recomputed_tokens"] + reuse["computed_tokens"] + trace["segments"][-1]["num_tokens"]
        assert reuse["computed_share"] * reuse["prompt_tokens"] == pytest.approx(num_computed)
        check_clock(trace, [*range(20), *range(20)])
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("started_s, queue", [(105.0, (3.0, 5.0)), (100.5, (3.0, 3.0))], ids=["usual", "begun early"])
def test_phases_match_their_names(started_s: float, queue: tuple[float, float]) -> None:
    """With a slow search an answer may leave the queue before all its passages are found."""
    spans = (Span("load", 0, 105.0, 105.5), Span("layer", 0, 105.25, 106.0))
    trace = RequestTrace((), 1, 103.0, started_s, (107.0, 107.5, 109.0), spans, 4.0, False)
    told = trace_json(trace, None, arrived_s=100.0, found_s=102.0, submitted_s=103.0)
    assert {phase["name"]: (phase["start_s"], phase["end_s"]) for phase in told["phases"]} == {
        "retrieval": (0.0, 2.0),
        "preparation": (2.0, 3.0),
        "queue": queue,
        "prefill": (queue[1], 7.0),
        "decode": (7.0, 9.0),
    }
    assert (told["ttft_s"], told["total_s"], told["full_prefill_ttft_s"]) == (7.0, 9.0, queue[1] + 4.0)
    assert told["loads"] == [{"layer": 0, "start_s": 5.0, "end_s": 5.5}]
    assert told["layers"] == [{"layer": 0, "start_s": 5.25, "end_s": 6.0}]
    assert told["token_s"] == [7.0, 7.5, 9.0]


def test_joined_token_texts_equal_the_text_even_if_characters_are_split() -> None:
    tokenizer = ByteTokenizer()
    for text in ("Größe 漢字 🦜!", "", "plain\n\n"):
        ids = tokenizer.encode(text, allow_special=False)
        texts = token_texts(ids, tokenizer)
        assert len(texts) == len(ids) and "".join(texts) == text
    broken = "a🦜".encode()[:-1]
    texts = token_texts(tuple(broken), tokenizer)
    assert (texts[0], len(texts), "".join(texts)) == ("a", 4, tokenizer.decode(tuple(broken))) and texts[-1]
    assert token_texts((1, 2), None) == ["", ""]


def test_the_live_view_counts_answers(start_server: StartServer) -> None:
    with start_server() as server:
        before = patience.get(f"{server.url}/v1/live").json()
        assert before["answered"] == 0 and before["documents"] == [] and before["queue"]["running"] == 0
        own = ask(server, [0, 1])
        found = ask(server, [], documents=None, question="Where does Anna live?")
        live = patience.get(f"{server.url}/v1/live").json()
        for name in ("reused", "recomputed", "computed"):
            total = sum(answer["reuse"][f"{name}_tokens"] for answer in (own, found))
            assert live["tokens"][name] == total == sum(answer[name] for answer in live["recent"])
        assert live["answered"] == 2
        # Only the server's own documents: those in requests are private.
        assert {row["id"] for row in live["documents"]} <= set(DOCUMENTS) and live["documents"][0]["requests"] == 1
        usage = {tier: used.used_bytes for tier, used in server.engine.cache.usage().items()}
        assert {tier["tier"]: tier["used_bytes"] for tier in live["tiers"]} == usage


def test_page_is_public_with_strict_csp_and_live_view_requires_the_key(start_server: StartServer) -> None:
    with start_server(ServerSettings(api_key="k", top_k=2)) as server:
        page = httpx.get(f"{server.url}/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in page.headers["content-security-policy"]
        for wanted in ('href="page/style.css"', 'src="page/app.js"'):
            assert wanted in page.text
        assert "style=" not in page.text and "onclick" not in page.text and "://" not in page.text
        for name in ("style.css", "theme.js", "app.js", "api.js", "dom.js", "live.js", "prompt.js", "timeline.js"):
            file = httpx.get(f"{server.url}/page/{name}")
            assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff"
            assert "innerHTML" not in file.text and "https://" not in file.text
            again = httpx.get(f"{server.url}/page/{name}", headers={"If-None-Match": file.headers["etag"]})
            assert again.status_code == 304
        assert httpx.head(f"{server.url}/").status_code == 200
        for path in ("/page/../settings.py", "/page/%2e%2e/settings.py", "/page/none.js"):
            assert httpx.get(f"{server.url}{path}").status_code == 404
        assert httpx.get(f"{server.url}/v1/live").status_code == 401
        assert httpx.get(f"{server.url}/v1/live", headers={"Authorization": "Bearer k"}).status_code == 200


def test_disabling_the_page_also_disables_trace_and_live_view(start_server: StartServer) -> None:
    with start_server(ServerSettings(page=False)) as server:
        for path in ("/", "/page/app.js", "/v1/live"):
            assert httpx.get(f"{server.url}{path}").status_code == 404
        body = {"messages": [{"role": "user", "content": "Who?"}], "trace": True}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "trace"
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body | {"trace": False}).status_code == 200
