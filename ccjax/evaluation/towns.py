"""Random little towns: passages, and questions that only the passages answer.

Four kinds of question: `single` (one passage), `pronoun` (a passage opens with "She ..."; the person is the last one
named in the passage before), `alias` (one passage says who is called the Heron, a later one what the Heron does) and
`two_hop` (where a person works, and where that place stands). Every question has at least `MIN_DISTRACTORS` other
values of the same relation in its context, so that guessing among the values present stays far below answering.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from ccjax.evaluation import town_words as words
from ccjax.evaluation.town_words import NICKNAME, RELATIONS, SITE, SITE_OF_WORKPLACE, WORKPLACE, Relation
from ccjax.types import Document

Kind = Literal["single", "pronoun", "alias", "two_hop"]
KINDS: tuple[Kind, ...] = ("single", "pronoun", "alias", "two_hop")
MIN_DISTRACTORS = 2
TEST_SEED, VALIDATION_SEED = "test", "validation"
TEST_WEIGHTS = {"register": 1, "portrait": 2, "pair": 1, "follow": 2, "nickname": 1, "gossip": 0.5, "place": 1}
TWO_PASSAGES = ("follow", "nickname", "place")
"""Stories that take two passages."""


@dataclasses.dataclass(frozen=True)
class Person:
    """Someone in town; first names and surnames are unique within one town."""

    first: str
    surname: str
    pronoun: str

    @property
    def name(self) -> str:
        """First name and surname."""
        return f"{self.first} {self.surname}"


@dataclasses.dataclass(frozen=True)
class Fact:
    """`value` answers the questions of `relation` about `subject`.

    Attributes:
      holder: the person or place that has the value, whatever the question calls it.
      passages: those needed, in order, as indices into the story or context; the last one holds the value.
      bridge: what leads from the subject to the value where that takes two passages: the alias, the workplace.
    """

    subject: str
    holder: str
    relation: Relation
    value: str
    kind: Kind = "single"
    passages: tuple[int, ...] = (0,)
    bridge: str | None = None


@dataclasses.dataclass(frozen=True)
class Story:
    """Passages that were written together; where `order` is "adjacent" nothing may come between them."""

    passages: tuple[Document, ...]
    facts: tuple[Fact, ...]
    order: Literal["free", "later", "adjacent"] = "free"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question over a context.

    Attributes:
      passages: indices of the passages needed, in reading order; the last one holds the answer.
      recall: the same as a sentence to complete: "Home of Mara Venn".
      guess_ratio: accuracy of the best guess among the same relation's values present, in (0, 1).
      bridge: as in `Fact`.
    """

    text: str
    answer: str
    kind: Kind
    relation: str
    passages: tuple[int, ...]
    recall: str
    guess_ratio: float
    bridge: str | None


@dataclasses.dataclass(frozen=True)
class Context:
    """Passages in prompt order and the questions asked behind them."""

    passages: tuple[Document, ...]
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class Difficulty:
    """What a context is made of.

    Attributes:
      num_passages: passages per context.
      weights: relative frequency of the stories, by the names of `Town`'s methods.
      direct_ratio: share of named sentences that put name and value side by side ("Home of Mara Venn Hazel Lane.").
      num_relations: relations that the people of one context have between them.
      min_words: passages are filled up to this many words.
      max_words: where above `min_words`, each passage draws its own number between the two, small ones more often.
      kinds: kinds of question asked.
    """

    num_passages: int
    weights: dict[str, float]
    direct_ratio: float = 0.0
    num_relations: int = 4
    min_words: int = 0
    max_words: int = 0
    kinds: tuple[Kind, ...] = ("single",)


