"""Answers of the API to OpenAI's own client over a socket, compared with those of the engine behind it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ccjax
from ccjax.engine import Request, SamplingParams
from ccjax.server import ServerSettings
from ccjax.types import Document
from tests.server import patience
from tests.server.conftest import MAX_MODEL_LEN, Server, StartServer

if TYPE_CHECKING:
    import openai

QUESTION = [{"role": "user", "content": "Who lives in Paris?"}]
PASSAGES = [
    {"id": "p1", "title": "Anna", "text": "Anna lives in Paris and repairs violins.", "version": "3"},
    {"id": "p2", "title": "Bob", "text": "Bob works in Rome and paints houses all day."},
    {"id": "p3", "text": "She sails from Lisbon on a boat called Minerva."},
]


def ask(client: openai.OpenAI, documents: list | None = None, *, max_tokens: int | None = 12, extra=None, **more):
    """A greedy chat answer over `documents`, without the server's own."""
    body = {"documents": PASSAGES if documents is None else documents, **(extra or {})}
    return client.chat.completions.create(
        model="tiny", messages=more.pop("messages", QUESTION), max_tokens=max_tokens, extra_body=body, **more
    )


def expected(server: Server, documents: list[dict], **sampling):
    """The engine's answer by a full prefill."""
    sampling = {"max_new_tokens": 12} | sampling
    passages = [Document(d["text"], d.get("id"), d.get("title"), d.get("version")) for d in documents]
    return server.engine.run(
        Request(messages=QUESTION, documents=passages, sampling=SamplingParams(**sampling), reuse="off")
    )


def test_chat_returns_the_answer_and_statistics_of_the_engine(server: Server, client: openai.OpenAI) -> None:
    wanted = expected(server, PASSAGES)
    answer = ask(client, extra={"reuse": "off"})
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == (wanted.text, "length", None)
    assert choice.message.role == "assistant"
    assert answer.model == "tiny" and answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == wanted.num_prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == wanted.num_prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.reuse["mode"] == "off" and answer.reuse["prompt_tokens"] == wanted.num_prompt_tokens
    assert [entry["title"] for entry in answer.reuse["per_document"]][1:] == ["Anna", "Bob", None]
    assert answer.documents == [
        {"id": "p1", "path": None, "title": "Anna", "heading": None, "version": "3", "score": None},
        {"id": "p2", "path": None, "title": "Bob", "heading": None, "version": None, "score": None},
        {"id": "p3", "path": None, "title": None, "heading": None, "version": None, "score": None},
    ]
    assert answer.ttft_s > 0


def test_stream_ends_with_done_as_in_openai(server: Server) -> None:
    body = {"prompt": "Anna", "max_tokens": 2, "stream": True}
    response = patience.post(f"{server.url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\ndata: [DONE]\n\n")


def test_completion_logprobs_of_token_ids_match_a_full_prefill(server: Server, client: openai.OpenAI) -> None:
    ids = [5, 77, 301, 12, 44, 45, 46]
    logits = server.engine.prefill_logits(ids)[-1].astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=1, logprobs=3)
    found = answer.choices[0].logprobs
    assert answer.object == "text_completion" and answer.usage.prompt_tokens == len(ids)
    np.testing.assert_allclose(found.token_logprobs, [logprobs.max()], atol=1e-5)
    np.testing.assert_allclose(sorted(found.top_logprobs[0].values()), np.sort(logprobs)[-3:], atol=1e-5)
    assert found.tokens == [answer.choices[0].text] and found.text_offset == [0]


def test_completions_default_to_16_tokens_as_in_openai(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="Emma").usage.completion_tokens == 16


def test_chat_without_max_tokens_continues_until_end_of_sequence(server: Server, client: openai.OpenAI) -> None:
    wanted = expected(server, PASSAGES, max_new_tokens=None)
    answer = ask(client, max_tokens=None, extra={"reuse": "off"})
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.token_ids) > 64


