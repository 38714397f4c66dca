"""The question of a plain prompt, behind its passages, before them, or all that the last message says."""

from __future__ import annotations

import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.prompts import Prompt
from tests.engine.documents import TEXTS, engines, write_model

ANNA, BOB, CARLA, DINO = TEXTS.values()
FIRST, SECOND = f"{ANNA} {BOB} {CARLA} {ANNA}", f"{DINO} {CARLA} {BOB} {DINO}"
QUESTION = "Who sings in Paris, Anna or Bob?"
NONE = (0, 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with engines(write_model(tmp_path_factory)) as start:
        yield start(max_model_len=1024)


def asked(*contents: str, **more) -> Request:
    """Contents in turn from the user and the assistant."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    return Request(messages=messages, sampling=SamplingParams(max_new_tokens=2), **more)


def texts(engine, prompt: Prompt) -> tuple[str, str]:
    """The early question and the last segment."""
    decode = engine.tokenizer.decode
    return decode(prompt.token_ids[slice(*prompt.early_question)].tolist()), decode(list(prompt.question))


@pytest.mark.parametrize("ending", ["", "\n\n", "\n</context>", "\n```\n"])
def test_what_stands_before_the_passages_is_the_question_if_nothing_follows(engine, ending):
    prompt = engine.assemble(asked(f"{QUESTION}\n\nContext:\n{FIRST}\n\n{SECOND}{ending}"))
    early, last = texts(engine, prompt)
    assert early.strip().startswith(QUESTION) and "repairs" not in early
    assert QUESTION not in last and len(prompt.passages) == 2


@pytest.mark.parametrize("question", [QUESTION, "Why?", "Ist das so?"])
def test_what_follows_the_passages_is_the_question(engine, question):
    prompt = engine.assemble(asked(f"Please read this with care:\n\n{FIRST}\n\n{SECOND}\n\n{question}"))
    assert prompt.early_question == NONE and question in texts(engine, prompt)[1]


@pytest.mark.parametrize("message", [FIRST, f"{FIRST}\n\n{SECOND}"])
def test_a_message_that_says_nothing_else_is_the_question(engine, message):
    before = f"{SECOND}\n\n{FIRST}\n\nSo much for that."
    prompt = engine.assemble(asked(before, "Well.", message))
    assert prompt.early_question == NONE and message in texts(engine, prompt)[1]
    assert len(prompt.passages) == 2, "those of the first message"


def test_neither_documents_nor_an_assistants_words_are_looked_at(engine):
    with_documents = asked(f"{QUESTION}\n\n{FIRST}", documents=[{"text": SECOND}])
    assert engine.assemble(with_documents).early_question == NONE
    assert engine.assemble(asked(QUESTION, f"He said:\n\n{FIRST}")).early_question == NONE


def test_a_question_before_its_passages_chooses_what_is_recomputed(engine):
    first, second = " ".join([FIRST, SECOND] * 2), " ".join([SECOND, ANNA, SECOND, DINO])  # 15 % are enough to choose
    engine.run(asked(f"{first}\n\n{second}\n\n{QUESTION}"))
    request = asked(f"{QUESTION} I wonder.\n\n{second}\n\n{first}")
    prompt = engine.assemble(request)
    num_early = prompt.early_question[1] - prompt.early_question[0]
    report = engine.run(request).reuse
    assert report.recomputed_tokens >= num_early + len(prompt.question) > len(prompt.question)
    run = round(report.computed_share * report.prompt_tokens)
    assert run == report.computed_tokens + report.recomputed_tokens + num_early + len(prompt.question)
    full = engine.run(asked(request.messages[0]["content"], reuse="off")).reuse
    assert full.computed_tokens == report.prompt_tokens
