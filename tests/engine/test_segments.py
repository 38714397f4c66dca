"""Prompts of segments with roles in any order: text is reused behind the very same prefix alone, passages anywhere."""

from __future__ import annotations

import pytest

from ccjax.errors import RequestError
from ccjax.requests import Request, SamplingParams
from tests.engine.helpers import TinyModel, draw_segments

SEED = 7
MODEL = TinyModel()


@pytest.fixture(scope="module")
def parts():
    import numpy as np

    system, *passages, question = draw_segments(np.random.default_rng(SEED), [20, 24, 16, 18])
    return system, passages, question


@pytest.fixture
def ask():
    with MODEL.engine(strategy="cachecraft", recompute_ratio=0.25) as engine:

        def run(*segments, reuse="bounded"):
            return engine.run(Request(segments=segments, reuse=reuse, sampling=SamplingParams(max_new_tokens=12)))

        yield run


def told(response) -> list[tuple[str, int, bool]]:
    """Role, reused tokens and exactness of each cached segment."""
    return [(part.role, part.reused_tokens, part.exact) for part in response.reuse.per_document]


def test_text_between_passages_is_reused_behind_the_same_prefix(ask, parts):
    system, (first, text, second, _), question = parts
    prompt = [("instructions", system), ("passage", first), ("text", text), ("passage", second), ("question", question)]
    full = ask(*prompt, reuse="off")
    assert told(ask(*prompt)) == [(role, 0, True) for role in ("instructions", "passage", "text", "passage")]
    again = ask(*prompt, reuse="exact")
    lengths = (len(system), len(first), len(text), len(second))
    roles = ("instructions", "passage", "text", "passage")
    assert told(again) == [(role, length, True) for role, length in zip(roles, lengths, strict=True)]
    assert again.token_ids == full.token_ids


def test_text_behind_another_prefix_is_computed_and_passages_are_reused(ask, parts):
    system, (first, text, second, _), question = parts
    ask(("instructions", system), ("passage", first), ("text", text), ("passage", second), ("question", question))
    swapped = ask(
        ("instructions", system), ("passage", second), ("text", text), ("passage", first), ("question", question)
    )
    assert told(swapped) == [
        ("instructions", len(system), True),
        ("passage", len(second) * 3 // 4, False),
        ("text", 0, False),
        ("passage", len(first) * 3 // 4, False),
    ]


def test_a_turn_at_the_end_is_reused_by_the_next(ask, parts):
    system, (first, text, second, third), _ = parts
    turns = [("instructions", system), ("passage", first), ("text", text)]
    ask(*turns)
    later = [*turns, ("text", second), ("passage", third), ("text", second)]
    full, response = ask(*later, reuse="off"), ask(*later)
    assert told(response)[:3] == [
        ("instructions", len(system), True),
        ("passage", len(first), True),
        ("text", len(text), True),
    ]
    assert response.token_ids == full.token_ids
    # The same text again at the end of the prompt: it is computed, since it gives the answer's first token.
    assert told(ask(*later))[-1] == ("text", 0, True)


def test_several_instructions_at_the_beginning_count_as_one_prefix(ask, parts):
    system, (more, first, second, _), question = parts
    head = [("instructions", system), ("instructions", more)]
    ask(*head, ("passage", first), ("passage", second), ("question", question))
    swapped = ask(*head, ("passage", second), ("passage", first), ("question", question))
    assert told(swapped)[:2] == [("instructions", len(system), True), ("instructions", len(more), True)]
    assert [reused > 0 for _, reused, _ in told(swapped)] == [True] * 4


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([("passage", [1, 2])], "question or text at the end, got role 'passage'"),
        ([("question", [1]), ("question", [2])], "question only at the end"),
        ([("answer", [1]), ("question", [2])], "as role, got 'answer'"),
        ([("text", []), ("question", [2])], "at least one token"),
        ([("text", [96, 97]), ("question", [2])], "token ids from 0 to 96, got 97"),
    ],
)
def test_bad_segments_are_named(ask, segments, message):
    with pytest.raises(RequestError, match=message):
        ask(*segments)
