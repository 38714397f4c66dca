"""The shipped corpus: comes out of its seed byte for byte, and each question's answer stands in the named document."""

import json
import random
import re
from collections import Counter

import pytest

from ccjax.demo.world import KINDS
from scripts.demo_model.corpus import CORPUS_DIRECTORY, QUESTIONS_FILE, build_corpus, question_context, write_corpus


@pytest.fixture(scope="module")
def corpus():
    return build_corpus()


def test_regenerates_byte_for_byte(corpus, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/old.md").write_text("# Old\n")  # no longer belongs there
    write_corpus(corpus, tmp_path / "corpus", tmp_path / "questions.jsonl")
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "corpus").iterdir()}
    assert fresh == {path.name: path.read_bytes() for path in CORPUS_DIRECTORY.iterdir()}
    assert (tmp_path / "questions.jsonl").read_bytes() == QUESTIONS_FILE.read_bytes()


def test_answers_appear_in_the_named_document():
    lines = [json.loads(line) for line in QUESTIONS_FILE.read_text().splitlines()]
    assert 60 <= len(lines) <= 150
    assert {line["kind"] for line in lines} == set(KINDS)
    for line in lines:
        text = (CORPUS_DIRECTORY / f"{line['document_id']}.md").read_text()
        for answer in line["answers"]:
            assert re.search(rf"\b{re.escape(answer)}\b", text), line
            assert 1 <= len(answer.split()) <= 3
        assert line["document_ids"][-1] == line["document_id"]
        assert len(line["document_ids"]) == (1 if line["kind"] == "single" else 2)


def test_question_context_has_five_documents_with_needed_ones_in_order(corpus):
    rng = random.Random(0)
    places = Counter()
    for question in corpus.questions:
        context = question_context(corpus, question, rng)
        assert len({passage.text for passage in context.passages}) == 5
        wanted = [corpus.documents[document_id] for document_id in question.document_ids]
        indices = context.questions[0].passages
        assert [context.passages[index] for index in indices] == wanted
        if question.kind == "pronoun":
            assert indices[1] == indices[0] + 1
        if question.kind == "alias":
            assert indices[0] < indices[1]
        if question.kind == "single":
            places[indices[0]] += 1
        assert context.questions[0].guess_ratio < 0.75
    assert set(places) == set(range(5)), "the right document stands in every place"
