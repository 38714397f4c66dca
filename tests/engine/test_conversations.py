"""Conversations: each turn computes only what is new, and answers as if nothing had been stored."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ccjax.cache.run_capture import RunCapture
from ccjax.engine import Engine, Request
from ccjax.requests import SamplingParams
from ccjax.types import Document
from tests.polling import wait_until

WORDS = "harbour museum garden river bridge market castle library tower village festival orchard lantern window".split()


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("demo", max_model_len=2048, host_cache_bytes=1 << 28) as engine:
        yield engine


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count)) + "."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def run(engine: Engine, messages, reuse="bounded", *, n=1, max_new_tokens=12, documents=(), salt=""):
    sampling = SamplingParams(max_new_tokens, n=n, ignore_eos=True)
    return engine.run(
        Request(messages=messages, documents=tuple(documents), sampling=sampling, reuse=reuse, cache_salt=salt)
    )


@pytest.mark.parametrize("reuse", ["exact", "bounded"])
@pytest.mark.parametrize("num_documents", [0, 2])
def test_each_turn_computes_only_what_is_new(engine: Engine, reuse: str, num_documents: int) -> None:
    draw = random.Random(f"{reuse}{num_documents}")
    documents = [Document(words(draw, 30), id=str(number)) for number in range(num_documents)]
    messages, before = [user(words(draw, 12))], 0
    for turn in range(4):
        answer = run(engine, messages, reuse, documents=documents)
        is_exact = reuse == "exact" or not documents  # else they are prepared, and so is what follows them approximate
        assert answer.reuse.exact == is_exact
        if is_exact:
            assert answer.token_ids == run(engine, messages, "off", documents=documents).token_ids
        if turn:
            most = answer.num_prompt_tokens - before
            assert answer.reuse.computed_tokens <= most + (16 if reuse == "bounded" else 40)
        told = answer.reuse
        assert sum(part.num_tokens for part in told.per_document) <= told.prompt_tokens
        assert all(
            part.num_tokens == part.reused_tokens + part.recomputed_tokens + part.computed_tokens
            for part in told.per_document
        )
        before = answer.num_prompt_tokens
        messages += [assistant(answer.text), user(words(draw, 6))]


def test_mode_exact_computes_earlier_answers_again(engine: Engine) -> None:
    draw = random.Random(1)
    messages = [user(words(draw, 20))]
    first = run(engine, messages, max_new_tokens=40)
    messages += [assistant(first.text), user(words(draw, 3))]
    exact, bounded = run(engine, messages, "exact"), run(engine, messages)
    assert exact.token_ids == bounded.token_ids
    assert exact.reuse.reused_tokens < first.num_prompt_tokens <= bounded.reuse.reused_tokens


def test_another_tenant_finds_nothing(engine: Engine) -> None:
    messages = [user(words(random.Random(2), 40))]
    run(engine, messages, salt="one")
    assert run(engine, messages, salt="two").reuse.reused_tokens == 0
    assert run(engine, messages, salt="one").reuse.reused_tokens == run(engine, messages).num_prompt_tokens - 1


def test_completions_are_found_too(engine: Engine) -> None:
    text = words(random.Random(3), 60)
    sampling = SamplingParams(4, ignore_eos=True)
    first = engine.run(Request(prompt=text, sampling=sampling))
    longer = engine.run(Request(prompt=text + " And then", sampling=sampling))
    assert longer.reuse.reused_tokens >= first.num_prompt_tokens - 16
    assert longer.token_ids == engine.run(Request(prompt=text + " And then", sampling=sampling, reuse="off")).token_ids


def test_conversations_survive_a_restart(tmp_path: Path) -> None:
    draw, store = random.Random(4), f"file://{tmp_path}"
    messages = [user(words(draw, 40))]
    with Engine.from_pretrained("demo", max_model_len=1024, store=store) as engine:
        first = run(engine, messages)
    messages += [assistant(first.text), user(words(draw, 5))]
    with Engine.from_pretrained("demo", max_model_len=1024, store=store) as engine:
        again = run(engine, messages)
        assert again.reuse.reused_tokens >= first.num_prompt_tokens - 1
        assert {part.tier for part in again.reuse.per_document if part.reused_tokens} == {"disk"}
        assert again.token_ids == run(engine, messages, "off").token_ids


@pytest.mark.parametrize("num_turns", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_mode_exact_equals_full_prefill_whatever_others_ask_at_the_same_time(tmp_path: Path, num_turns: int) -> None:
    """Four clients over the same passages, pasted or as documents: new conversations, more turns, edits, branches, the
    same question again, several answers, all modes; in so little space that much is evicted."""
    draw = random.Random(num_turns)
    passages = [words(draw, 40) for _ in range(8)]
    space = {"host_cache_bytes": 3 << 20, "disk_cache_bytes": 6 << 20, "store": f"file://{tmp_path}"}

    def client(number: int) -> int:
        draw, conversations, reused = random.Random(f"{num_turns} {number}"), list[list[dict[str, str]]](), 0
        for _ in range(num_turns):
            documents: list[Document] = []
            if not conversations or draw.random() < 0.25:
                some = draw.sample(passages, draw.randrange(2, 5))
                if draw.random() < 0.4:
                    documents, content = list(map(Document, some)), words(draw, 5)
                else:
                    context = "\n\n".join(f"[{index}] {passage}" for index, passage in enumerate(some))
                    content = draw.choice([f"{context}\n\n{words(draw, 5)}", f"{words(draw, 5)}\n\n{context}"])
                messages = [user(content)]
            else:
                messages = list(draw.choice(conversations))
                if draw.random() < 0.4:  # an earlier turn is edited, and what follows is dropped
                    at = draw.randrange(0, len(messages), 2)
                    messages = [*messages[:at], user(words(draw, draw.randrange(2, 60)))]
            mode, count = draw.choice(["exact", "exact", "bounded", "fast"]), draw.choice([1, 1, 2])
            answer = run(engine, messages, mode, n=count, documents=documents)
            reused += answer.reuse.reused_tokens
            if mode == "exact":
                full = run(engine, messages, "off", n=count, documents=documents)
                told = [choice.token_ids for choice in (answer, *answer.others)]
                assert told == [choice.token_ids for choice in (full, *full.others)], messages
            conversations.append(messages if len(messages) > 8 else [*messages, assistant(answer.text), user("And?")])
        return reused

    with Engine.from_pretrained("demo", max_model_len=2048, **space) as engine, ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(client, range(4))) > 0
        assert sum(tier.evicted for tier in engine.cache.usage().values()) > 0


@pytest.mark.parametrize("reuse", ["exact", "bounded"])
def test_random_edits_branches_and_several_answers_equal_full_prefill(engine: Engine, reuse: str) -> None:
    draw = random.Random(f"edits {reuse}")
    conversations = [[user(words(draw, 10))]]
    for _ in range(14):
        messages = list(draw.choice(conversations))
        change = draw.randrange(4)
        if change == 0 and len(messages) > 1:  # an earlier turn is edited, what follows is dropped
            at = draw.randrange(0, len(messages), 2)
            messages = [*messages[:at], user(words(draw, draw.randrange(2, 12)))]
        elif change == 1:
            messages = [{"role": "system", "content": words(draw, 15)}, *(m for m in messages if m["role"] != "system")]
        count = draw.choice([1, 1, 2])
        answer = run(engine, messages, reuse, n=count)
        full = run(engine, messages, "off", n=count)
        assert [answer.token_ids, *(other.token_ids for other in answer.others)] == [
            full.token_ids,
            *(other.token_ids for other in full.others),
        ]
        text = answer.text if count == 1 else answer.others[0].text
        conversations.append([*messages, assistant(text), user(words(draw, draw.randrange(2, 9)))])


def test_read_only_engine_reuses_runs_and_stores_none(tmp_path: Path) -> None:
    store, messages = f"file://{tmp_path}", [user(words(random.Random(6), 40))]
    with Engine.from_pretrained("demo", max_model_len=1024, store=store) as engine:
        first = run(engine, messages)
    messages += [assistant(first.text), user("And then?")]
    with Engine.from_pretrained("demo", max_model_len=1024, store=store, read_only=True) as engine:
        before = engine.cache.num_variants
        assert run(engine, messages).reuse.reused_tokens >= first.num_prompt_tokens - 1
        assert engine.cache.num_variants == before


@pytest.mark.parametrize("way", ["invalidate", "erase"])
def test_an_invalidated_document_is_gone_from_conversations_too(tmp_path: Path, way: str) -> None:
    draw, store = random.Random(8), f"file://{tmp_path}"
    documents = [Document(words(draw, 30), id="anna"), Document(words(draw, 30), id="bob")]
    messages = [user("Who is named here?")]
    with Engine.from_pretrained("demo", max_model_len=1024, store=store, unprepared="compute") as engine:
        run(engine, messages, documents=documents[:1])
        run(engine, messages, documents=documents)
        assert run(engine, messages, documents=documents).reuse.computed_tokens == 1
        held = {meta.variant_id for meta in engine._chunks.variants}
        getattr(engine.documents, way)("bob")
        left = {meta.variant_id for meta in engine._chunks.variants}
        assert left < held and left, "what only the other document stands in stays"
        assert run(engine, messages, documents=documents[:1]).reuse.computed_tokens == 1
        report = run(engine, messages, documents=documents).reuse
        assert report.per_document[-1].reused_tokens == 0


def test_what_is_erased_during_an_answer_is_not_stored_behind_it(engine: Engine) -> None:
    draw = random.Random(9)
    documents = (Document(words(draw, 30), id="anna"), Document(words(draw, 30), id="bob"))
    request = Request(
        messages=[user("Who is named here?")], documents=documents, sampling=SamplingParams(80, ignore_eos=True)
    )
    deltas = engine.stream(request)
    next(deltas)
    engine.documents.erase("bob")
    assert list(deltas)[-1].response is not None
    assert run(engine, request.messages, documents=documents).reuse.per_document[-1].reused_tokens == 0


def test_flush_waits_for_what_a_finished_request_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is complete before its KV is stored."""
    keep, flushed, kept = RunCapture.keep, threading.Event(), threading.Event()
    messages, settings = [user(words(random.Random(9), 40))], {"max_model_len": 512, "store": f"file://{tmp_path}"}
    with Engine.from_pretrained("demo", **settings) as one, Engine.from_pretrained("demo", **settings) as other:

        def keep_late(*args: Any, **how: Any) -> None:
            wait_until(lambda: one._loop._pauses.num_pausing or flushed.is_set())
            keep(*args, **how)
            kept.set()

        with monkeypatch.context() as patched:
            patched.setattr(RunCapture, "keep", keep_late)
            run(one, messages)
            one.cache.flush()
            is_kept = kept.is_set()
            flushed.set()
        assert is_kept
        other.cache.refresh()
        assert run(other, messages).reuse.reused_tokens > 40