class Town:
    """The people of one town and what has been written about them; each fact is written once."""

    def __init__(self, rng: random.Random, difficulty: Difficulty) -> None:
        self.rng, self._difficulty = rng, difficulty
        self._relations = rng.sample(RELATIONS, difficulty.num_relations)
        firsts = [(name, "she") for name in words.WOMEN] + [(name, "he") for name in words.MEN]
        rng.shuffle(firsts)
        surnames = rng.sample(words.SURNAMES, len(words.SURNAMES))
        self._strangers = [Person(first, surname, p) for (first, p), surname in zip(firsts, surnames, strict=True)]
        self._aliases, self._places, self._sites = (
            rng.sample(relation.values, len(relation.values)) for relation in (NICKNAME, WORKPLACE, SITE)
        )
        self._free: dict[Person, list[Relation]] = {}
        self._nicknamed: set[Person] = set()
        self._employed: set[Person] = set()

    def portrait(self, person: Person | None = None, num_facts: int | None = None) -> Story:
        """One passage about one person."""
        count = min(len(self._relations), num_facts or self.rng.choice((3, 3, 4)))
        person = person or self._person(count, new=True)
        facts, text = self._about(person, count, opening=True)
        title = self.rng.choice(words.PORTRAIT_TITLES).format(s=person.name)
        return Story((self._passage(title, text),), tuple(facts))

    def pair(self) -> Story:
        """One passage about two people."""
        first, second = self._person(2, new=True), self._person(2, new=True)
        first_facts, first_text = self._about(first, 2, opening=True)
        second_facts, second_text = self._about(second, 2)
        title = self.rng.choice(words.PAIR_TITLES).format(s=first.name, t=second.name)
        return Story((self._passage(title, first_text + second_text),), tuple(first_facts + second_facts))

    def register(self) -> Story:
        """One passage with the same fact about several people."""
        relation = self.rng.choice(self._relations)
        count = self.rng.randint(3, 5)
        people: list[Person] = []
        for person, free in self._free.items():
            if len(people) < count // 2 and relation in free and self.rng.random() < 0.3:
                people.append(person)
        while len(people) < count and self._strangers:
            people.append(self._person(len(self._relations), new=True))
        self.rng.shuffle(people)
        facts, text = [], []
        for person in people:
            fact, sentence = self._write(person, relation, person.name, opening=not text)
            facts.append(fact)
            text.append(sentence)
        title = self.rng.choice(words.REGISTER_TITLES).format(r=relation.title)
        return Story((self._passage(title, text),), tuple(facts))

    def follow(self) -> Story:
        """Two passages; the second opens with a pronoun for the last person named in the first."""
        first = self.pair() if self.rng.random() < 0.5 else self.portrait(self._person(3, new=True), 2)
        person = next(person for person in self._free if person.name == first.facts[-1].subject)
        facts, text = self._about(person, min(len(self._free[person]), self.rng.choice((1, 1, 2))), pronoun_only=True)
        other_facts, other_text = self._about(self._person(2, new=True), self.rng.choice((1, 2)))
        second = self._passage(self.rng.choice(words.FOLLOW_TITLES), text + other_text)
        later = [dataclasses.replace(fact, kind="pronoun", passages=(0, 1)) for fact in facts]
        later += [dataclasses.replace(fact, passages=(1,)) for fact in other_facts]
        return Story((first.passages[0], second), (*first.facts, *later), "adjacent")

    def nickname(self) -> Story:
        """Two passages: who is called what, and what happened to people who are named by nickname only."""
        count = min(self.rng.choice((2, 3, 3)), len(self._aliases))
        facts: list[Fact] = []
        definitions, gossip = [], []
        for _ in range(count):
            person, alias = self._person(1, other_than=self._nicknamed), self._aliases.pop()
            self._nicknamed.add(person)
            sentence = self._template(NICKNAME).format(s=person.name, v=alias)
            definitions.append(_start(self.rng, sentence, person.name, opening=not definitions))
            used, sentence = self._write(person, self._free[person][0], f"the {alias}")
            gossip.append(sentence)
            facts += [
                Fact(person.name, person.name, NICKNAME, alias),
                dataclasses.replace(used, subject=f"the {alias}", passages=(1,)),
                dataclasses.replace(used, kind="alias", passages=(0, 1), bridge=alias),
            ]
        self.rng.shuffle(gossip)
        passages = (
            self._passage(self.rng.choice(words.NICKNAME_TITLES), definitions),
            self._passage(self.rng.choice(words.GOSSIP_TITLES), gossip),
        )
        return Story(passages, tuple(facts), "later")

    def gossip(self) -> Story:
        """One passage about nicknames that nothing explains, as a retriever may well return it."""
        story = self.nickname()
        facts = tuple(dataclasses.replace(fact, passages=(0,)) for fact in story.facts if fact.passages == (1,))
        return Story(story.passages[1:], facts)

    def place(self) -> Story:
        """Two passages: who works at which place, and where those places stand."""
        count = min(self.rng.choice((2, 3, 3)), len(self._places))
        facts: list[Fact] = []
        staff, sites, places = [], [], []
        for _ in range(count):
            person, place, site = self._person(1, other_than=self._employed), self._places.pop(), self._sites.pop()
            self._employed.add(person)
            sentence = self._template(WORKPLACE).format(s=person.name, v=place)
            staff.append(_start(self.rng, sentence, person.name, opening=not staff))
            sites.append(_capital(self._template(SITE).format(s=f"the {place}", v=site)))
            facts += [
                Fact(person.name, person.name, WORKPLACE, place),
                Fact(f"the {place}", place, SITE, site, passages=(1,)),
                Fact(person.name, place, SITE_OF_WORKPLACE, site, "two_hop", (0, 1), bridge=place),
            ]
            places.append(place)
        passages = (
            self._passage(self.rng.choice(words.REGISTER_TITLES).format(r=WORKPLACE.title), staff),
            self._passage(f"The {' and the '.join(places)}", sites),
        )
        return Story(passages, tuple(facts))

    def _person(self, num_free: int = 1, *, new: bool = False, other_than: Collection[Person] = ()) -> Person:
        """Someone with at least `num_free` unwritten relations: often a new person, sometimes a known one."""
        known = [p for p, free in self._free.items() if len(free) >= num_free and p not in other_than]
        if self._strangers and (new or not known or self.rng.random() < 0.7):
            person = self._strangers.pop()
            self._free[person] = self.rng.sample(self._relations, len(self._relations))
            return person
        return self.rng.choice(known)

    def _passage(self, title: str, sentences: list[str]) -> Document:
        """The sentences, with lines about the town put in behind the first one: one or two, more up to `min_words`."""
        sentences = list(sentences)
        fillers = self.rng.sample(words.FILLERS, len(words.FILLERS))
        wanted, num_words = self.rng.choice((1, 1, 2)), self._difficulty.min_words
        if self._difficulty.max_words > num_words:
            num_words += int((self._difficulty.max_words - num_words) * self.rng.random() ** 3)
        while wanted > 0 or len(" ".join(sentences).split()) < num_words:
            sentences.insert(self.rng.randint(1, len(sentences)), fillers.pop())
            wanted -= 1
        return Document(" ".join(sentences), title=title)

    def _template(self, relation: Relation) -> str:
        """One of a relation's sentences; the direct one with the town's share."""
        if self.rng.random() < self._difficulty.direct_ratio:
            return relation.direct
        return self.rng.choice((*relation.statements, *relation.framed))

    def _about(
        self, person: Person, num_facts: int, *, opening: bool = False, pronoun_only: bool = False
    ) -> tuple[list[Fact], list[str]]:
        """Facts about one person: named in the first sentence, later by name, first name or pronoun."""
        facts, text = [], []
        for _ in range(num_facts):
            if pronoun_only:
                reference = person.pronoun
            else:
                reference = self.rng.choice((person.name, person.first, person.pronoun)) if text else person.name
            fact, sentence = self._write(person, self._free[person][0], reference, opening=opening and not text)
            facts.append(fact)
            text.append(sentence)
        return facts, text

    def _write(self, person: Person, relation: Relation, reference: str, *, opening: bool = False) -> tuple[Fact, str]:
        """One sentence that states a fact of `person`, who is called `reference` in it."""
        self._free[person].remove(relation)
        value = self.rng.choice(relation.values)
        is_named = reference not in (person.first, person.pronoun)
        if is_named and self.rng.random() < self._difficulty.direct_ratio:
            template = relation.direct
        elif reference != person.pronoun and self.rng.random() < 0.3:
            template = self.rng.choice(relation.framed)
        else:
            template = self.rng.choice(relation.statements)
        sentence = _start(self.rng, template.format(s=reference, v=value), reference, opening=opening)
        return Fact(person.name, person.name, relation, value), sentence


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _start(rng: random.Random, sentence: str, reference: str, *, opening: bool) -> str:
    """The sentence with a capital; at the head of a passage a phrase leads in a name, so that it keeps its space."""
    if opening and sentence.startswith(reference):
        return f"{rng.choice(words.OPENINGS)} {sentence}"
    return _capital(sentence)


