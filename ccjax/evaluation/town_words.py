"""The words of the made-up towns: names, values and sentences of each kind of fact.

The embedded model's tokenizer has one token for each of these words. In every sentence the subject stands before the
value: a causal model can then mark the value with its owner when it reads it.
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
    """One kind of fact, with `{s}` for the subject and `{v}` for the value in its sentences.

    Attributes:
      statements: begin with the subject, so that a pronoun can take its place.
      framed: begin with other words; the last one is a label: "Home of {s}: {v}."
    """

    name: str
    title: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    framed: tuple[str, ...]
    questions: tuple[str, ...]

    @property
    def direct(self) -> str:
        """The label without its colon: plain induction finds a value right behind its subject, so training begins
        with it."""
        return self.framed[-1].replace(": the", "").replace(":", "")

    @property
    def recall(self) -> str:
        """The direct sentence up to its value."""
        return self.direct.partition(" {v}")[0]


def _relation(name: str, title: str, values: str, statements: str, framed: str, questions: str) -> Relation:
    """A relation of lists in text: values divided by commas or, if there are none, by spaces; sentences by bars."""
    words = values.split(", ") if "," in values else values.split()
    sentences = (tuple(text.split(" | ")) for text in (statements, framed, questions))
    return Relation(name, title, tuple(words), *sentences)


RELATIONS = (
    _relation(
        "home",
        "Homes",
        "Hazel Lane, Willow Lane, Cherry Lane, Mill Lane, Orchard Lane, Chestnut Lane, Rope Street, Candle Street, "
        "Barrel Street, Salt Street, Basket Street, Pepper Street, Fox Hill, Lamp Hill, Raven Hill, Maple Hill, "
        "Windmill Hill, Thistle Hill",
        "{s} lives on {v}. | {s} has a small house on {v}. | {s} rents two rooms on {v}.",
        "The home of {s} is on {v}. | The house of {s} stands on {v}. | Home of {s}: {v}.",
        "Where does {s} live? | Where is the home of {s}? | On which street does {s} live?",
    ),
    _relation(
        "job",
        "Jobs",
        "cooper baker weaver sailor tailor carpenter doctor teacher fisher gardener painter mason cobbler potter "
        "barber printer surveyor librarian",
        "{s} works as a {v}. | {s} earns a living as a {v}. | {s} is a {v} by trade.",
        "The work of {s} is that of a {v}. | The job of {s} is that of a {v}. | Job of {s}: {v}.",
        "What is the job of {s}? | What does {s} do for a living? | What work does {s} do?",
    ),
    _relation(
        "pet",
        "Pets",
        "goat parrot tortoise rabbit cat dog ferret donkey hedgehog goose hen pony snail canary hamster piglet lizard "
        "dove",
        "{s} keeps a {v}. | {s} looks after a {v}. | {s} shares the house with a {v}.",
        "The pet of {s} is a {v}. | The animal of {s} is a {v}. | Pet of {s}: {v}.",
        "What pet does {s} keep? | What is the pet of {s}? | Which animal does {s} look after?",
    ),
    _relation(
        "tool",
        "Tools",
        "hammer lantern chisel spade telescope needle ladder saw bucket kettle ruler whistle rake notebook mallet "
        "pulley knife wrench",
        "{s} always carries a {v}. | {s} never leaves without a {v}. | {s} owns a good {v}.",
        "The tool of {s} is a {v}. | The best tool of {s} is a {v}. | Tool of {s}: {v}.",
        "What tool does {s} carry? | What is the tool of {s}? | Which tool does {s} own?",
    ),
    _relation(
        "dish",
        "Dishes",
        "chowder dumplings pancakes stew porridge trout noodles cabbage lentils cheese omelette radishes mussels "
        "gingerbread pickles turnips sausages pudding",
        "{s} likes {v} best. | {s} would eat {v} every day. | {s} cooks {v} for guests.",
        "The favourite dish of {s} is {v}. | The favourite meal of {s} is {v}. | Dish of {s}: {v}.",
        "What is the favourite dish of {s}? | What does {s} like to eat? | Which dish does {s} like best?",
    ),
    _relation(
        "music",
        "Music",
        "fiddle flute drum harp trumpet cello bagpipe banjo organ clarinet accordion lute horn guitar tambourine piano "
        "violin oboe",
        "{s} plays the {v}. | {s} is learning the {v}. | {s} teaches the {v}.",
        "The instrument of {s} is the {v}. | The first instrument of {s} was the {v}. | Music of {s}: {v}.",
        "What instrument does {s} play? | What is the instrument of {s}? | Which instrument does {s} play?",
    ),
    _relation(
        "boat",
        "Boats",
        "red blue green yellow white black purple brown grey pink lemon scarlet golden turquoise crimson violet silver "
        "bronze",
        "{s} rows a {v} boat. | {s} sails a {v} boat. | {s} owns a {v} boat.",
        "The boat of {s} is {v}. | The boat of {s} is painted {v}. | Boat of {s}: {v}.",
        "What colour is the boat of {s}? | Which colour is the boat of {s}? | What colour of boat does {s} row?",
    ),
    _relation(
        "origin",
        "Origins",
        "Arden Belmont Cormoran Drelling Elstow Farrowby Glenmoor Hartwell Ilmarsh Kirkdale Lowick Merrow Norbury "
        "Oxley Pemby Ravenna Stanmere Trevose",
        "{s} comes from {v}. | {s} was born in {v}. | {s} grew up in {v}.",
        "The birthplace of {s} is {v}. | The family of {s} is from {v}. | Birthplace of {s}: {v}.",
        "Where was {s} born? | Where does {s} come from? | What is the birthplace of {s}?",
    ),
    _relation(
        "prize",
        "Prizes",
        "raft race, sack race, cart race, rowing race, swimming race, barefoot race, pie contest, kite contest, "
        "singing contest, chess contest, poetry contest, dancing contest, lifeboat medal, beekeeping medal, "
        "archery medal, apple medal, bravery medal, quilting medal",
        "{s} won the {v}. | {s} took first place in the {v}. | {s} is proud of the {v}.",
        "The prize of {s} was for the {v}. | The trophy of {s} is from the {v}. | Prize of {s}: {v}.",
        "What did {s} win? | What prize did {s} win? | Which prize did {s} take?",
    ),
)
WORKPLACE = _relation(
    "workplace",
    "Workplaces",
    "Gull Bakery, Otter Forge, Copper Chapel, Silver Library, Lark Tavern, Falcon Dairy, Mermaid Brewery, Dolphin "
    "Museum, Beacon Bakery, Puffin Forge, Juniper Library, Saffron Tavern, Crown Dairy, Whale Brewery",
    "{s} works at the {v}. | {s} spends the day at the {v}.",
    "The workplace of {s} is the {v}. | Workplace of {s}: {v}.",
    "Where does {s} work? | What is the workplace of {s}?",
)
SITE = _relation(
    "site",
    "Places",
    "North Quay, South Quay, Eastern Quay, Western Quay, Upper Quay, Lower Quay, Middle Quay, Outer Quay, Inner Quay, "
    "Royal Quay, Timber Quay, Customs Quay, Granary Quay, Signal Quay",
    "{s} stands on {v}. | {s} looks out over {v}.",
    "The door of {s} opens on {v}. | Site of {s}: {v}.",
    "Where does {s} stand? | On which quay is {s}?",
)
SITE_OF_WORKPLACE = dataclasses.replace(
    SITE,
    framed=("Workplace of {s} stands on: {v}.",),
    questions=("Where does the workplace of {s} stand?", "On which quay does {s} work?"),
)
"""Two facts at once: where someone's workplace stands."""
NICKNAME = _relation(
    "nickname",
    "Nicknames",
    "Heron Badger Comet Lantern Magpie Thunder Whisper Captain Compass Feather Granite Sparrow Shadow Ember Kestrel "
    "Button Walnut Anchor",
    "Friends call {s} the {v}. | In the harbour {s} is known as the {v}. | The nickname of {s} is the {v}.",
    "Nickname of {s}: the {v}.",
    "What is the nickname of {s}? | What do friends call {s}?",
)
PORTRAIT_TITLES = ("About {s}", "A portrait of {s}", "Meet {s}", "Notes on {s}")
PAIR_TITLES = ("Neighbours {s} and {t}", "About {s} and {t}")
REGISTER_TITLES = ("{r} in the town book", "{r} of Saltmere", "{r} along the harbour")
FOLLOW_TITLES = ("More of the same story", "The story goes on", "Another page of the diary", "The diary, continued")
NICKNAME_TITLES = ("Nicknames", "Who is called what")
GOSSIP_TITLES = ("Harbour talk", "News from the tavern", "Heard at the market")