def test_max_completion_tokens_overrides_max_tokens(client: openai.OpenAI) -> None:
    assert ask(client, max_tokens=9, max_completion_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string_ends_the_answer_and_is_excluded(client: openai.OpenAI, as_list: bool) -> None:
    text = ask(client, max_tokens=40).choices[0].message.content
    stop = re.findall(r"[A-Za-z]{2,}", text)[2]
    answer = ask(client, max_tokens=40, stop=["never in it", stop] if as_list else stop)
    assert answer.choices[0].message.content == text.split(stop)[0]
    assert answer.choices[0].finish_reason == "stop"
    streamed = ask(client, max_tokens=40, stop=stop, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(parts) == text.split(stop)[0]


def test_same_seed_repeats_the_answer_and_other_seeds_differ(server: Server, client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        return ask(client, seed=seed, temperature=1.0, top_p=0.9, extra={"reuse": "off"}).choices[0].message.content

    assert draw(7) == draw(7) == expected(server, PASSAGES, seed=7, temperature=1.0, top_p=0.9).text
    assert len({draw(seed) for seed in (1, 2, 3, -4)}) == 4


@pytest.mark.parametrize("reuse", ["exact", "bounded"])
def test_the_same_question_again_is_served_from_the_cache(client: openai.OpenAI, reuse: str) -> None:
    passages = [{"text": f"{passage['text']} ({reuse} reuse)"} for passage in PASSAGES]
    first, second = (ask(client, passages, extra={"reuse": reuse}) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == second.reuse["reused_tokens"] > second.usage.prompt_tokens // 2
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.reuse["exact"]


def test_permuted_passages_are_reused_in_bounded_mode_and_exact_in_exact_mode(
    server: Server, client: openai.OpenAI
) -> None:
    ask(client)
    permuted = [PASSAGES[2], PASSAGES[0], PASSAGES[1]]
    bounded = ask(client, permuted, extra={"reuse": "bounded"})
    assert bounded.usage.prompt_tokens_details.cached_tokens > 0 and not bounded.reuse["exact"]
    assert bounded.reuse["recomputed_tokens"] > 0
    assert ask(client, PASSAGES[::-1], extra={"reuse": "fast"}).reuse["mode"] == "fast"
    off = ask(client, permuted, extra={"reuse": "off"})
    exact = ask(client, permuted, extra={"reuse": "exact"})
    assert off.reuse["reused_tokens"] == 0 and exact.reuse["exact"]
    assert exact.choices[0].message.content == off.choices[0].message.content == expected(server, permuted).text


def test_passages_are_retrieved_from_the_index_by_default(server: Server, client: openai.OpenAI) -> None:
    def retrieve(**extra):
        messages = [{"role": "user", "content": "Where does Carla sail with Minerva?"}]
        return client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, extra_body=extra)

    found = retrieve()
    wanted = server.retriever.search("Where does Carla sail with Minerva?", 2)
    assert [entry["id"] for entry in found.documents] == [passage.passage_id for passage in wanted]
    best = found.documents[0]
    assert best == {
        "id": "carla.md#0",
        "path": "carla.md",
        "title": "Carla",
        "heading": None,
        "version": wanted[0].version,
        "score": pytest.approx(wanted[0].score),
    }
    assert [entry["document_id"] for entry in found.reuse["per_document"][1:]] == [
        entry["id"] for entry in found.documents
    ]
    assert [entry["id"] for entry in retrieve(retrieval={"top_k": 1}).documents] == ["carla.md#0"]
    assert len(retrieve(retrieval=True).documents) == 2
    others = retrieve(retrieval={"filters": {"type": "ne", "key": "document_id", "value": "carla.md"}}).documents
    assert len(others) == 2 and all(entry["id"] != "carla.md#0" for entry in others)
    none = retrieve(retrieval={"top_k": 1, "filters": {"type": "eq", "key": "language", "value": "de"}})
    assert [entry["id"] for entry in none.documents] == ["nothing-found"]
    assert none.choices[0].message.content is not None
    for without in (retrieve(retrieval=False), retrieve(retrieve=False), retrieve(documents=[])):
        assert without.documents == [] and without.usage.prompt_tokens < found.usage.prompt_tokens


def test_the_last_user_message_is_the_query(client: openai.OpenAI) -> None:
    messages = [
        {"role": "user", "content": "Where does Carla sail with Minerva?"},
        {"role": "assistant", "content": "From Lisbon."},
        {"role": "user", "content": [{"type": "text", "text": "And who teaches"}, {"type": "text", "text": "chess?"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert answer.documents[0]["id"] == "emma.md#0"


def test_truncate_drops_passages_from_the_end(client: openai.OpenAI) -> None:
    import openai

    many = [{"id": str(n), "text": f"Passage {n}: {PASSAGES[0]['text']} {PASSAGES[1]['text']}"} for n in range(40)]
    answer = ask(client, many, extra={"truncate": True})
    used = [entry["id"] for entry in answer.documents]
    assert 5 < len(used) < 40 and used == [str(n) for n in range(len(used))]
    assert answer.usage.total_tokens <= MAX_MODEL_LEN
    for documents in ([{"text": "word " * 3000}], [{"text": "word " * 3000}, {"text": "Anna lives in Paris."}]):
        with pytest.raises(openai.BadRequestError, match="documents: wanted at least one that fits into .* tokens"):
            ask(client, documents, extra={"truncate": True})
    with pytest.raises(openai.BadRequestError, match="messages: wanted at most 512 tokens"):  # nor would it fit without
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Where? " * 3000}],
            extra_body={"truncate": True, "documents": [{"text": "Anna lives in Paris."}]},
        )


def test_problems_of_documents_are_listed_and_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = server.retriever
    indexed = {"num_documents": retriever.num_documents, "num_passages": retriever.num_passages}
    assert min(indexed.values()) > 2
    indexed["num_vectors_pending"] = 0

    def told(name: str) -> dict[str, Any]:
        return patience.get(f"{server.url}{name}").json()

    nothing = {"object": "list", "data": [], "skipped": {}, "unsupported": {}} | indexed
    assert told("/v1/documents/problems") == nothing
    report = dataclasses.replace(
        retriever.report,
        failed=(
            ("/d/a.pdf", "broken PDF: no pages"),
            ("/d", "cannot be read: Permission denied"),
            ("/d/b.pdf", "broken PDF: KeyError"),
            ("/d/c.jsonl:7", "too large: over the limit max_file_bytes=5"),
        ),
        unsupported=((".png", 2), ("", 1)),
    )
    monkeypatch.setattr(retriever, "report", report)
    skipped = {"unsupported file type": 3, "broken PDF": 2, "cannot be read": 1, "too large": 1}
    listed = told("/v1/documents/problems")
    assert listed["data"][1] == {"path": "/d", "reason": "cannot be read: Permission denied"}
    assert len(listed["data"]) == 4 and listed["unsupported"] == {".png": 2, "": 1}
    for summary in (listed, told("/ready")["documents"], told("/v1/live")):
        assert summary["skipped"] == skipped and summary.items() >= indexed.items()
    metrics = patience.get(f"{server.url}/metrics").text
    for reason, count in skipped.items():
        assert f'ccjax_document_problems{{reason="{reason}"}} {count}.0' in metrics


def test_retrieved_passages_are_dropped_to_fit_a_long_question(server: Server, client: openai.OpenAI) -> None:
    import openai

    messages = [{"role": "user", "content": "Who teaches chess on Tuesdays in Oslo? " * 41}]

    def count(**extra) -> int:
        return client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, extra_body=extra
        ).usage.prompt_tokens  # fmt: skip

    question_tokens = count(retrieval=False)
    limit = MAX_MODEL_LEN - question_tokens - 4
    passages = server.retriever.search(messages[0]["content"], 5)
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    sizes = [len(tokenizer.encode(f"{p.title}\n{p.text}\n\n", allow_special=False)) for p in passages]
    assert sizes[0] < limit < sum(sizes), "the test wants a question that leaves room for some passages, not for all"
    assert question_tokens < count(retrieval={"top_k": 5}) <= MAX_MODEL_LEN - 4
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        count(retrieval={"top_k": 5}, truncate=False)


def test_unsupported_fields_with_default_values_are_accepted(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    extra = {
        "cache_salt": "house",
        "no_such_parameter": {"a": 1},
        "tools": [],
        "logit_bias": {},
        "stop": None,
        "reuse": None,
    }
    answer = ask(
        client, n=1, user="u1", metadata={"k": "v"}, store=False, prompt_cache_key="k", service_tier="auto",
        frequency_penalty=0, presence_penalty=0.0, response_format={"type": "text"}, extra=extra
    )  # fmt: skip
    assert answer.choices[0].message.content == plain


def test_ignore_eos_continues_to_the_requested_length(
    server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    whole = ask(client, extra={"reuse": "off"}).choices[0]
    submission, every_id = server.engine._submission, frozenset(range(server.engine.model_config.vocab_size))
    monkeypatch.setattr(submission, "_parts", dataclasses.replace(submission._parts, eos_ids=every_id))
    for value in (None, False):
        ended = ask(client, extra={"reuse": "off", "ignore_eos": value})
        assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens == 0
    ignored = ask(client, extra={"reuse": "off", "ignore_eos": True})
    assert ignored.choices[0] == whole and ignored.usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError, match="ignore_eos"):
        ask(client, extra={"ignore_eos": "yes"})


def test_models_version_and_tokenize(server: Server, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == MAX_MODEL_LEN
    assert client.models.retrieve("tiny") == model
    assert patience.get(f"{server.url}/version").json() == {"version": ccjax.__version__}
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    text = "Anna lives <|end|> in Paris"
    found = patience.post(f"{server.url}/tokenize", json={"prompt": text}).json()
    assert found["tokens"][0] == tokenizer.bos_id and tokenizer.decode(found["tokens"]) == text
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == MAX_MODEL_LEN
    bare = patience.post(f"{server.url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == found["tokens"][1:]
    chat = patience.post(f"{server.url}/tokenize", json={"messages": QUESTION, "documents": PASSAGES}).json()
    assert chat["count"] == len(chat["tokens"]) == ask(client).usage.prompt_tokens
    shown = patience.post(f"{server.url}/tokenize", json={"prompt": "Anna", "return_token_strs": True}).json()
    assert "".join(shown["token_strs"]).endswith("Anna") and len(shown["token_strs"]) == shown["count"]
    plain = patience.post(f"{server.url}/tokenize", json={"messages": QUESTION}).json()["tokens"]
    whole = patience.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": plain}).json()["prompt"]
    assert whole == "<|begin|><|turn|>user\nWho lives in Paris?<|end|><|turn|>assistant\n"
    for path, body, named in (
        ("detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("detokenize", {"tokens": "Anna"}, "tokens"),
        ("tokenize", {"prompt": "a", "messages": QUESTION}, "prompt"),
        ("tokenize", {"prompt": "a", "documents": PASSAGES}, "documents"),
        ("tokenize", {"messages": QUESTION, "chat_template": "{{ 1 }}"}, "chat_template"),
    ):
        refused = patience.post(f"{server.url}/{path}", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == named


def test_openapi_schema_has_our_fields_and_valid_references(server: Server) -> None:
    schema = patience.get(f"{server.url}/openapi.json").json()
    fields = schema["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "documents", "retrieval", "reuse", "truncate"} <= fields.keys()
    for name in re.findall(r'"\$ref": ?"#/components/schemas/(\w+)"', patience.get(f"{server.url}/openapi.json").text):
        assert name in schema["components"]["schemas"]
    for path in ("docs", "redoc", "docs/oauth2-redirect"):  # whose scripts would come from another server
        assert patience.get(f"{server.url}/{path}").status_code == 404


def test_api_key_is_required_except_for_probes_and_metrics(
    start_server: StartServer,
) -> None:
    with start_server(ServerSettings(api_key="sesame", served_model_name="house-model")) as server:
        for path in ("health", "ready", "metrics"):
            assert patience.get(f"{server.url}/{path}").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            for path in ("version", "v1/models"):
                assert patience.get(f"{server.url}/{path}", headers=headers).status_code == 401
            refused = patience.post(f"{server.url}/v1/chat/completions", json={"messages": QUESTION}, headers=headers)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        with server.client() as client:
            assert [model.id for model in client.models.list().data] == ["house-model"]
            answer = client.chat.completions.create(model="house-model", messages=QUESTION, max_tokens=2)
            assert answer.usage.completion_tokens == 2
