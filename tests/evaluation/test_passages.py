"""Asking passage by passage, with a scripted model."""

from __future__ import annotations

from ccjax.evaluation.passages import map_reduce, map_rerank
from ccjax.requests import Response, TokenLogprob
from ccjax.types import Document, ReuseReport

REPORT = ReuseReport("bounded", "prefix", 1, 1, 0, 0, 1.0, True)
DOCUMENTS = [Document(text, title=text.upper()) for text in ("one", "two", "three")]


class Model:
    """Says what it is told to say about a passage, with log-probabilities."""

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.asked: list[tuple[str, list[tuple[str | None, str]]]] = []

    def __call__(self, question, documents):
        self.asked.append((question, [(one.title, one.text) for one in documents]))
        text, logprobs = self.answers[documents[0].text] if len(documents) == 1 else ("the end", (-0.5,))
        tokens = tuple(TokenLogprob(0, b"", value) for value in logprobs)
        return Response(text, tuple(range(len(tokens))), "stop", REPORT, 1, 0.25, 1.0, tokens)


def test_most_confident_answer_wins_regardless_of_length():
    model = Model(one=("red", (-0.2, -0.6)), two=("blue boat sails", (-0.3, -0.3, -0.3)), three=("", ()))
    found = map_rerank(model, "Who?", DOCUMENTS)
    assert found.last.text == "blue boat sails" and len(found.calls) == 3
    assert found.ttft_s == 3.0, "the first token is known once every answer is there"
    assert model.asked == [("Who?", [(one.title, one.text)]) for one in DOCUMENTS]
    equal = Model(one=("red", (-0.5,)), two=("blue", (-0.5, -0.5)), three=("green", (-0.7,)))
    assert map_rerank(equal, "Who?", DOCUMENTS).last.text == "red", "the first of equally confident ones"


def test_map_reduce_puts_passage_answers_in_the_final_prompt():
    model = Model(one=(" Ann. ", (-1.0,)), two=(" ", (-1.0,)), three=("Bob.", (-1.0,)))
    found = map_reduce(model, "Who?", DOCUMENTS)
    assert found.last.text == "the end" and found.calls[-1] is found.last and len(found.calls) == 4
    assert all(question.endswith("Question: Who?") and question != "Who?" for question, _ in model.asked[:3])
    assert model.asked[-1] == ("Who?", [("ONE", "Ann."), ("THREE", "Bob.")]), "a passage without a word is left out"
    assert found.ttft_s == 3.25