def order_stories(rng: random.Random, stories: Sequence[Story]) -> tuple[tuple[Document, ...], list[Fact]]:
    """The passages of all stories, shuffled as far as their order allows, and the facts with indices into them."""
    blocks: list[tuple[int, tuple[int, ...]]] = []
    for index, story in enumerate(stories):
        offsets = tuple(range(len(story.passages)))
        blocks += [(index, offsets)] if story.order == "adjacent" else [(index, (offset,)) for offset in offsets]
    rng.shuffle(blocks)
    for index, story in enumerate(stories):
        if story.order == "later":
            slots = [slot for slot, (owner, _) in enumerate(blocks) if owner == index]
            for offset, slot in enumerate(slots):
                blocks[slot] = (index, (offset,))
    placed = [(index, offset) for index, offsets in blocks for offset in offsets]
    position = {key: place for place, key in enumerate(placed)}
    facts = [
        dataclasses.replace(fact, passages=tuple(position[index, offset] for offset in fact.passages))
        for index, story in enumerate(stories)
        for fact in story.facts
    ]
    return tuple(stories[index].passages[offset] for index, offset in placed), facts


def ask(rng: random.Random, facts: Sequence[Fact], num_questions: int, kinds: Sequence[Kind]) -> tuple[Question, ...]:
    """Questions drawn with replacement, the kinds in turn; only facts with enough distractors are asked about."""
    values: dict[str, dict[str, str]] = {}
    for fact in facts:
        values.setdefault(fact.relation.name, {})[fact.holder] = fact.value
    open_facts: dict[Kind, list[Fact]] = {}
    for fact in facts:
        if len(set(values[fact.relation.name].values())) > MIN_DISTRACTORS and fact.kind in kinds:
            open_facts.setdefault(fact.kind, []).append(fact)
    questions = []
    for turn in range(num_questions if open_facts else 0):
        pools = sorted(open_facts)
        fact = rng.choice(open_facts[pools[turn % len(pools)]])
        relation, present = fact.relation, list(values[fact.relation.name].values())
        text, recall = rng.choice(relation.questions).format(s=fact.subject), relation.recall.format(s=fact.subject)
        ratio = max(Counter(present).values()) / len(present)
        questions.append(
            Question(text, fact.value, fact.kind, relation.name, fact.passages, recall, ratio, fact.bridge)
        )
    rng.shuffle(questions)
    return tuple(questions)


