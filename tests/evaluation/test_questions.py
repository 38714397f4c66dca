"""Question files: what is read from them and what is wrong with bad ones; the demo's towns."""

from __future__ import annotations

import json

import pytest

from ccjax.evaluation.questions import demo_questions, read_questions
from ccjax.evaluation.towns import KINDS, TEST_SEED, VALIDATION_SEED, held_out_contexts
from tests.data import data_path


def written(tmp_path, *lines):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


GOOD = {"id": "q7", "question": "Who?", "answers": ["Ann"], "docs": [{"title": "T", "text": "Ann."}, {"text": "Bob."}]}


def test_question_fields_and_defaults(tmp_path):
    first, second = read_questions(written(tmp_path, GOOD, "", {"question": "What?", "docs": [{"text": "x"}]}))
    assert (first.question_id, first.text, first.answers, first.kind) == ("q7", "Who?", ("Ann",), "")
    assert [(one.title, one.text) for one in first.documents] == [("T", "Ann."), (None, "Bob.")]
    assert (second.question_id, second.answers) == ("3", ()), "without an id the number of the line"


def test_lines_beyond_the_limit_are_not_parsed(tmp_path):
    path = written(tmp_path, GOOD, GOOD, "no JSON")
    assert len(read_questions(path, limit=2)) == 2
    assert [len(one.documents) for one in read_questions(path, limit=1, num_documents=1)] == [1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", "line 2: Expecting value"),
        ("[]", "line 2: wanted an object, got list"),
        ({**GOOD, "question": " "}, "non-empty string under 'question'"),
        ({**GOOD, "docs": []}, "list of passages under 'docs'"),
        ({**GOOD, "docs": "text"}, "list of passages under 'docs'"),
        ({**GOOD, "docs": [{"title": "T"}]}, r"docs\[0\]: wanted a non-empty string under 'text'"),
        ({**GOOD, "docs": ["text"]}, "line 2"),
        ({**GOOD, "answers": "Ann"}, "list of strings under 'answers'"),
        ({**GOOD, "answers": [3]}, "list of strings under 'answers'"),
    ],
)
def test_error_names_the_number_of_a_bad_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_questions(written(tmp_path, GOOD, line))
    assert "questions.jsonl, line 2" in str(caught.value)


def test_missing_or_empty_file_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="wanted a JSONL file, got .*absent"):
        read_questions(tmp_path / "absent")
    with pytest.raises(ValueError, match="at least one"):
        read_questions(written(tmp_path, ""))


@pytest.mark.parametrize(
    ("name", "count", "passages"),
    [("rag_top5_musique", 361, 5), ("musique_distractor_200", 200, 20), ("squad_xquad_en", 1190, 1)],
)
def test_real_question_sets_are_read_completely(name, count, passages):
    questions = read_questions(data_path("qa", f"{name}.jsonl"))
    assert len(questions) == count
    assert all(question.answers and len(question.documents) == passages for question in questions)


def test_questions_are_balanced_over_kinds_and_passage_counts():
    questions = demo_questions(5, (4, 6))
    assert [len(one.documents) for one in questions] == [4, 4, 4, 6, 6] * len(KINDS)
    assert [one.kind for one in questions[:6]] == [KINDS[0]] * 5 + [KINDS[1]]
    assert len({one.documents for one in questions}) == len(questions)


def test_demo_questions_are_held_out_from_training():
    questions = demo_questions(3)
    assert [question.kind for question in questions] == [kind for kind in KINDS for _ in range(3)]
    contexts = [context for kind in KINDS for context in held_out_contexts(kind, 3, seed=TEST_SEED)]
    for question, context in zip(questions, contexts, strict=True):
        asked = context.questions[0]
        assert (question.text, question.answers, question.guess_ratio) == (
            asked.text,
            (asked.answer,),
            asked.guess_ratio,
        )
        assert question.documents == context.passages
    assert len({question.question_id for question in questions}) == 12
    assert not {one.text for one in questions} & {one.text for one in demo_questions(3, seed=VALIDATION_SEED)}
