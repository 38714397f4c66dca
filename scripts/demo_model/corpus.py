"""The shipped corpus: one fixed town as Markdown documents, with questions over it.

The town comes from its own seed, which training never uses; its words are those of every other town.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

from ccjax.demo.lexicon import RELATIONS
from ccjax.demo.world import MIN_DISTRACTORS, Context, Fact, Kind, Question, Story, Town, WorldPassage, guess_ratio
from ccjax.loading.model import ASSETS, DEMO_CORPUS

CORPUS_SEED = "saltmere"
CORPUS_DIRECTORY = DEMO_CORPUS
QUESTIONS_FILE = ASSETS / "demo_questions.jsonl"
MAX_QUESTIONS_PER_KIND = {"single": 84, "pronoun": 24, "alias": 18, "two_hop": 14}


@dataclasses.dataclass(frozen=True)
class CorpusQuestion:
    """One line of demo_questions.jsonl.

    Attributes:
      document_id: the document that holds the answer.
      document_ids: all documents needed, in reading order.
    """

    question: str
    answers: tuple[str, ...]
    document_id: str
    document_ids: tuple[str, ...]
    kind: Kind
    relation: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by id, in writing order; the questions; and every fact with the ids of the documents it needs."""

    documents: dict[str, WorldPassage]
    questions: tuple[CorpusQuestion, ...]
    facts: tuple[tuple[Fact, tuple[str, ...]], ...]


def build_corpus() -> Corpus:
    """The town, always the same."""
    rng = random.Random(CORPUS_SEED)
    town = Town(rng, relations=RELATIONS, min_words=27)
    stories: list[Story] = [town.portrait() for _ in range(24)]
    stories += [town.pair() for _ in range(4)]
    stories += [town.follow() for _ in range(10)]
    stories += [town.register(relation, 4) for relation in RELATIONS]
    stories += [town.nickname(3) for _ in range(4)]
    stories += [town.place(2) for _ in range(5)]
    documents: dict[str, WorldPassage] = {}
    facts: list[tuple[Fact, tuple[str, ...]]] = []
    for story in stories:
        ids = []
        for passage in story.passages:
            slug = re.sub(r"[^a-z]+", "-", passage.title.lower()).strip("-")
            ids.append(f"{len(documents) + 1:03d}-{slug}")
            documents[ids[-1]] = passage
        facts += [(fact, tuple(ids[offset] for offset in fact.passage_offsets)) for fact in story.facts]
    return Corpus(documents, _questions(rng, facts), tuple(facts))


def _questions(rng: random.Random, facts: list[tuple[Fact, tuple[str, ...]]]) -> tuple[CorpusQuestion, ...]:
    chosen: list[tuple[Fact, tuple[str, ...]]] = []
    for kind, limit in MAX_QUESTIONS_PER_KIND.items():
        of_kind = [entry for entry in facts if entry[0].kind == kind]
        rng.shuffle(of_kind)
        chosen += sorted(of_kind[:limit], key=lambda entry: entry[1])
    return tuple(
        CorpusQuestion(
            rng.choice(fact.questions).format(s=fact.subject), (fact.value,), ids[-1], ids, fact.kind, fact.relation
        )
        for fact, ids in chosen
    )


def question_context(corpus: Corpus, question: CorpusQuestion, rng: random.Random, num_passages: int = 5) -> Context:
    """The documents a question needs among others with the same relation, `num_passages` in all, in random order.

    A document that opens with a pronoun directly follows the one it refers to, and is no distractor elsewhere. Drawn
    again until they have more than `MIN_DISTRACTORS` values of the relation.
    """
    while True:
        order = _draw_documents(corpus, question, rng, num_passages)
        values = {
            (fact.holder, fact.value): fact.value
            for fact, ids in corpus.facts
            if fact.relation == question.relation and ids[-1] in order
        }
        if len(set(values.values())) > MIN_DISTRACTORS:
            break
    asked = Question(
        question.question,
        question.answers[0],
        question.kind,
        question.relation,
        tuple(order.index(document_id) for document_id in question.document_ids),
        "",
        guess_ratio(list(values.values())),
    )
    return Context(tuple(corpus.documents[document_id] for document_id in order), (asked,))


def _draw_documents(corpus: Corpus, question: CorpusQuestion, rng: random.Random, num_passages: int) -> list[str]:
    """Ids in prompt order."""
    needed = question.document_ids
    sequels = {ids[-1] for fact, ids in corpus.facts if fact.kind == "pronoun"}
    related = {ids[-1] for fact, ids in corpus.facts if fact.relation == question.relation} - sequels - set(needed)
    others = sorted(set(corpus.documents) - related - sequels - set(needed))
    count = num_passages - len(needed)
    distractors = rng.sample(sorted(related), min(count, len(related)))
    distractors += rng.sample(others, count - len(distractors))
    blocks = [needed] if question.kind == "pronoun" else [(document_id,) for document_id in needed]
    blocks += [(document_id,) for document_id in distractors]
    rng.shuffle(blocks)
    if question.kind == "alias":
        slots = sorted(blocks.index((document_id,)) for document_id in needed)
        for slot, document_id in zip(slots, needed, strict=True):
            blocks[slot] = (document_id,)
    return [document_id for block in blocks for document_id in block]


def markdown(passage: WorldPassage) -> str:
    """The document's file: its title as a heading, then the body."""
    return f"# {passage.title}\n\n{passage.text}\n"


def question_line(question: CorpusQuestion) -> str:
    """One line of JSON."""
    return json.dumps(dataclasses.asdict(question)) + "\n"


def write_corpus(corpus: Corpus, directory: Path = CORPUS_DIRECTORY, questions_file: Path = QUESTIONS_FILE) -> None:
    """Writes the documents and the questions, replacing existing ones."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for document_id, passage in corpus.documents.items():
        (directory / f"{document_id}.md").write_text(markdown(passage))
    questions_file.write_text("".join(question_line(question) for question in corpus.questions))
