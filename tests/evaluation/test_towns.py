"""Towns: no answer by elimination, every answer stands in the text, one seed gives one town."""

import random
import re

import pytest
from tokenizers import Tokenizer

from ccjax.evaluation.town_words import MEN, NICKNAME, RELATIONS, SITE, SURNAMES, WOMEN, WORKPLACE
from ccjax.evaluation.towns import KINDS, MIN_DISTRACTORS, Difficulty, Town, ask, sample_context
from ccjax.loading.model import DEMO_MODEL

WEIGHTS = {"register": 1.0, "portrait": 1.0, "pair": 1.0, "nickname": 1.0, "place": 1.0, "follow": 2.0, "gossip": 0.5}
VALUES = {relation.name: relation.values for relation in (*RELATIONS, WORKPLACE, SITE, NICKNAME)}


def _contexts(count=60, **changes):
    rng = random.Random("towns of the test")
    difficulty = Difficulty(**{"num_passages": 5, "weights": WEIGHTS, "min_words": 27, "kinds": KINDS, **changes})
    return [sample_context(rng, difficulty, 6) for _ in range(count)]


def _has(text, word):
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


@pytest.fixture(scope="module")
def contexts():
    return _contexts()


def _asked(contexts, kind=None):
    """(question, texts of the passages that it needs, the person it names, context) of all questions of a kind."""
    for context in contexts:
        for question in context.questions:
            if kind in (None, question.kind):
                names = re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", re.sub(r"^\w+ ", "", question.text))
                texts = [context.passages[index].text for index in question.passages]
                yield question, texts, names[0] if names else None, context


def test_text_contains_distractors_for_every_question(contexts):
    for question, texts, _, context in _asked(contexts):
        text = "\n".join(passage.text for passage in context.passages)
        present = {value for value in VALUES[question.relation] if _has(text, value)}
        assert question.answer in present and len(present - {question.answer}) >= MIN_DISTRACTORS
        assert question.guess_ratio < 0.75
        assert len(context.passages) == 5 and _has(texts[-1], question.answer), "in the last passage needed"
    ratios = [question.guess_ratio for question, *_ in _asked(contexts)]
    assert sum(ratios) / len(ratios) < 0.42, "far below answering"


def test_passage_of_a_single_question_names_its_subject(contexts):
    named = [one for one in _asked(contexts, "single") if one[2]]
    for question, (text,), name, context in named:
        assert name in text + context.passages[question.passages[0]].title
    assert len(named) > 50


def _names(text):
    """Full names in the text, in order."""
    found = re.findall(r"([A-Z][a-z]+) ([A-Z][a-z]+)", text)
    return [f"{first} {last}" for first, last in found if first in WOMEN + MEN and last in SURNAMES]


def test_pronoun_questions_depend_on_the_previous_passage(contexts):
    found = list(_asked(contexts, "pronoun"))
    for question, (before, after), name, _ in found:
        assert question.passages[1] == question.passages[0] + 1
        assert re.match(r"(He|She) ", after) and name not in after
        assert _names(before)[-1] == name, "the pronoun stands for the last person named"
    assert len(found) >= 10


@pytest.mark.parametrize(("kind", "relation"), [("alias", NICKNAME), ("two_hop", WORKPLACE)])
def test_bridge_entity_appears_in_both_passages(contexts, kind, relation):
    found = list(_asked(contexts, kind))
    for question, (first, second), name, _ in found:
        assert name in first and name not in second
        assert question.bridge in relation.values and _has(first, question.bridge) and _has(second, question.bridge)
        assert kind == "two_hop" or question.passages[0] < question.passages[1], "defined before it is used"
    assert len(found) >= 10


def test_passages_have_the_wanted_number_of_words():
    lengths = [len(p.text.split()) for c in _contexts(40, min_words=24, max_words=80) for p in c.passages]
    assert min(lengths) >= 24
    assert max(lengths) < 80 + 10, "the last sentence may go over"
    assert sum(length > 50 for length in lengths) > 10, "long passages are among them"
    assert sum(length < 40 for length in lengths) > len(lengths) / 2, "short ones are more frequent"
    fixed = [len(p.text.split()) for c in _contexts(40, min_words=40, max_words=0) for p in c.passages]
    assert min(fixed) >= 40 and max(fixed) < 60


def test_direct_towns_put_the_value_right_after_the_name():
    for seed in range(20):
        story = Town(random.Random(seed), Difficulty(2, WEIGHTS, direct_ratio=1.0)).nickname()
        assert all(f"Nickname of {f.subject} {f.value}" in story.passages[0].text for f in story.facts[::3])
        used = [fact for fact in story.facts if fact.passages == (1,)]
        assert len(used) >= 2
        for fact in used:
            assert f"of {fact.subject} {fact.value}" in story.passages[1].text


@pytest.mark.parametrize("seed", range(5))
def test_each_fact_is_stated_once(seed):
    """Else two values answer one question: someone who worked at two places once spoilt a third of the two-hop ones."""
    town = Town(random.Random(seed), Difficulty(30, WEIGHTS, num_relations=9))
    counts = ((town.portrait, 10), (town.register, 10), (town.nickname, 6), (town.place, 4))
    stories = [story() for story, count in counts for _ in range(count)]
    facts = [fact for story in stories for fact in story.facts]
    stated = [(fact.subject, fact.relation.name) for fact in facts]
    assert len(stated) == len(set(stated))
    direct = {(fact.holder, fact.relation.name) for fact in facts if fact.bridge is None}
    assert {(fact.holder, fact.relation.name) for fact in facts if fact.bridge is not None} <= direct


def test_facts_without_enough_distractors_are_not_asked():
    facts = Town(random.Random(3), Difficulty(1, WEIGHTS)).portrait().facts
    assert ask(random.Random(0), facts, 5, KINDS) == ()


def test_value_sets_do_not_overlap():
    seen = [value for values in VALUES.values() for value in values]
    assert len(seen) == len(set(seen))


def test_no_town_runs_out_of_names():
    """Stories used to be written and thrown away where they did not fit, until aliases and places were used up."""
    weights = {"nickname": 1.0, "gossip": 1.0, "place": 1.0, "follow": 1.0}
    for context in _contexts(300, weights=weights):
        assert len(context.passages) == 5
        assert all(passage.text for passage in context.passages)


def test_every_word_is_one_token_of_the_embedded_model(contexts):
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [passage.text for context in contexts for passage in context.passages]
    words = {word for text in texts for word in re.findall(r" [A-Za-z]+", text)}
    assert len(words) > 400
    assert [word for word in words if len(tokenizer.encode(word, add_special_tokens=False).ids) != 1] == []
