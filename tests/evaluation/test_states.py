"""What a store holds in each state, and what an engine with the default options reuses of it."""

from __future__ import annotations

import pytest

from ccjax.engine import Engine, EngineConfig
from ccjax.evaluation.questions import demo_questions
from ccjax.evaluation.states import STATES, fill, steps

QUESTIONS = demo_questions(1, (3,), kinds=("single", "pronoun"))
PROMPTS = [question.documents for question in QUESTIONS]


@pytest.fixture(scope="module", params=STATES)
def filled(request, model, tmp_path_factory):
    """A state, the URL of a store in it, and how often its filling told of a step."""
    store, told = tmp_path_factory.mktemp(request.param).as_uri(), []
    fill(model, EngineConfig(store=store), request.param, PROMPTS, lambda: told.append(1))
    return request.param, store, len(told)


def test_stored_variants_have_the_prefixes_of_the_state(model, filled):
    state, store, told = filled
    assert told == len(steps(state, PROMPTS)) == {"empty": 0, "seen": 2, "idle": 2}.get(state, 6)
    with Engine(model, EngineConfig(store=store)) as engine:
        found = sorted(len(meta.prefix_ids) for meta in engine._chunks.variants)
        (frame,) = {len(engine.documents.frame.documents)}
        compared = sum(bool(meta.token_deviations) for meta in engine._chunks.variants)
    # The instructions, those of the frame one behind the other, and every passage behind all of these.
    framed = [*range(1, 1 + frame), *[1 + frame] * 6]
    alone, seen, runs = [0, *[1] * 6], [0, 1, 1, 2, 2, 3, 3], [0, 0]
    wanted = {"empty": [], "alone": alone, "prepared": [*alone, *framed], "seen": [*seen, *framed, *runs]}
    wanted["idle"] = [*alone, *framed, *runs]
    assert found == sorted(wanted[state])
    assert compared >= 6 if state in ("prepared", "idle") else compared == 0


def test_default_options_reuse_stored_variants(model, filled):
    state, store, _ = filled
    with Engine(model, EngineConfig(store=store, read_only=True)) as engine:
        parts = engine.generate(QUESTIONS[0].text, PROMPTS[0], max_new_tokens=1).reuse.per_document[1:]
    first, *rest = [part.num_tokens - part.computed_tokens for part in parts]
    assert (first > 0) == (state != "empty") and all((one > 0) == (state != "empty") for one in rest)
    assert [part.framed for part in parts] == [state == "seen", *[state not in ("empty", "alone")] * 2]
    assert parts[0].exact == (state != "seen"), "for the prompt in another order all were prepared behind the frame"
