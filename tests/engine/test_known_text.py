"""Text of stored passages is reused wherever it stands in a plain prompt: split elsewhere, in part, in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ccjax.engine import Engine, Request, SamplingParams
from ccjax.prompts import chunk_id, tenant_tag
from ccjax.types import Document
from tests.cache.test_known_text import longest_first
from tests.engine.documents import TEXTS, engines, write_model

ANNA, BOB, CARLA, DINO = TEXTS.values()
FIRST = f"{ANNA} {BOB} {CARLA} {ANNA}"
SECOND = f"{DINO} {CARLA} {BOB} {DINO}"
QUESTION = "Who sings in Paris?"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory)


@pytest.fixture
def start(model):
    with engines(model) as start:
        yield lambda **more: start(**{"strategy": "reuse", "max_model_len": 1024, **more})


def request(context: str, **more: Any) -> Request:
    content = f"{context}\n\n{QUESTION}"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}]
    return Request(messages=messages, sampling=SamplingParams(max_new_tokens=4), **more)


def agreeing(engine: Engine, asked: Request) -> int:
    """Tokens of a prompt that agree with stored passages in runs of 24 or more, by comparing all with all."""
    roles = {}
    for meta in engine._chunks.variants:
        roles[meta.chunk_id] = meta.roles[-1]
    tokens = engine._chunks.variants.tokens
    stored = [list(tokens.chunk(key).token_ids) for key in tokens.known() if roles.get(key) == "passage"]
    ids = engine.assemble(asked).token_ids.tolist()
    return sum(end - start for start, end, _, _ in longest_first(ids[:-1], stored))


RESHAPED = {
    "split at another place": f"{CARLA} {ANNA}\n\n{DINO} {CARLA} {BOB}",
    "half a passage": f"Here is a part: {BOB} {CARLA} and nothing else.",
    "no border at all": f"I read this yesterday: {FIRST} Then I read this: {SECOND} What do you think?",
    "in JSON": json.dumps([{"content": FIRST, "distance": 0.31}, {"content": SECOND, "distance": 0.42}]),
    "in another order in JSON": json.dumps({"results": [{"text": f"{SECOND}\n\n{FIRST}", "id": 7}]}),
    "edited in the middle": f"{ANNA} {BOB} Nobody knows her. {CARLA} {ANNA}\n\n{SECOND}",
}


@pytest.mark.parametrize("name", RESHAPED)
def test_what_agrees_with_pasted_passages_is_reused(start, name):
    engine = start()
    engine.run(request(f"{FIRST}\n\n{SECOND}"))
    asked = request(RESHAPED[name])
    wanted = agreeing(engine, asked)
    report = engine.run(asked).reuse
    assert report.reused_tokens >= wanted > 30
    full = engine.run(request(RESHAPED[name], reuse="off"))
    assert full.reuse.prompt_tokens == report.prompt_tokens, "tokens never depend on what is stored"


def test_part_of_a_document_is_reused_from_its_kv(start):
    engine = start()
    engine.generate(QUESTION, [Document(FIRST, "first"), Document(SECOND, "second")], max_new_tokens=1)
    asked = request(f"Somebody wrote: {BOB} {CARLA}")
    wanted = agreeing(engine, asked)
    assert engine.run(asked).reuse.reused_tokens >= wanted > 30
    (piece,) = [segment for segment in engine.assemble(asked).segments if segment.source is not None]
    assert piece.role == "passage" and piece.source is not None and piece.source.offset > 0
    assert piece.source.chunk_id == chunk_id(engine._builder.document_ids(Document(FIRST)))


def test_mode_exact_cuts_prompts_as_if_nothing_were_stored(start):
    engine, other = start(), start()
    engine.run(request(f"{FIRST}\n\n{SECOND}"))
    for name, context in RESHAPED.items():
        asked = request(context, reuse="exact")
        assert engine.assemble(asked).segments == other.assemble(asked).segments, name
        assert all(segment.source is None for segment in engine.assemble(asked).segments)
        assert engine.run(asked).token_ids == engine.run(request(context, reuse="off")).token_ids


def test_known_text_is_the_tenants_own(start):
    engine = start()
    engine.run(request(f"{FIRST}\n\n{SECOND}", cache_salt="a"))
    context = RESHAPED["half a passage"]
    for salt, is_known in (("", False), ("b", False), ("a", True)):
        sources = [segment.source for segment in engine.assemble(request(context, cache_salt=salt)).segments]
        assert any(sources) == is_known
    found = engine.assemble(request(context, cache_salt="a")).segments
    assert all(segment.chunk.chunk_id.endswith(tenant_tag("a")) for segment in found)


def test_only_passages_are_looked_for_and_only_while_they_are_stored(start):
    engine = start()
    engine.run(request(f"{FIRST}\n\n{SECOND}"))
    variants = engine._chunks.variants
    passages = {meta.chunk_id for meta in variants if meta.roles[-1] == "passage"}
    assert passages and {key for key in variants.chunk_ids() if key in variants.known} == passages
    for meta in list(variants):
        variants.discard(meta.variant_id)
    assert len(variants.known) == 0
    asked = request(RESHAPED["half a passage"])
    assert all(segment.source is None for segment in engine.assemble(asked).segments)


def test_a_new_process_finds_the_text_with_its_first_prompt(start, tmp_path):
    store = f"file://{tmp_path}/kv"
    with start(store=store) as engine:
        engine.run(request(f"{FIRST}\n\n{SECOND}"))
        engine.cache.flush()
        asked = request(RESHAPED["half a passage"])
        wanted = agreeing(engine, asked)
    engine = start(store=store)
    assert engine.run(asked).reuse.reused_tokens >= wanted > 30


def test_the_question_keeps_a_token_even_if_all_is_known(start):
    engine = start()
    engine.generate(QUESTION, [Document(FIRST)], max_new_tokens=1)
    asked = Request(prompt=f"Please read what I found.\n\n{FIRST}", sampling=SamplingParams(max_new_tokens=1))
    prompt = engine.assemble(asked)
    assert prompt.segments[-1].role == "question" and prompt.segments[-1].chunk.token_ids
    assert [segment.role for segment in prompt.segments].count("passage") == 1


@pytest.mark.parametrize(("frame", "columns"), [("default", {0}), ("none", {16})])
def test_masses_are_computed_only_where_chunks_are_stored(start, frame, columns):
    """With a frame not in the packs of requests."""
    engine = start(strategy="auto", frame=frame)
    for context in (FIRST, SECOND):
        engine.run(request(context))
    assert {size[2] for size in engine._device.compiled.compiled("pack")} == columns


@pytest.mark.parametrize(
    ("settings", "takes_none"),
    [
        ({"frame": "default"}, True),
        ({"frame": "default", "focus_window": 4}, False),  # masses decide the focus
        ({"frame": "none"}, False),
        ({"frame": "none", "read_only": True}, True),
    ],
)
def test_sizes_are_compiled_with_the_masses_that_requests_take(start, settings, takes_none):
    steps = start(strategy="auto", **settings)._device.steps
    columns = {size[2] for kind, size in steps.all() if kind == "pack"}
    assert 16 in columns and (0 in columns) == takes_none
