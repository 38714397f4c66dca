"""A folder of tables and of sections that only their headings tell apart, and questions about them
(`bench.py retrieval --quality`): a right passage has the row, or the sentence, that answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

_CARE = """Clean the housing every {} weeks with a soft cloth and lukewarm water, and never with solvents. Before
opening it, close both valves, wait until the gauge shows nothing, and note the hour in the log. The seals are checked
each spring by two people; whoever finds a drop of oil on the floor tells the foreman at once. Spare parts are in the
store behind the workshop, sorted by the year in which they were bought. A new seal is fitted dry, then greased with
two strokes of the long grease gun. After that the machine runs without load for ten minutes while somebody listens at
the bearing. If it hums, that is normal; if it knocks, stop it and call the maker. The log is kept for {} years. In
winter the housing is drained on the first day of frost, and the drain stays open until March.""".replace("\n", " ")
_TOWNS = """Ahlbeck Anklam Baabe Bansin Barth Binz Demmin Dranske Eldena Freest Gingst Goehren Greifswald Heringsdorf
Jarmen Karlshagen Kloster Lassan Lauterbach Lohme Middelhagen Murchin Neuendorf Peenemuende Putbus Ralswiek Rambin
Rankwitz Sassnitz Schaprode Sellin Thiessow Trassenheide Usedom Vitte Wiek Wolgast Zinnowitz Zirchow Zudar""".split()
_MACHINES = (
    ("pumps.md", "Pump", "ABCDEF", "The highest pressure is {} bar.", "What is the highest pressure of pump {}?"),
    ("boilers.md", "Boiler", "123456", "It must not get hotter than {} degrees.", "How hot may boiler {} get?"),
    ("cranes.rst", "Crane", "PQRSTU", "It lifts at most {} tons.", "How many tons can crane {} lift?"),
    ("engines.md", "Engine", ("Alpha", "Beta", "Gamma", "Delta", "Omega", "Sigma"), "The highest speed is {} rpm.",
     "How fast may engine {} turn?"),
)  # fmt: skip


def write_tables(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Writes the files; for each question its text, the file, and what a right passage has."""
    rng = random.Random(5)
    rows = [(str(n), f"{rng.uniform(3, 12):.1f}", str(rng.randrange(60, 400)), rng.choice("yn")) for n in range(1, 61)]
    lines = ["| Quay | Depth (m) | Length (m) | Crane |", "|---|---|---|---|", *map(_row, rows)]
    (folder / "quays.md").write_text("# Harbour\n\n## Quays\n\nThe depth at low tide.\n\n" + "\n".join(lines), "utf-8")
    asked = ("How deep is the water at quay {}?", "Does quay {} have a crane?", "How long is quay {}?")
    for at in (2, 10, 16, 27, 33, 40, 51, 57):
        yield asked[at % 3].format(at + 1), "quays.md", _row(rows[at])
    rows = [
        (str(n), str(rng.randrange(1, 4)), str(rng.randrange(20, 200)), f"{rng.uniform(1, 9):.2f}")
        for n in range(1, 81)
    ]
    table = ["Locker,Floor,Litres,Euro a day", *map(",".join, rows)]
    (folder / "lockers.csv").write_text("\n".join(table), "utf-8")
    asked = ("What does locker {} cost a day?", "How many litres fit into locker {}?", "On which floor is locker {}?")
    for at in (4, 12, 21, 30, 43, 52, 66, 75):
        yield asked[at % 3].format(at + 1), "lockers.csv", _row(rows[at])
    rows = [
        (town, f"{rng.uniform(2, 20):.2f}", f"{rng.uniform(2, 30):.2f}", str(rng.randrange(10, 90))) for town in _TOWNS
    ]
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><tr><th>To</th><th>Single</th><th>Return</th><th>Minutes</th></tr>{cells}</table>"
    (folder / "fares.html").write_text(
        f"<title>Ferry fares</title><h1>Ferry fares</h1><p>Children pay half.</p>{table}", "utf-8"
    )
    asked = ("What does a return ticket to {} cost?", "How long does the ferry to {} take?", "What is a single to {}?")
    for at in range(3, 40, 5):
        yield asked[at % 3].format(rows[at][0]), "fares.html", _row(rows[at])
    for file, kind, names, limit, question in _MACHINES:
        sections = []
        for name, value in zip(names, rng.sample(range(3, 99), len(names)), strict=True):
            parts = ("Care", _CARE.format(rng.randrange(2, 9), rng.randrange(3, 20))), ("Limits", limit.format(value))
            sections.append(_section(f"{kind} {name}", parts, file.endswith(".rst")))
            yield question.format(name), file, limit.format(value)
        (folder / file).write_text("\n\n".join(sections), "utf-8")


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _section(title: str, parts: tuple[tuple[str, str], ...], is_rst: bool) -> str:
    if is_rst:
        below = [f"{name}\n{'~' * len(name)}\n\n{text}" for name, text in parts]
        return "\n\n".join([f"{title}\n{'-' * len(title)}", *below])
    return "\n\n".join([f"## {title}", *(f"### {name}\n\n{text}" for name, text in parts)])
