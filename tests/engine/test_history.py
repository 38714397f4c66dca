"""Answers do not depend on what was asked before: passages are prepared for the first request that has them, and what
another prompt placed before a passage does not influence it."""

from __future__ import annotations

import queue
import random

import pytest

from ccjax.engine import Engine, Request
from ccjax.requests import SamplingParams
from ccjax.types import Document, VariantId

WORDS = "harbour museum garden river bridge market castle library tower village festival orchard lantern window".split()
QUESTION = "Which of these is named most often, and where?"


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("frame") / "frame.txt"
    path.write_text("A road leads from the hill to the sea.\n\nThe mill by the road was built long ago.")
    return str(path)


@pytest.fixture
def start(frame: str):
    engines: list[Engine] = []

    def start(**more) -> Engine:
        engines.append(Engine.from_pretrained("demo", max_model_len=1024, frame=frame, **more))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def passages(count: int) -> list[Document]:
    draw = random.Random(7)
    return [Document(" ".join(draw.choices(WORDS, k=20)) + ".", id=str(number)) for number in range(count)]


def ask(engine: Engine, documents: list[Document], reuse="bounded", question: str = QUESTION):
    messages = [{"role": "user", "content": question}]
    sampling = SamplingParams(12, ignore_eos=True, first_logits=True)
    return engine.run(Request(messages=messages, documents=tuple(documents), sampling=sampling, reuse=reuse))


def test_passages_are_prepared_for_the_first_request_that_has_them(start) -> None:
    engine, documents = start(), passages(5)
    first = ask(engine, documents[:4])
    told = first.reuse.per_document
    assert [part.framed for part in told] == [False, True, True, True, True]
    assert [part.cause for part in told[1:]] == ["new"] * 4
    assert sum(part.reused_tokens for part in told[1:]) == 0 and not first.reuse.exact
    assert first.reuse.computed_share > 1.0, "some tokens were computed twice"
    second = ask(engine, [*documents[3:0:-1], documents[4]], question="Where does the river begin, and who knows that?")
    told = second.reuse.per_document
    assert [part.framed for part in told] == [False, True, True, True, True]
    assert told[4].computed_tokens > 0.5 * told[4].num_tokens and told[4].cause == "new"
    assert all(part.computed_tokens == 0 for part in told[1:4])


def test_same_prompt_has_the_same_answer_in_any_order_of_requests(start) -> None:
    documents, draw = passages(10), random.Random(3)
    prompts = [draw.sample(documents, 4) for _ in range(6)]
    answers = []
    for order in range(3):
        engine = start()
        numbers = list(range(len(prompts)))
        random.Random(order).shuffle(numbers)
        by_prompt = {number: ask(engine, prompts[number]) for number in numbers}
        answers.append([(by_prompt[n].token_ids, by_prompt[n].first_logits.argmax()) for n in range(len(prompts))])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("unprepared", ["prepare", "compute"])
def test_kv_from_behind_another_prompts_passages_is_not_reused(start, unprepared) -> None:
    engine, (evil, *benign) = start(unprepared=unprepared), passages(5)
    for order in ([evil, *benign], [evil, *reversed(benign)], [benign[1], evil, *benign[2:]]):
        ask(engine, order)
        ask(engine, order, "exact", question="And what is said about windows, and by whom?")
    clean = start(unprepared=unprepared)
    wanted = ask(clean, [benign[0], benign[2], benign[3]])
    answer = ask(engine, [benign[0], benign[2], benign[3]])
    assert answer.token_ids == wanted.token_ids
    assert abs(answer.first_logits - wanted.first_logits).max() < 1e-4 * abs(wanted.first_logits).max()
    used = {part.chunk_id for part in answer.reuse.per_document if part.reused_tokens}
    behind = {
        meta.prefix_ids[1:] for meta in engine._chunks.variants if meta.chunk_id in used and meta.roles[-1] == "passage"
    }
    frame = tuple(chunk.chunk_id for chunk in engine.documents.frame.chunks(""))
    assert behind <= {(), frame}


def test_what_other_strategies_left_in_the_store_is_not_reused(start, tmp_path) -> None:
    url, (evil, *benign) = f"file://{tmp_path}", passages(5)
    with Engine.from_pretrained("demo", max_model_len=1024, store=url, strategy="cachecraft") as other:
        ask(other, [evil, *benign])
    engine = start(store=url, unprepared="compute")
    assert len(engine._chunks.variants) >= 5
    answer = ask(engine, benign[:3])
    assert answer.reuse.exact and sum(part.reused_tokens for part in answer.reuse.per_document[1:]) == 0


def test_attack_succeeds_where_kv_of_any_prompt_is_reused(start) -> None:
    """The check above would fail: without a frame what stood before a passage changes answers about it."""
    engine, (evil, *benign) = start(strategy="cachecraft"), passages(5)
    ask(engine, [evil, *benign])
    answer = ask(engine, [benign[0], benign[2], benign[3]])
    clean = start(strategy="cachecraft")
    wanted = ask(clean, [benign[0], benign[2], benign[3]])
    assert abs(answer.first_logits - wanted.first_logits).max() > 1e-3 * abs(wanted.first_logits).max()


def test_what_one_request_prepares_waiting_ones_use(start) -> None:
    engine, documents = start(), passages(5)
    runs: list[VariantId] = []
    keep = engine._chunks.capture.keep_prepared

    def counted(prefilled) -> None:
        runs.append(prefilled.plan.segments[-2].chunk_id)
        keep(prefilled)

    engine._chunks.capture.keep_prepared = counted
    answers = []
    events: queue.SimpleQueue = queue.SimpleQueue()
    for order in (documents[:4], documents[3::-1], documents[1:5]):
        messages = [{"role": "user", "content": QUESTION}]
        request = Request(messages=messages, documents=tuple(order), sampling=SamplingParams(2, ignore_eos=True))
        engine.submit(request, events.put)
    while len(answers) < 3:
        event = events.get(timeout=120)
        assert not isinstance(event, Exception), event
        answers += [event.response] if event.response is not None else []
    assert all(answer.reuse.prompt_tokens for answer in answers)
    assert len(runs) == len(set(runs)) == 5


def test_prompt_of_one_passage_is_computed_as_it_is(start) -> None:
    answer = ask(start(), passages(1))
    assert answer.reuse.exact and answer.reuse.computed_share == 1.0


def test_prompt_is_computed_if_its_passages_cannot_be_prepared(start, monkeypatch) -> None:
    engine, documents = start(), passages(4)
    monkeypatch.setattr(engine._chunks.capture, "store_new", lambda *args: 1 / 0)
    answer = ask(engine, documents)
    assert answer.reuse.exact and answer.token_ids == ask(engine, documents, "off").token_ids


def test_passages_are_prepared_once_for_all_instructions(start) -> None:
    engine, documents = start(), passages(4)

    def asked(system: str, order: list[Document]):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
        return engine.run(Request(messages=messages, documents=tuple(order), sampling=SamplingParams(2))).reuse

    asked("Today is the first of May.", documents)
    later = asked("Today is the second of May, and it rains.", documents[::-1])
    assert all(part.framed and not part.computed_tokens for part in later.per_document if part.role == "passage")


def test_kv_for_another_mode_is_no_base_for_this_one(start) -> None:
    engine, documents = start(), passages(4)
    ask(engine, documents, "fast")
    assert ask(engine, documents).reuse.recomputed_tokens > 0
    assert ask(engine, documents).reuse.recomputed_tokens == 0, "the same prompt again"
    assert ask(engine, documents, "fast").reuse.recomputed_tokens > 0