def sample_context(rng: random.Random, difficulty: Difficulty, num_questions: int) -> Context:
    """A fresh town's passages and `num_questions` questions; the same `rng` state gives the same context."""
    while True:
        town = Town(rng, difficulty)
        stories: list[Story] = []
        room = difficulty.num_passages
        while room > 0:
            fitting = [(name, w) for name, w in difficulty.weights.items() if room > 1 or name not in TWO_PASSAGES]
            make: Callable[[], Story] = getattr(town, rng.choices(*zip(*fitting, strict=True))[0])
            stories.append(make())
            room -= len(stories[-1].passages)
        passages, facts = order_stories(rng, stories)
        questions = ask(rng, facts, num_questions, difficulty.kinds)
        if len(questions) == num_questions:
            return Context(passages, questions)


def held_out_contexts(kind: Kind, num_contexts: int, num_passages: int = 4, *, seed: str = TEST_SEED) -> list[Context]:
    """Contexts of towns with a fixed seed that training does not draw from, each with one question of the kind."""
    rng = random.Random(f"{seed}/{kind}")
    difficulty = Difficulty(num_passages, TEST_WEIGHTS, min_words=24, max_words=80, kinds=(kind,))
    return [sample_context(rng, difficulty, 1) for _ in range(num_contexts)]
