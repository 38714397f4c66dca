"""SQuAD's questions over five passages: of which articles, in which order, and the same each time."""

from __future__ import annotations

import collections
import json

import pytest

from ccjax.evaluation.questions import QAQuestion, read_questions
from ccjax.evaluation.squad5 import MAX_CHARACTERS, main, squad5
from ccjax.types import Document
from tests.data import data_path


def questions(articles=4, paragraphs=3, asked=2):
    def document(article, paragraph):
        return Document(f"Text {article}/{paragraph}.", title=str(article))

    return [
        QAQuestion(f"{article}/{paragraph}/{number}", "Who?", ("x",), (document(article, paragraph),))
        for article in range(articles)
        for paragraph in range(paragraphs)
        for number in range(asked)
    ]


def test_each_question_has_two_passages_of_its_article_and_two_others():
    source = questions()
    found = squad5(source)
    right = {question.question_id: question.documents[0] for question in source}
    assert sorted(question.question_id for question in found) == sorted(right)
    for question in found:
        assert len(set(question.documents)) == 5 and right[question.question_id] in question.documents
        titles = collections.Counter(passage.title for passage in question.documents)
        assert titles[right[question.question_id].title] == 3
    places = {question.documents.index(right[question.question_id]) for question in found}
    assert len(places) > 2, "the right paragraph may stand anywhere"
    assert len({question.documents[0].title for question in found[:6]}) > 1, "the first ones are not all of one article"


def test_short_articles_are_filled_deterministically_from_others():
    source = questions(articles=6, paragraphs=1)
    found = {question.question_id: question.documents for question in squad5(source)}
    assert all(len({passage.title for passage in documents}) == 5 for documents in found.values())
    assert {question.question_id: question.documents for question in squad5(source[::2])} == dict(
        list(sorted(found.items()))[::2]
    )


def test_long_prompts_are_left_out_and_unusable_questions_are_rejected():
    long = QAQuestion("long", "Who?", ("x",), (Document("y" * MAX_CHARACTERS, title="long"),))
    assert "long" not in {question.question_id for question in squad5([*questions(), long])}
    with pytest.raises(ValueError, match="paragraphs of other articles, got 1"):
        squad5(questions(articles=2, paragraphs=1))
    two = QAQuestion("two", "Who?", ("x",), (Document("a"), Document("b")))
    with pytest.raises(ValueError, match="right paragraph of each alone, got 2 passages of question two"):
        squad5([two])


def test_file_of_real_questions_round_trips(tmp_path):
    source, path = data_path("qa", "squad_xquad_en.jsonl"), tmp_path / "squad5.jsonl"
    main([str(source), str(path)])
    found = read_questions(path)
    assert 900 < len(found) < 1190 and found == squad5(read_questions(source))
    assert len({question.documents[0].title for question in found[:100]}) > 20
    with pytest.raises(SystemExit, match=r"squad5: error: questions: wanted a JSONL file"):
        main([str(tmp_path / "absent"), str(path)])
    assert json.loads(path.read_text().splitlines()[0])["answers"]
