"""The shipped corpus: comes out of its seed byte for byte, and each question's answer stands in the named document."""

import json
import random
import re
from collections import Counter

import pytest

from ccjax.demo.world import KINDS
from scripts.demo_model.corpus import CORPUS_DIRECTORY, QUESTIONS_FILE, build_corpus, question_context, write_corpus
from scripts.demo_model.tokenizer import train_tokenizer


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


def test_documents_have_a_title_and_a_body_of_the_promised_length(corpus):
    tokenizer = train_tokenizer()
    assert 40 <= len(corpus.documents) <= 100
    for document_id in corpus.documents:
        heading, _, body = (CORPUS_DIRECTORY / f"{document_id}.md").read_text().partition("\n\n")
        assert re.fullmatch(r"# \S.*", heading)
        assert 30 <= len(tokenizer.encode(body.strip()).ids) <= 120, document_id


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


def test_each_subject_and_relation_is_stated_once(corpus):
    """Else another document might answer it differently."""
    stated = Counter((fact.subject, fact.relation) for fact, _ in corpus.facts)
    assert set(stated.values()) == {1}


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
