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

from ccjax.demo import lexicon as lex
from ccjax.demo.lexicon import NICKNAME, RELATIONS, SITE, WORKPLACE, Relation

Kind = Literal["single", "pronoun", "alias", "two_hop"]
KINDS: tuple[Kind, ...] = ("single", "pronoun", "alias", "two_hop")
MIN_DISTRACTORS = 2
TEST_SEED, VALIDATION_SEED = "test", "validation"
TEST_WEIGHTS = (
    ("register", 1.0),
    ("portrait", 2.0),
    ("pair", 1.0),
    ("follow", 2.0),
    ("nickname", 1.0),
    ("gossip", 0.5),
    ("place", 1.0),
)
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
class WorldPassage:
    """One document: what the retriever returns and the model reads."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Fact:
    """`value` answers the questions of `relation` about `subject`.

    Attributes:
      holder: the person or place that has the value, whatever the question calls it.
      passage_offsets: passages of the story that are needed, in order; the last one holds the value.
      questions: templates to ask with.
      recall: the fact as a sentence that breaks off before the value.
      bridge: what leads from the subject to the value where that takes two passages: the alias, the workplace.
    """

    subject: str
    holder: str
    relation: str
    value: str
    kind: Kind
    passage_offsets: tuple[int, ...]
    questions: tuple[str, ...]
    recall: str
    bridge: str | None = None


@dataclasses.dataclass(frozen=True)
class Story:
    """Passages that were written together; where `order` is "adjacent" nothing may come between them."""

    passages: tuple[WorldPassage, ...]
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
    bridge: str | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """Passages in prompt order and the questions asked behind them."""

    passages: tuple[WorldPassage, ...]
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class Difficulty:
    """What a context is made of.

    Attributes:
      num_passages: passages per context.
      weights: relative frequency of the stories "register", "portrait", "pair", "follow", "nickname", "gossip",
        "place".
      direct_ratio: share of named sentences that put name and value side by side ("Home of Mara Venn Hazel Lane.").
      min_words: passages are filled up to this many words.
      max_words: where above `min_words`, each passage draws its own number between the two, small ones more often.
      num_relations: relations that the people of one context have between them.
      kinds: kinds of question asked.
    """

    num_passages: int
    weights: tuple[tuple[str, float], ...]
    direct_ratio: float = 0.0
    num_relations: int = 4
    min_words: int = 0
    max_words: int = 0
    kinds: tuple[Kind, ...] = ("single",)


class Town:
    """The people of one town and what has been written about them; each fact is written once."""

    def __init__(
        self,
        rng: random.Random,
        *,
        relations: Sequence[Relation] = RELATIONS,
        direct_ratio: float = 0.0,
        min_words: int = 0,
        max_words: int = 0,
    ) -> None:
        self.rng = rng
        self.min_words = min_words
        self.max_words = max_words
        self.relations = tuple(relations)
        self.direct_ratio = direct_ratio
        firsts = [(name, "she") for name in lex.WOMEN] + [(name, "he") for name in lex.MEN]
        rng.shuffle(firsts)
        surnames = rng.sample(lex.SURNAMES, len(lex.SURNAMES))
        self._newcomers = [Person(first, surname, p) for (first, p), surname in zip(firsts, surnames, strict=True)]
        self._aliases = rng.sample(lex.ALIASES, len(lex.ALIASES))
        self._places = rng.sample(lex.PLACES, len(lex.PLACES))
        self._sites = rng.sample(SITE.values, len(SITE.values))
        self._free: dict[Person, list[Relation]] = {}
        self._nicknamed: set[Person] = set()
        self._employed: set[Person] = set()

    def person(self, num_free: int = 1, *, new: bool = False, other_than: Collection[Person] = ()) -> Person:
        """Someone with at least `num_free` unwritten relations: often a new person, sometimes a known one."""
        known = [p for p, free in self._free.items() if len(free) >= num_free and p not in other_than]
        if self._newcomers and (new or not known or self.rng.random() < 0.7):
            person = self._newcomers.pop()
            self._free[person] = self.rng.sample(self.relations, len(self.relations))
            return person
        return self.rng.choice(known)

    def portrait(self, person: Person | None = None, num_facts: int | None = None) -> Story:
        """One passage about one person."""
        count = min(len(self.relations), num_facts or self.rng.choice((3, 3, 4)))
        person = person or self.person(count, new=True)
        facts, text = self._about(person, count, opening=True)
        title = self.rng.choice(lex.PORTRAIT_TITLES).format(s=person.name)
        return Story((self._passage(title, text),), tuple(facts))

    def pair(self) -> Story:
        """One passage about two people."""
        first, second = self.person(2, new=True), self.person(2, new=True)
        first_facts, first_text = self._about(first, 2, opening=True)
        second_facts, second_text = self._about(second, 2)
        title = self.rng.choice(lex.PAIR_TITLES).format(s=first.name, t=second.name)
        return Story((self._passage(title, first_text + second_text),), tuple(first_facts + second_facts))

    def register(self, relation: Relation | None = None, num_people: int | None = None) -> Story:
        """One passage with the same fact about several people."""
        relation = relation or self.rng.choice(self.relations)
        count = num_people or self.rng.randint(3, 5)
        people: list[Person] = []
        for person, free in self._free.items():
            if len(people) < count // 2 and relation in free and self.rng.random() < 0.3:
                people.append(person)
        while len(people) < count and self._newcomers:
            people.append(self.person(len(self.relations), new=True))
        self.rng.shuffle(people)
        facts, text = [], []
        for person in people:
            fact, sentence = self._write(person, relation, person.name, opening=not text)
            facts.append(fact)
            text.append(sentence)
        title = self.rng.choice(lex.REGISTER_TITLES).format(r=relation.title)
        return Story((self._passage(title, text),), tuple(facts))

    def follow(self) -> Story:
        """Two passages; the second opens with a pronoun for the last person named in the first."""
        first = self.pair() if self.rng.random() < 0.5 else self.portrait(self.person(3, new=True), 2)
        person = next(p for p in self._free if p.name == first.facts[-1].subject)
        facts, text = self._about(person, min(len(self._free[person]), self.rng.choice((1, 1, 2))), pronoun_only=True)
        other_facts, other_text = self._about(self.person(2, new=True), self.rng.choice((1, 2)))
        second = self._passage(self.rng.choice(lex.FOLLOW_TITLES), text + other_text)
        later = [dataclasses.replace(f, kind="pronoun", passage_offsets=(0, 1)) for f in facts]
        later += [dataclasses.replace(f, passage_offsets=(1,)) for f in other_facts]
        return Story((first.passages[0], second), (*first.facts, *later), "adjacent")

    def nickname(self, num_people: int | None = None) -> Story:
        """Two passages: who is called what, and what happened to people who are named by nickname only."""
        count = min(num_people or self.rng.choice((2, 3, 3)), len(self._aliases))
        facts: list[Fact] = []
        definitions, gossip = [], []
        for _ in range(count):
            person, alias = self.person(1, other_than=self._nicknamed), self._aliases.pop()
            self._nicknamed.add(person)
            sentence = self._template(NICKNAME).format(s=person.name, v=alias)
            if not definitions and not sentence.startswith(("In the", "The", "Nick", "Friends")):
                sentence = f"{self.rng.choice(lex.OPENINGS)} {sentence}"
            definitions.append(sentence)
            facts.append(
                Fact(person.name, person.name, "nickname", alias, "single", (0,), NICKNAME.questions, NICKNAME.recall)
            )
            used, sentence = self._write(person, self._free[person][0], f"the {alias}")
            gossip.append(sentence)
            facts.append(dataclasses.replace(used, subject=f"the {alias}", passage_offsets=(1,)))
            facts.append(
                dataclasses.replace(used, subject=person.name, kind="alias", passage_offsets=(0, 1), bridge=alias)
            )
        self.rng.shuffle(gossip)
        passages = (
            self._passage(self.rng.choice(lex.NICKNAME_TITLES), definitions),
            self._passage(self.rng.choice(lex.GOSSIP_TITLES), gossip),
        )
        return Story(passages, tuple(facts), "later")

    def gossip(self) -> Story:
        """One passage about nicknames that nothing explains, as a retriever may well return it."""
        story = self.nickname()
        facts = tuple(dataclasses.replace(f, passage_offsets=(0,)) for f in story.facts if f.passage_offsets == (1,))
        return Story(story.passages[1:], facts)

    def place(self, num_places: int | None = None) -> Story:
        """Two passages: who works at which place, and where those places stand."""
        count = min(num_places or self.rng.choice((2, 3, 3)), len(self._places))
        facts: list[Fact] = []
        staff, sites, places = [], [], []
        for _ in range(count):
            person, place, site = self.person(1, other_than=self._employed), self._places.pop(), self._sites.pop()
            self._employed.add(person)
            sentence = self._template(WORKPLACE)
            staff.append(_start(self.rng, sentence.format(s=person.name, v=place), person.name, opening=not staff))
            facts.append(
                Fact(
                    person.name, person.name, "workplace", place, "single", (0,), WORKPLACE.questions, WORKPLACE.recall
                )
            )
            sentence = self._template(SITE).format(s=f"the {place}", v=site)
            sites.append(_capital(sentence))
            facts.append(Fact(f"the {place}", place, "site", site, "single", (1,), SITE.questions, SITE.recall))
            asked = (lex.TWO_HOP_QUESTIONS, lex.TWO_HOP_RECALL)
            facts.append(Fact(person.name, place, "site", site, "two_hop", (0, 1), *asked, bridge=place))
            places.append(place)
        title = lex.PLACE_TITLES[0].format(p=" and the ".join(places))
        passages = (
            self._passage(self.rng.choice(lex.REGISTER_TITLES).format(r=WORKPLACE.title), staff),
            self._passage(title, sites),
        )
        return Story(passages, tuple(facts))

    def _passage(self, title: str, sentences: list[str]) -> WorldPassage:
        """The sentences, with lines about the town put in behind the first one: one or two, more up to `min_words`."""
        sentences = list(sentences)
        fillers = self.rng.sample(lex.FILLERS, len(lex.FILLERS))
        wanted, num_words = self.rng.choice((1, 1, 2)), self.min_words
        if self.max_words > num_words:
            num_words += int((self.max_words - num_words) * self.rng.random() ** 3)
        while wanted > 0 or len(" ".join(sentences).split()) < num_words:
            sentences.insert(self.rng.randint(1, len(sentences)), fillers.pop())
            wanted -= 1
        return WorldPassage(title, " ".join(sentences))

    def _template(self, relation: Relation) -> str:
        """One of a relation's sentences; the direct one with the town's share."""
        if self.rng.random() < self.direct_ratio:
            return relation.direct
        return self.rng.choice((*relation.statements, *relation.framed))

    def _about(
        self, person: Person, num_facts: int, *, opening: bool = False, pronoun_only: bool = False
    ) -> tuple[list[Fact], list[str]]:
        """Facts about one person: named in the first sentence, later by name, first name or pronoun."""
        facts, text = [], []
        for _ in range(num_facts):
            relation = self._free[person][0]
            if pronoun_only:
                reference = person.pronoun
            else:
                reference = self.rng.choice((person.name, person.first, person.pronoun)) if text else person.name
            fact, sentence = self._write(person, relation, reference, opening=opening and not text)
            facts.append(fact)
            text.append(sentence)
        return facts, text

    def _write(self, person: Person, relation: Relation, reference: str, *, opening: bool = False) -> tuple[Fact, str]:
        """One sentence that states a fact of `person`, who is called `reference` in it."""
        self._free[person].remove(relation)
        value = self.rng.choice(relation.values)
        is_named = reference not in (person.first, person.pronoun)
        if is_named and self.rng.random() < self.direct_ratio:
            template = relation.direct
        elif reference != person.pronoun and self.rng.random() < 0.3:
            template = self.rng.choice(relation.framed)
        else:
            template = self.rng.choice(relation.statements)
        sentence = _start(self.rng, template.format(s=reference, v=value), reference, opening=opening)
        return Fact(
            person.name, person.name, relation.name, value, "single", (0,), relation.questions, relation.recall
        ), sentence


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _start(rng: random.Random, sentence: str, reference: str, *, opening: bool) -> str:
    """The sentence with a capital; at the head of a passage a phrase leads in a name, so that it keeps its space."""
    if opening and sentence.startswith(reference):
        return f"{rng.choice(lex.OPENINGS)} {sentence}"
    return _capital(sentence)


def order_stories(
    rng: random.Random, stories: Sequence[Story]
) -> tuple[list[WorldPassage], list[tuple[Fact, tuple[int, ...]]]]:
    """The passages of all stories, shuffled as far as their order allows; each fact with its passages' indices."""
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
        (fact, tuple(position[index, offset] for offset in fact.passage_offsets))
        for index, story in enumerate(stories)
        for fact in story.facts
    ]
    return [stories[index].passages[offset] for index, offset in placed], facts


