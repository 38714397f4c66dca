"""Answers that must match a grammar: every one does, whatever the batch does; free answers stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest

from ccjax.engine import Constraint, Engine, Request, Response, SamplingParams
from ccjax.errors import RequestError
from ccjax.models.llama3.steps import sample_step
from ccjax.runner import decode as decode_module
from ccjax.runner import sampling as sampling_module
from ccjax.runner.budgets import least_pool_bytes
from ccjax.runner.device import kv_spec_of
from ccjax.text.grammar import Matcher
from tests.engine import schemas
from tests.engine.helpers import TinyModel
from tests.engine.test_answers import alone, check_all
from tests.engine.test_batch_loop import Client

QUESTION = [{"role": "user", "content": "Describe the museum."}]
NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
NAME |= {"additionalProperties": False}
EXPRESSION = """
root ::= term ("+" term){1,3}
term ::= [0-9]{1,2} | "(" root ")"
"""


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(model, max_model_len=1024, max_num_seqs=32) as engine:
        yield engine


def ask(constraint: Constraint | None, **sampling: Any) -> Request:
    sampling = {"max_new_tokens": 400, "temperature": 1.0, "seed": 3} | sampling
    return Request(messages=QUESTION, sampling=SamplingParams(constraint=constraint, **sampling))


def together(engine: Engine, requests: list[Request]) -> list[Response]:
    """The responses to requests that run side by side."""
    return [client.response() for client in [Client(engine, request) for request in requests]]


def check_schemas(engine: Engine, seeds: range) -> None:
    drawn = [schemas.draw(seed) for seed in seeds]
    requests = [
        ask(Constraint.json(schema), seed=seed, max_new_tokens=900) for seed, schema in zip(seeds, drawn, strict=True)
    ]
    for schema, response in zip(drawn, together(engine, requests), strict=True):
        assert response.finish_reason == "stop", (schema, response.text)
        jsonschema.validate(json.loads(response.text), schema, jsonschema.Draft202012Validator)


def test_json_answers_validate(engine: Engine) -> None:
    check_schemas(engine, range(40))


@pytest.mark.slow
def test_500_json_answers_validate(engine: Engine) -> None:
    check_schemas(engine, range(1000, 1500))


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint.regex(r"[a-f]{4}/\d+\.\d{2} €"), r"[a-f]{4}/\d+\.\d{2} €"),
        (Constraint.regex(r"[\w.]{9}\W\D"), r"(?a)[\w.]{9}\W\D"),
        (Constraint.regex("one\ntwo\\/(x|y)"), "one\ntwo/(x|y)"),
        (Constraint.choice(["yes", "no", 'grün "maybe"\n']), 'yes|no|grün "maybe"\n'),
        (Constraint.choice([f"value {number}" for number in range(3000)]), r"value \d{1,4}"),
        (Constraint(EXPRESSION), r"[0-9(].*\+.*[0-9)]"),
        (Constraint('start: "<" NAME ">"\nNAME: /[A-Z]{2,4}/'), "<[A-Z]{2,4}>"),
        (Constraint.json(), r"(?s)\{.*"),
    ],
)
def test_answers_match_the_grammar(engine: Engine, constraint: Constraint, pattern: str) -> None:
    for response in together(engine, [ask(constraint, seed=seed, max_new_tokens=100) for seed in range(4)]):
        assert re.fullmatch(pattern, response.text), response.text


def test_an_answer_that_is_complete_stops_and_one_that_is_too_long_is_cut(engine: Engine) -> None:
    answer = engine.generate("Describe the museum.", constraint=Constraint.choice(["museum"]), max_new_tokens=40)
    assert (answer.text, answer.finish_reason) == ("museum", "stop")
    cut = engine.run(ask(Constraint.json(NAME), max_new_tokens=4))
    assert len(cut.token_ids) == 4 and cut.finish_reason == "length" and cut.text.startswith("{")
    stopped = engine.run(ask(Constraint.regex("[a-z]{3} stop [a-z]{3}"), stop=(" stop",)))
    assert re.fullmatch("[a-z]{3}", stopped.text) and stopped.finish_reason == "stop"


def test_constrained_and_free_requests_share_a_batch(engine: Engine) -> None:
    requests = [
        ask(Constraint.json(NAME) if seed % 2 else None, seed=seed, n=1 + seed % 3, max_new_tokens=60, logprobs=0)
        for seed in range(8)
    ]
    wanted = [alone(engine, request) for request in requests]
    clients = [Client(engine, request) for request in requests]
    for client, request, answers in zip(clients, requests, wanted, strict=True):
        response = check_all(client, answers)
        for choice in response.choices if request.sampling.constraint is not None else ():
            jsonschema.validate(json.loads(choice.text), NAME)


def test_masks_reach_the_device_only_with_constrained_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    step = sampling_module.sample_step

    def seen(logits: jax.Array, state: Any, **settings: Any) -> Any:
        masks.append(state.allowed)
        return step(logits, state, **settings)

    monkeypatch.setattr(sampling_module, "sample_step", seen)
    engine.run(ask(None, max_new_tokens=5))
    assert masks and all(mask is None for mask in masks)
    masks.clear()
    engine.run(ask(Constraint.choice(["museum"])))
    assert masks and all(mask is not None for mask in masks)


def test_sampling_of_constrained_answers_is_compiled_ahead(engine: Engine) -> None:
    steps = engine._device.steps
    sample_step.clear_cache()
    for key in steps.all():
        if key[0] == "masks":
            steps.compile(key)
    before = sample_step._cache_size()
    engine.run(ask(Constraint.choice(["museum"])))
    assert before > 0 and sample_step._cache_size() == before


def test_log_probabilities_are_those_without_the_constraint(engine: Engine) -> None:
    free = engine.run(ask(None, temperature=0.0, logprobs=5, max_new_tokens=1))
    answer = engine.run(ask(Constraint.choice(["zebra"]), logprobs=5, first_logits=True))
    assert answer.text == "zebra" and answer.logprobs is not None and free.logprobs is not None
    assert answer.first_logits is not None
    logits = answer.first_logits.astype(np.float64)
    wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    first = answer.logprobs[0]
    assert first.logprob == pytest.approx(wanted[first.token_id], abs=1e-4)
    assert first.logprob < -1.0, "else it would equal the share among the tokens that are allowed, 0"
    assert [token_id for token_id, _, _ in first.top] == [token_id for token_id, _, _ in free.logprobs[0].top]


def test_answers_are_the_same_after_preemption_and_retries(
    model: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 40}
    requests = [ask(Constraint.json(schema | {"maxItems": 40}), seed=seed, max_new_tokens=300) for seed in range(12)]
    wanted = together(engine, requests)
    num_bytes = least_pool_bytes(kv_spec_of(engine.model_config, "float32"), 512)
    with Engine.from_pretrained(model, max_model_len=512, device_cache_bytes=num_bytes) as small:
        assert [one.token_ids for one in together(small, requests)] == [one.token_ids for one in wanted]
        assert small.batch_counts.preemptions > 0
    step, calls = decode_module.paged_decode_step, []

    def fails_once(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 50:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a test")
        return step(*args, **settings)

    monkeypatch.setattr(decode_module, "paged_decode_step", fails_once)
    before = engine.batch_counts.retries
    assert [one.token_ids for one in together(engine, requests)] == [one.token_ids for one in wanted]
    assert engine.batch_counts.retries > before


def test_a_grammar_that_becomes_too_complex_ends_only_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = Matcher._compute, []

    def fails(matcher: Matcher) -> bytes:
        calls.append(1)
        if len(calls) == 3:
            matcher._error = "too many states"
        return compute(matcher)

    monkeypatch.setattr(Matcher, "_compute", fails)
    failing = Client(engine, ask(Constraint.regex("[a-z]{30}")))
    other = Client(engine, ask(None, max_new_tokens=20))
    assert len(other.response().token_ids) > 0
    with pytest.raises(RequestError, match="constraint: wanted one that llguidance can follow, got: too many states"):
        failing.response()


BAD = [
    (Constraint.json({"type": "string", "pattern": "(?=a)b"}), "pattern"),
    (Constraint.json({"type": "string", "format": "no-such-format"}), "no-such-format"),
    (Constraint.json({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf"),
    (Constraint.json({"$ref": "https://example.org/schema.json"}), "example.org"),
    (Constraint.json({"type": "integer", "minimum": 3, "maximum": 2}), "nsatisfiable"),
    (Constraint.json({"type": "wizard"}), "wizard"),
    (Constraint.regex("(a"), "unclosed group"),
    (Constraint("start: missing"), "missing"),
    (Constraint("no grammar at all"), "GBNF"),
]


@pytest.mark.parametrize(("constraint", "word"), BAD)
def test_what_a_grammar_cannot_express_is_refused(engine: Engine, constraint: Constraint, word: str) -> None:
    with pytest.raises(RequestError, match="^constraint: wanted") as refused:
        engine.run(ask(constraint))
    assert word in str(refused.value) and len(str(refused.value)) < 700
    assert refused.value.argument == "constraint"


def test_wrong_types_and_impossible_combinations_are_refused() -> None:
    makers: list[Any] = [
        lambda: Constraint(""),
        lambda: Constraint(5),  # type: ignore[arg-type]
        lambda: Constraint.json([1]),  # type: ignore[arg-type]
        lambda: Constraint.json({"const": object()}),
        lambda: Constraint.regex(""),
        lambda: Constraint.choice([]),
        lambda: Constraint.choice("yes"),
        lambda: Constraint.choice(["yes", ""]),
        lambda: SamplingParams(constraint="start: /a/"),  # type: ignore[arg-type]
    ]
    for make in makers:
        with pytest.raises(RequestError, match="^constraint: wanted"):
            make()
    with pytest.raises(RequestError, match="^ignore_eos: wanted false"):
        SamplingParams(constraint=Constraint.regex("a"), ignore_eos=True)


def test_a_model_without_a_tokenizer_takes_no_constraint() -> None:
    request = Request(segments=[(), (1, 2)], sampling=SamplingParams(constraint=Constraint.regex("a")))
    with TinyModel().engine(max_model_len=512) as engine, pytest.raises(RequestError, match="no tokenizer"):
        engine.run(request)
