"""The words of the demo world: names, values and sentence templates per relation.

Every name and value is a list of plain words, so that the tokenizer can give each word one token. In every statement
the subject stands before the value: a causal model can then mark the value with its owner when it reads it.
"""

from __future__ import annotations

import dataclasses

WOMEN = tuple(
    "Mara Ines Tilda Runa Selka Odile Brisa Carla Dora Edda Fenna Greta Hanna Isolde Jonna Kaya "
    "Lotte Minna Nora Oda Petra Rosa Signe Thea Ulla Vera Wanda Yara Zelda Alma Birte Clara".split()
)
MEN = tuple(
    "Tobin Anselm Bruno Casper Davin Emil Fabian Gorm Henrik Ivo Jasper Kurt Leif Magnus Nils Oskar "
    "Piet Quill Rufus Sven Torsten Ulf Viggo Walter Yorick Zeno Arno Bertil Claus Dirk Egon Finn".split()
)
SURNAMES = tuple(
    "Venn Hale Roe Marsh Calder Pike Thorne Wick Harrow Lund Brandt Ostler Keel Sand Crane Dunn "
    "Falk Grove Hobb Irons Jessop Kerr Lorne Mott Nash Oakes Pell Quist Rudd Stroud Tarn Usher "
    "Vance Wray Yates Zorn Ames Birch Cobb Drake Elwes Frost Gage Holm Innes Judd Kemp Lisle "
    "Munro Nye Orde Penn Quayle Reeve Skene Tull Unwin Voss Ward Yorke Abbot Beck Croft Dale".split()
)
ALIASES = tuple(
    "Heron Badger Comet Lantern Magpie Thunder Whisper Captain Compass Feather Granite Sparrow Shadow Ember "
    "Kestrel Button Walnut Anchor".split()
)
PLACES = tuple(
    f"{first} {second}"
    for first, second in zip(
        "Gull Otter Copper Silver Lark Falcon Mermaid Dolphin Beacon Puffin Juniper Saffron Crown Whale".split(),
        "Bakery Forge Chapel Library Tavern Dairy Brewery Museum Bakery Forge Library Tavern Dairy Brewery".split(),
        strict=True,
    )
)
FILLERS = (
    "The wind smells of salt and tar.",
    "On market days the square is full of carts.",
    "Everyone in town knows this.",
    "The bells ring at noon.",
    "In winter the lamps burn early.",
    "The old wall keeps out the sea.",
    "Nobody here locks a door.",
    "The tide comes in twice a day.",
    "Gulls sit on every roof.",
    "The ferry calls once a week.",
    "On Sunday the streets are quiet.",
    "The fog lifts before noon.",
    "Children play near the harbour wall.",
    "Rain is never far away.",
)
OPENINGS = (
    "In town",
    "Down by the harbour",
    "As everyone knows,",
    "This year",
    "These days",
    "According to the town book,",
    "Near the old wall",
    "For many years now",
)