def guess_ratio(values: Sequence[str]) -> float:
    """Expected accuracy of answering with the most frequent of these values, one per fact of the relation."""
    return max(Counter(values).values()) / len(values)


def ask(
    rng: random.Random, facts: Sequence[tuple[Fact, tuple[int, ...]]], num_questions: int, kinds: Sequence[Kind]
) -> tuple[Question, ...]:
    """Questions drawn with replacement, the kinds in turn; only facts with enough distractors are asked about."""
    values: dict[str, dict[str, str]] = {}
    for fact, _ in facts:
        values.setdefault(fact.relation, {})[fact.holder] = fact.value
    open_facts: dict[Kind, list[tuple[Fact, tuple[int, ...]]]] = {}
    for fact, passages in facts:
        if len(set(values[fact.relation].values())) > MIN_DISTRACTORS and fact.kind in kinds:
            open_facts.setdefault(fact.kind, []).append((fact, passages))
    questions = []
    for turn in range(num_questions if open_facts else 0):
        pools = sorted(open_facts)
        fact, passages = rng.choice(open_facts[pools[turn % len(pools)]])
        text = rng.choice(fact.questions).format(s=fact.subject)
        ratio = guess_ratio(list(values[fact.relation].values()))
        recall = fact.recall.format(s=fact.subject)
        questions.append(Question(text, fact.value, fact.kind, fact.relation, passages, recall, ratio, fact.bridge))
    rng.shuffle(questions)
    return tuple(questions)


