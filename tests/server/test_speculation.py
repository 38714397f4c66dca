"""Answers that begin while passages are searched for: clients get the same answers as otherwise, and abandoned ones
leave nothing behind."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence

import pytest

from ccjax.engine import Delta, Request
from ccjax.engine.speculation import NUM_STAGES, SearchTimes, SpeculativeAnswer
from ccjax.errors import OverloadError, RequestError
from ccjax.retrieval import Passage
from ccjax.server import ServerSettings, own_documents
from ccjax.types import Document
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import Server, StartServer
from tests.server.test_traffic import metrics

QUESTION = "Who repairs violins in Paris, and who paints houses in Rome?"


@pytest.fixture(scope="module")
def staged(start_server: StartServer) -> Iterator[Server]:
    with start_server(ServerSettings(top_k=2, repair=False)) as server:
        server.service._searches = AlwaysSlow()
        yield server


class AlwaysSlow(SearchTimes):
    """As if all searches took long."""

    @property
    def is_slow(self) -> bool:
        return True


def searching(
    server: Server, monkeypatch: pytest.MonkeyPatch, stages_of: Callable[[list[Passage]], Iterator[list[Passage]]]
) -> None:
    """Searches return the stages of `stages_of(final passages)`, and then the final passages."""
    search = server.retriever.stages

    def stages(query: str, top_k: int, num_stages: int, **how) -> Iterator[tuple[list[Passage], bool]]:
        ((final, _),) = search(query, top_k, 1, **how)
        assert num_stages == NUM_STAGES
        for found in stages_of(final):
            yield found, False
        yield final, True

    monkeypatch.setattr(server.retriever, "stages", stages)


def ask(server: Server, question: str, **more) -> tuple[str, dict]:
    """The answer and its reuse report."""
    with server.client() as client:
        answer = client.chat.completions.create(
            model=server.engine.model_name,
            messages=[{"role": "user", "content": question}],
            max_tokens=8,
            extra_body=more,
        )
    assert answer.model_extra is not None
    return answer.choices[0].message.content or "", answer.model_extra["reuse"]


def is_quiet(server: Server) -> bool:
    counts = server.engine.batch_counts
    return counts.running == counts.waiting == 0


def counted(server: Server) -> dict[str, float]:
    return {name: metrics(server).get(("ccjax_speculations_total", name), 0.0) for name in ("right", "wrong")}


def rise(server: Server, before: dict[str, float]) -> tuple[float, float]:
    after = counted(server)
    return after["right"] - before["right"], after["wrong"] - before["wrong"]


def test_speculative_answer_can_finish_before_the_search(staged: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = ask(staged, QUESTION, reuse="off")
    was_busy = []

    def stages(final: list[Passage]) -> Iterator[list[Passage]]:
        yield final
        was_busy.append(
            not is_quiet(staged) and staged.service.backend.worker.thread.is_wanted()
        )  # no idle work meanwhile
        wait_until(lambda: is_quiet(staged), timeout_s=60)
        yield final

    before = counted(staged)
    searching(staged, monkeypatch, stages)
    answer, report = ask(staged, QUESTION, reuse="off")
    assert answer == plain and report["mode"] == "off" and was_busy == [True]
    assert rise(staged, before) == (1, 0)


def test_an_answer_from_other_passages_is_abandoned(staged: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = ask(staged, QUESTION, reuse="off")
    others = staged.retriever.search("whales chess", 2)
    free_pages = staged.engine.batch_counts.free_pages

    def stages(final: list[Passage]) -> Iterator[list[Passage]]:
        yield others
        yield final[:1]
        yield [*final[:1], *others[:1]]

    before = counted(staged)
    searching(staged, monkeypatch, stages)
    assert ask(staged, QUESTION, reuse="off")[0] == plain
    right, wrong = rise(staged, before)
    assert (right, wrong) == (0, 3)
    wait_until(lambda: is_quiet(staged), timeout_s=60)
    assert staged.engine.batch_counts.free_pages == free_pages and not staged.engine._chunks.store._pins


def test_passages_reordered_by_the_search_are_computed_once(staged: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    question = "Who studies whales, and who bakes bread in Naples?"

    def stages(final: list[Passage]) -> Iterator[list[Passage]]:
        yield final[::-1]
        wait_until(lambda: is_quiet(staged), timeout_s=60)

    before = counted(staged)
    searching(staged, monkeypatch, stages)
    _, report = ask(staged, question)
    documents = [document for document in report["per_document"] if document["role"] == "passage"]
    assert len(documents) == 2 and all(document["computed_tokens"] == 0 for document in documents)
    assert rise(staged, before) == (0, 1)


def test_without_capacity_no_speculation_starts(start_server) -> None:
    with start_server(ServerSettings(top_k=2, max_prefill_bs=0)) as server:
        server.service._searches = AlwaysSlow()
        assert len(ask(server, QUESTION)[0]) > 0 and counted(server) == {"right": 0, "wrong": 0}


def test_answers_begin_during_searches_once_these_take_long(start_server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two searches are measured; the time that an answer takes meanwhile is not the search's."""
    with start_server(ServerSettings(top_k=2)) as server:
        stages, offered, clock = server.retriever.stages, [], [0.0]
        search_s = 0.8

        def slow(query: str, top_k: int, num_stages: int, **how) -> Iterator[tuple[list[Passage], bool]]:
            ((final, _),) = stages(query, top_k, 1, **how)
            clock[0] += search_s
            if num_stages > 1:
                yield final, False
            yield final, True

        def offer(answer: SpeculativeAnswer, documents: Sequence[Document]) -> None:
            offered.append(documents)
            clock[0] += 60.0
            begin(answer, documents)

        begin = SpeculativeAnswer.offer
        monkeypatch.setattr(server.retriever, "stages", slow)
        monkeypatch.setattr(SpeculativeAnswer, "offer", offer)
        monkeypatch.setattr(own_documents, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
        for _ in range(2):
            ask(server, QUESTION)
            assert counted(server) == {"right": 0, "wrong": 0}
        ask(server, QUESTION)
        assert counted(server) == {"right": 1, "wrong": 0}
        search_s = 0.0
        while server.service._searches.is_slow:
            ask(server, QUESTION)
        assert len(offered) < 10
        num_offered = len(offered)
        ask(server, QUESTION)
        assert len(offered) == num_offered


def test_searches_are_slow_from_a_fifth_of_a_second_until_they_take_half_of_it():
    """However long the first one takes."""
    times, found = SearchTimes(), []
    assert not times.is_slow
    for seconds in (60.0, 0.4, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.0, 0.0):
        times.add(seconds)
        found.append(times.is_slow)
    assert found == [False, *[True] * 9, False]
    for _ in range(9):
        times.add(0.18)
    assert not times.is_slow


def test_client_disconnect_during_the_search_leaves_no_request_running(
    staged: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def stages(final: list[Passage]) -> Iterator[list[Passage]]:
        yield final
        began.set()
        go_on.wait(300)
        yield final[:1]
        ended.set()

    searching(staged, monkeypatch, stages)
    question = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400, "ignore_eos": True}
    with patience.leaving(staged.url, question):
        assert began.wait(120)
    wait_until(lambda: is_quiet(staged), timeout_s=60)
    go_on.set()
    assert ended.wait(120)
    wait_until(lambda: is_quiet(staged) and not staged.engine._chunks.store._pins, timeout_s=60)


def test_request_refused_after_the_search_cancels_its_speculation(
    staged: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    submit = Recorded()

    def refuse(request: Request) -> int:
        raise RequestError("messages", "wanted something else")

    monkeypatch.setattr(staged.engine, "submit", submit)
    monkeypatch.setattr(staged.engine, "assemble", refuse)
    searching(staged, monkeypatch, lambda final: iter([final]))
    with pytest.raises(openai.BadRequestError, match="wanted something else"):
        ask(staged, QUESTION)
    assert len(submit.asked) == 1 and submit.cancelled == [0]


def test_error_names_the_bad_setting() -> None:
    with pytest.raises(ValueError, match="max_prefill_bs: wanted an integer of at least 0, got"):
        ServerSettings(max_prefill_bs=-1)


class Recorded:
    """An engine's `submit` that answers nothing by itself."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[Request] = []
        self.cancelled: list[int] = []
        self.emits: list[Callable[[Delta | Exception], None]] = []
        self.on_starts: list[Callable[[], None]] = []

    def __call__(self, request, emit, *, on_start):
        number = len(self.asked)
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        self.emits.append(emit)
        self.on_starts.append(on_start)
        return lambda: self.cancelled.append(number)


def request_of(documents: Sequence[Document]) -> Request:
    return Request(messages=[{"role": "user", "content": "?"}], documents=documents)


def begun(submit: Recorded, waiting: int = 0) -> SpeculativeAnswer:
    return SpeculativeAnswer(submit, request_of, lambda: waiting, max_pending=2)


DOCUMENTS = (Document("a", score=0.5), Document("b", score=0.25))


def test_text_is_held_back_until_the_passages_are_final() -> None:
    submit, got, starts = Recorded(), [], []
    speculation = begun(submit)
    speculation.offer(DOCUMENTS)
    submit.on_starts[0]()
    submit.emits[0](first := Delta("x", (1,)))
    assert got == [] and speculation.num_started == 1
    final = request_of([Document("a", score=0.75), DOCUMENTS[1]])  # scores are not in the prompt
    cancel = speculation.start(final, got.append, on_start=lambda: starts.append(1))
    assert got == [first] and starts == [1] and speculation.was_right
    submit.emits[0](then := Delta("y", (2,)))
    assert got == [first, then] and len(submit.asked) == 1
    speculation.close()
    assert submit.cancelled == []
    cancel()
    assert submit.cancelled == [0]


@pytest.mark.parametrize("error", [OverloadError("full", 1.0), RequestError("documents", "too long")])
def test_refused_speculation_fails_the_request_only_after_the_search(error) -> None:
    submit = Recorded(error)
    speculation = begun(submit)
    speculation.offer(DOCUMENTS)
    speculation.offer(DOCUMENTS)
    assert len(submit.asked) == 2 and speculation.num_started == 0
    with pytest.raises(type(error)):
        speculation.start(request_of(DOCUMENTS), lambda event: None, on_start=lambda: None)


def test_own_queued_request_does_not_count_as_pending() -> None:
    submit = Recorded()
    speculation = begun(submit, waiting=2)
    speculation.offer(DOCUMENTS)
    assert submit.asked == []
    speculation = begun(submit, waiting=1)
    speculation.offer(DOCUMENTS)
    speculation._num_pending = lambda: 2  # one other, and itself
    speculation.offer(DOCUMENTS[::-1])
    assert len(submit.asked) == 2 and submit.cancelled == [0]


def test_the_next_answer_is_submitted_before_the_wrong_one_is_cancelled() -> None:
    """So that passages of both, which are being prepared, have someone who wants them."""
    submit, order = Recorded(), []

    def noted(*args, **how):
        cancel = submit(*args, **how)
        number = len(submit.asked)
        order.append(("asked", number))
        return lambda: (order.append(("cancelled", number)), cancel())

    speculation = SpeculativeAnswer(noted, request_of, int, max_pending=1)
    speculation.offer(DOCUMENTS)
    speculation.offer(DOCUMENTS[::-1])
    speculation.start(request_of(DOCUMENTS), lambda event: None, on_start=lambda: None)
    assert order == [("asked", 1), ("asked", 2), ("cancelled", 1), ("asked", 3), ("cancelled", 2)]


def test_closed_speculation_starts_no_requests() -> None:
    submit = Recorded()
    speculation = begun(submit)
    speculation.close()
    speculation.offer(DOCUMENTS)
    assert submit.asked == []
    late = Recorded()
    speculation = SpeculativeAnswer(
        lambda *args, **how: (speculation.close(), late(*args, **how))[1], request_of, int, max_pending=1
    )
    speculation.offer(DOCUMENTS)  # closed while it was being submitted
    assert late.cancelled == [0]