@dataclasses.dataclass(frozen=True)
class Relation:
    """One kind of fact: its values, and its sentences with `{s}` for the subject and `{v}` for the value.

    `statements` start with the subject, so that a pronoun can take its place; `direct` puts subject and value side by
    side: plain induction finds the value then, which starts the curriculum; finished towns do not use it.
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    framed: tuple[str, ...]
    direct: str
    questions: tuple[str, ...]
    title: str

    @property
    def recall(self) -> str:
        """The direct statement up to its value."""
        return self.direct.partition(" {v}")[0].removesuffix(" the")


RELATIONS = (
    Relation(
        "home",
        tuple(
            f"{first} {second}"
            for second, names in (
                ("Lane", "Hazel Willow Cherry Mill Orchard Chestnut"),
                ("Street", "Rope Candle Barrel Salt Basket Pepper"),
                ("Hill", "Fox Lamp Raven Maple Windmill Thistle"),
            )
            for first in names.split()
        ),
        ("{s} lives on {v}.", "{s} has a small house on {v}.", "{s} rents two rooms on {v}."),
        ("The home of {s} is on {v}.", "The house of {s} stands on {v}.", "Home of {s}: {v}."),
        "Home of {s} {v}.",
        ("Where does {s} live?", "Where is the home of {s}?", "On which street does {s} live?"),
        "Homes",
    ),
    Relation(
        "job",
        tuple(
            "cooper baker weaver sailor tailor carpenter doctor teacher fisher gardener painter mason "
            "cobbler potter barber printer surveyor librarian".split()
        ),
        ("{s} works as a {v}.", "{s} earns a living as a {v}.", "{s} is a {v} by trade."),
        ("The work of {s} is that of a {v}.", "The job of {s} is that of a {v}.", "Job of {s}: {v}."),
        "Job of {s} {v}.",
        ("What is the job of {s}?", "What does {s} do for a living?", "What work does {s} do?"),
        "Jobs",
    ),
    Relation(
        "pet",
        tuple(
            "goat parrot tortoise rabbit cat dog ferret donkey hedgehog goose hen pony snail canary "
            "hamster piglet lizard dove".split()
        ),
        ("{s} keeps a {v}.", "{s} looks after a {v}.", "{s} shares the house with a {v}."),
        ("The pet of {s} is a {v}.", "The animal of {s} is a {v}.", "Pet of {s}: {v}."),
        "Pet of {s} {v}.",
        ("What pet does {s} keep?", "What is the pet of {s}?", "Which animal does {s} look after?"),
        "Pets",
    ),
    Relation(
        "tool",
        tuple(
            "hammer lantern chisel spade telescope needle ladder saw bucket kettle ruler whistle rake "
            "notebook mallet pulley knife wrench".split()
        ),
        ("{s} always carries a {v}.", "{s} never leaves without a {v}.", "{s} owns a good {v}."),
        ("The tool of {s} is a {v}.", "The best tool of {s} is a {v}.", "Tool of {s}: {v}."),
        "Tool of {s} {v}.",
        ("What tool does {s} carry?", "What is the tool of {s}?", "Which tool does {s} own?"),
        "Tools",
    ),
    Relation(
        "dish",
        tuple(
            "chowder dumplings pancakes stew porridge trout noodles cabbage lentils cheese omelette "
            "radishes mussels gingerbread pickles turnips sausages pudding".split()
        ),
        ("{s} likes {v} best.", "{s} would eat {v} every day.", "{s} cooks {v} for guests."),
        ("The favourite dish of {s} is {v}.", "The favourite meal of {s} is {v}.", "Dish of {s}: {v}."),
        "Dish of {s} {v}.",
        ("What is the favourite dish of {s}?", "What does {s} like to eat?", "Which dish does {s} like best?"),
        "Dishes",
    ),
    Relation(
        "music",
        tuple(
            "fiddle flute drum harp trumpet cello bagpipe banjo organ clarinet accordion lute horn guitar "
            "tambourine piano violin oboe".split()
        ),
        ("{s} plays the {v}.", "{s} is learning the {v}.", "{s} teaches the {v}."),
        ("The instrument of {s} is the {v}.", "The first instrument of {s} was the {v}.", "Music of {s}: {v}."),
        "Music of {s} {v}.",
        ("What instrument does {s} play?", "What is the instrument of {s}?", "Which instrument does {s} play?"),
        "Music",
    ),
    Relation(
        "boat",
        tuple(
            "red blue green yellow white black purple brown grey pink lemon scarlet golden turquoise "
            "crimson violet silver bronze".split()
        ),
        ("{s} rows a {v} boat.", "{s} sails a {v} boat.", "{s} owns a {v} boat."),
        ("The boat of {s} is {v}.", "The boat of {s} is painted {v}.", "Boat of {s}: {v}."),
        "Boat of {s} {v}.",
        ("What colour is the boat of {s}?", "Which colour is the boat of {s}?", "What colour of boat does {s} row?"),
        "Boats",
    ),
    Relation(
        "origin",
        tuple(
            "Arden Belmont Cormoran Drelling Elstow Farrowby Glenmoor Hartwell Ilmarsh Kirkdale Lowick Merrow "
            "Norbury Oxley Pemby Ravenna Stanmere Trevose".split()
        ),
        ("{s} comes from {v}.", "{s} was born in {v}.", "{s} grew up in {v}."),
        ("The birthplace of {s} is {v}.", "The family of {s} is from {v}.", "Birthplace of {s}: {v}."),
        "Birthplace of {s} {v}.",
        ("Where was {s} born?", "Where does {s} come from?", "What is the birthplace of {s}?"),
        "Origins",
    ),
    Relation(
        "prize",
        tuple(
            f"{first} {second}"
            for second, names in (
                ("race", "raft sack cart rowing swimming barefoot"),
                ("contest", "pie kite singing chess poetry dancing"),
                ("medal", "lifeboat beekeeping archery apple bravery quilting"),
            )
            for first in names.split()
        ),
        ("{s} won the {v}.", "{s} took first place in the {v}.", "{s} is proud of the {v}."),
        ("The prize of {s} was for the {v}.", "The trophy of {s} is from the {v}.", "Prize of {s}: {v}."),
        "Prize of {s} {v}.",
        ("What did {s} win?", "What prize did {s} win?", "Which prize did {s} take?"),
        "Prizes",
    ),
)
WORKPLACE = Relation(
    "workplace",
    PLACES,
    ("{s} works at the {v}.", "{s} spends the day at the {v}."),
    ("The workplace of {s} is the {v}.", "Workplace of {s}: {v}."),
    "Workplace of {s} {v}.",
    ("Where does {s} work?", "What is the workplace of {s}?"),
    "Workplaces",
)
SITE = Relation(
    "site",
    tuple(
        f"{first} Quay"
        for first in (
            "North South Eastern Western Upper Lower Middle Outer Inner Royal Timber Customs Granary Signal"
        ).split()
    ),
    ("{s} stands on {v}.", "{s} looks out over {v}."),
    ("The door of {s} opens on {v}.", "Site of {s}: {v}."),
    "Site of {s} {v}.",
    ("Where does {s} stand?", "On which quay is {s}?"),
    "Places",
)
TWO_HOP_QUESTIONS = ("Where does the workplace of {s} stand?", "On which quay does {s} work?")
TWO_HOP_RECALL = "Workplace of {s} stands on:"
ALIAS_STATEMENTS = (
    "Friends call {s} the {v}.",
    "In the harbour {s} is known as the {v}.",
    "The nickname of {s} is the {v}.",
)
NICKNAME = Relation(
    "nickname",
    ALIASES,
    ALIAS_STATEMENTS,
    ("Nickname of {s}: the {v}.",),
    "Nickname of {s} {v}.",
    ("What is the nickname of {s}?", "What do friends call {s}?"),
    "Nicknames",
)
PORTRAIT_TITLES = ("About {s}", "A portrait of {s}", "Meet {s}", "Notes on {s}")
PAIR_TITLES = ("Neighbours {s} and {t}", "About {s} and {t}")
REGISTER_TITLES = ("{r} in the town book", "{r} of Saltmere", "{r} along the harbour")
FOLLOW_TITLES = ("More of the same story", "The story goes on", "Another page of the diary", "The diary, continued")
NICKNAME_TITLES = ("Nicknames", "Who is called what")
GOSSIP_TITLES = ("Harbour talk", "News from the tavern", "Heard at the market")
PLACE_TITLES = ("The {p}", "About the {p}")
SYSTEM_PROMPT = "Answer the question from the passages."


def lexicon_texts() -> list[str]:
    """Every string of the lexicon: between them they hold each word that a world can contain."""
    texts = [*WOMEN, *MEN, *SURNAMES, *ALIASES, *PLACES, *FILLERS, *OPENINGS, *TWO_HOP_QUESTIONS, *ALIAS_STATEMENTS]
    for relation in (*RELATIONS, WORKPLACE, SITE, NICKNAME):
        texts += [*relation.values, *relation.statements, *relation.framed, relation.direct, *relation.questions]
        texts += [f"{relation.title} of"]
    for titles in (PORTRAIT_TITLES, PAIR_TITLES, REGISTER_TITLES, FOLLOW_TITLES, NICKNAME_TITLES, GOSSIP_TITLES):
        texts += titles
    return [*texts, *PLACE_TITLES, "She she", "He he", SYSTEM_PROMPT]