def sample_context(rng: random.Random, difficulty: Difficulty, num_questions: int) -> Context:
    """A fresh town's passages and `num_questions` questions; the same `rng` state gives the same context."""
    while True:
        relations = rng.sample(RELATIONS, difficulty.num_relations)
        town = Town(
            rng,
            relations=relations,
            direct_ratio=difficulty.direct_ratio,
            min_words=difficulty.min_words,
            max_words=difficulty.max_words,
        )
        stories: list[Story] = []
        room = difficulty.num_passages
        while room > 0:
            fitting = [(name, weight) for name, weight in difficulty.weights if room > 1 or name not in TWO_PASSAGES]
            make: Callable[[], Story] = getattr(town, rng.choices(*zip(*fitting, strict=True))[0])
            stories.append(make())
            room -= len(stories[-1].passages)
        passages, facts = order_stories(rng, stories)
        questions = ask(rng, facts, num_questions, difficulty.kinds)
        if len(questions) == num_questions:
            return Context(tuple(passages), questions)


def held_out_contexts(kind: Kind, num_contexts: int, num_passages: int = 4, *, seed: str = TEST_SEED) -> list[Context]:
    """Contexts of towns with a fixed seed that training does not draw from, each with one question of the kind."""
    rng = random.Random(f"{seed}/{kind}")
    difficulty = Difficulty(num_passages, TEST_WEIGHTS, min_words=24, max_words=80, kinds=(kind,))
    return [sample_context(rng, difficulty, 1) for _ in range(num_contexts)]
