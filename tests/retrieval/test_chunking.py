"""Passages stay under the limit, lose nothing, say what they are about, and end where sentences do."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.retrieval.chunking import split

COUNTS = {
    "words": lambda text: len(text.split()),
    "characters": len,
    # Like a subword tokenizer: long words cost more, and two halves can cost more than the whole.
    "subwords": lambda text: sum(-(-len(piece) // 4) for piece in re.findall(r"\w+|[^\w\s]", text)),
}
PARTS = (
    *("One two. ", "Mr. A said no! ", "\n\n", "- item\n", "  - inner\n", "# Head\n", "## Sub\n", "```\nx = 1\n```\n"),
    *("日本語。", "🙂", "> quote\n", "|a|b|\n|-|-|\n|1|2|\n|3|4|\n", "[x]: y\n", "<b>\n", "    code\n", "e\u0301"),
)
TEXTS = st.one_of(st.text(max_size=300), st.lists(st.sampled_from(PARTS)).map("".join))


def letters(text: str) -> list[str]:
    return re.findall(r"\w", text)


@given(TEXTS, st.sampled_from([1, 1, 30]), st.sampled_from(sorted(COUNTS)), st.integers(1, 30), st.booleans())
def test_passages_stay_within_the_limit_and_lose_no_text(
    text: str, repeats: int, count: str, limit: int, markdown: bool
) -> None:
    text = text.replace("\r", "") * repeats
    passages = split(text, count_tokens=COUNTS[count], chunk_tokens=limit, markdown=markdown)
    assert all(passage.strip() and COUNTS[count](passage) <= limit for passage in passages)
    kept = iter(letters("".join(passages)))  # what is repeated comes on top
    assert all(letter in kept for letter in letters(text))


PROSE = "The moon pulls the sea. Dr. Rey measured it twice! Was she right? Yes. The tide rose by 4.6 mm."


def test_chunks_end_with_sentences() -> None:
    chunks = split(PROSE, count_tokens=COUNTS["words"], chunk_tokens=11)
    assert chunks == [
        "The moon pulls the sea. Dr. Rey measured it twice!",
        "Was she right? Yes. The tide rose by 4.6 mm.",
    ]


def test_splits_prefer_paragraph_boundaries_over_sentences() -> None:
    text = "One two three. Four five.\n\nSix seven eight. Nine ten."
    assert split(text, count_tokens=COUNTS["words"], chunk_tokens=8) == text.split("\n\n")


def test_text_without_boundaries_is_cut_at_the_limit() -> None:
    passages = split("a" * 1001, count_tokens=len, chunk_tokens=250)
    assert "".join(passages) == "a" * 1001 and len(passages) <= 6 and min(map(len, passages)) >= 40


def test_blank_text_has_no_chunks() -> None:
    assert split(" \n\n ", count_tokens=len, chunk_tokens=5) == []


def test_passages_of_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens: wanted at least 1, got 0"):
        split("text", count_tokens=len, chunk_tokens=0)


def test_a_character_over_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens: wanted at least 4, the size of the indivisible '🙂', got 3"):
        split("ab 🙂", count_tokens=lambda text: len(text.encode()), chunk_tokens=3)


def test_token_counter_error_propagates() -> None:
    def broken(text: str) -> int:
        raise LookupError("tokenizer lost")

    with pytest.raises(LookupError, match="tokenizer lost"):
        split("some text", count_tokens=broken, chunk_tokens=3)


ROOT = Path(__file__).parents[2]
INPUTS = {
    "prose": (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") * 3,
    "one line": " ".join(["The tide rose by 4.6 mm"] * 3000),
    "numbers": ",".join(map(str, range(12_000))),
    "one letter": "a" * 60_000,
    "letters": "".join(random.Random(0).choices("abcdefghij", k=60_000)),
    "signs": "".join(random.Random(0).choices("!?.,;:*_`[]()#>-", k=60_000)),
    "Japanese": "月は海を引く" * 10_000,
    "Thai": "ดวงจันทร์ดึงทะเล" * 4_000,
    "newlines": "a" + "\n" * 60_000 + "b",
    "blanks": "a" + " " * 60_000 + "b",
    "lists": "".join(f"{'  ' * (number % 60)}- item {number}\n" for number in range(1000)),
    "code": "```\n" + "x = 1  # one\n" * 5000,
    "bytes": random.Random(0).randbytes(60_000).decode("latin-1"),
}


@pytest.mark.parametrize("markdown", [False, True])
@pytest.mark.parametrize("name", sorted(INPUTS))
def test_work_is_linear_in_the_text_length(name: str, markdown: bool) -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return COUNTS["subwords"](text)

    text = INPUTS[name]
    split(text, count_tokens=count, chunk_tokens=30, markdown=markdown)
    assert sum(counted) <= 8 * len(text) and len(counted) <= len(text) + 9


def test_limit_holds_for_nonadditive_token_counts() -> None:
    def count(text: str) -> int:  # words together cost what none of them costs alone
        return -(-len(text) // 3) + text.count("a b")

    chunks = split("a b " * 500, count_tokens=count, chunk_tokens=40)
    assert all(count(chunk) <= 40 for chunk in chunks) and "".join(chunks).count("a") == 500


# -- what a passage says of its place ---------------------------------------------------------------------------------

words = COUNTS["words"]


def passages_of(text: str, limit: int = 200, title: str = "Manual") -> list[str]:
    return split(text, count_tokens=words, chunk_tokens=limit, title=title, markdown=True)


def prose(subject: str, num_sentences: int = 13) -> str:
    return " ".join(f"The {subject} is looked after in week {week} of each year." for week in range(num_sentences))


def only(passages: list[str], needle: str) -> str:
    (found,) = [passage for passage in passages if needle in passage]
    return found


@pytest.mark.parametrize("limit", [80, 120, 200])
@pytest.mark.parametrize("names", [("Pump A", "Pump B"), ("Berlin", "Paris", "Rome"), ("2023", "2024"), ("C#", "C++")])
def test_passage_begins_with_the_title_and_the_headings_that_name_its_subject(
    names: tuple[str, ...], limit: int
) -> None:
    sections = [
        f"## {name}\n\n### Care\n\n{prose('thing')}\n\n### Limits\n\nThe highest pressure is {number} bar."
        for number, name in enumerate(names, 4)
    ]
    passages = passages_of("\n\n".join(sections), limit)
    for number, name in enumerate(names, 4):
        first, _, body = only(passages, f"is {number} bar").partition("\n")
        assert first.startswith(f"Manual > {name}") and not any(f"## {other}\n" in body for other in names)
        assert "Limits" in first + body
    assert all(words(passage) <= limit and passage.startswith("Manual > ") for passage in passages)


def test_headings_stay_with_what_follows_and_no_passage_is_short() -> None:
    passages = passages_of(f"## Closing hours\n\n{prose('door', 19)} So it is.\n\n## End", title="House")
    assert len(passages) == 2 and all(40 <= words(passage) for passage in passages)
    assert passages[0].startswith("House > Closing hours\nThe door") and passages[1].startswith(
        "House > Closing hours\n"
    )
    for part in (
        f"Intro.\n\n## A\n\n{prose('a', 30)}",
        f"## A\n\nShort.\n\n## B\n\n{prose('b', 40)}\n\n## C\n\nShort.",
    ):
        passages = passages_of(part)
        assert len(passages) > 1 and all(words(passage.partition("\n")[2]) >= 40 for passage in passages)
        assert not any(passage.splitlines()[-1].startswith("#") for passage in passages[:-1])
    assert passages_of("## A\n\nShort.") == ["Manual > A\nShort."]


@pytest.mark.parametrize("num_sentences", range(7, 40, 2))
@pytest.mark.parametrize("names", [("Pump A", "Pump B", "Pump C"), ("2023", "2024", "2025")])
def test_the_end_of_a_section_is_in_no_passage_with_the_next_outer_one(
    names: tuple[str, ...], num_sentences: int
) -> None:
    sections = [
        f"## {name}\n\n### Care\n\n{prose('thing', num_sentences)}\n\n### Limits\n\nIt has {number} bar."
        for number, name in enumerate(names, 4)
    ]
    passages = passages_of("\n\n".join(sections))
    for number, name in enumerate(names, 4):
        passage = only(passages, f"has {number} bar")
        assert passage.startswith(f"Manual > {name}") and not any(
            f"has {other} bar" in passage for other in (4, 5, 6) if other != number
        )
        assert not any(f"## {other}\n\n" in passage for other in names if other != name)


def test_lines_in_bold_are_headings() -> None:
    text = "\n\n".join(f"**{name}:**\n\n{prose('thing')} It has {name[-1]} bar." for name in ("Pump A", "**Pump B"))
    passages = passages_of(f"# Pumps\n\n{text.replace('****', '**')}", 120)
    for name in "AB":
        assert only(passages, f"has {name} bar").startswith(f"Manual > Pumps > Pump {name}\nThe thing")
    sentence = f"Do not open it: **danger** and **death**.\n\n**Never do it.**\n\n{prose('thing')}"
    assert all(passage.startswith("Manual\n") for passage in passages_of(sentence, 120))


def test_headings_of_one_passage_that_is_more_than_one_section_are_in_its_text() -> None:
    (passage,) = passages_of("## A\n\n### One\n\nAlpha.\n\n### Two\n\nBeta.\n\n")
    assert passage == "Manual > A\n### One\n\nAlpha.\n\n### Two\n\nBeta."
    (passage,) = passages_of("## A\n\nAlpha.\n\n## B\n\nBeta.\n\n")
    assert passage == "Manual\n## A\n\nAlpha.\n\n## B\n\nBeta."


def test_long_headings_are_shortened_from_the_outside_and_stay_in_the_text() -> None:
    path = ["# " + "a " * 9, "## " + "b " * 9, "### the inner one"]
    (passage,) = passages_of("\n\n".join([*path, "Text."]), 60, title="The title")
    first, _, body = passage.partition("\n")
    assert first == f"The title > {('b ' * 9).strip()} > the inner one" and "# a a" in body and body.endswith("Text.")


BLOCKS = {
    "code": "```python\n" + "\n".join(f"value_{n} = {n}" for n in range(12)) + "\n```",
    "tilde code": "~~~\n# no heading\n\n\n" + "\n".join(f"value_{n} = {n}" for n in range(12)) + "\n~~~",
    "list item": "- An item. It has sentences. " + prose("lid", 3) + " The last one.",
    "item with paragraphs": "1. An item.\n\n   " + prose("lid", 3) + "\n\n   The last one.",
    "item with items": "* An item.\n  * One. Two. Three.\n  * Four. Five.\n  * " + prose("lid", 2),
    "table": "| A | B |\n|---|---|\n" + "\n".join(f"| {n} | x |" for n in range(6)),
}


@pytest.mark.parametrize("before", [1, 3, 4, 5])
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_blocks_that_fit_are_whole(name: str, before: int) -> None:
    passages = passages_of(f"{prose('pot', before)}\n\n{BLOCKS[name]}\n\n{prose('pan', 7)}", 100)
    last = BLOCKS[name].strip("`~").split()[-1]
    assert len(passages) > 1
    assert any("".join(BLOCKS[name].split()) in "".join(passage.split()) for passage in passages), last


def test_long_code_keeps_its_marks_in_each_passage() -> None:
    code = "\n".join(f"value_{n} = {n}" for n in range(150))
    for opening, closing in (("```python", "```"), ("~~~~", "~~~~"), ("````", "````")):
        passages = passages_of(f"## Code\n\nThis is it:\n\n{opening}\n{code}\n{closing}\n\nThe end.")
        assert len(passages) >= 3 and "This is it:" in passages[0]
        assert all(f"\n{opening}\nvalue" in passage for passage in passages)
        assert all(re.search(rf"\n{closing}(\n|$)", passage) for passage in passages)


TABLE = "| Zone | Price |\n|:-----|------:|\n" + "\n".join(f"| Zone {n} | {n * 3} Euro |" for n in range(60))


@pytest.mark.parametrize(
    ("text", "head"),
    [
        (f"Tariffs of 2024\n\n{TABLE}", "Tariffs of 2024\n\n| Zone | Price |\n|:-----|------:|\n"),
        (f"{prose('bus', 20)}\n\nTariffs:\n\n{TABLE}", "Tariffs:\n\n| Zone | Price |\n|:-----|------:|\n"),
        (f"## Bus\n\n{TABLE}\n\nThe end.", "| Zone | Price |\n|:-----|------:|\n"),
        (re.sub(r"(?m)^\|\s?|\s?\|$", "", TABLE), "Zone | Price\n:-----|------:\n"),
    ],
    ids=["caption", "sentence before", "heading only", "no outer bars"],
)
def test_each_part_of_a_table_has_its_header(text: str, head: str) -> None:
    passages = [passage for passage in passages_of(text) if "Euro" in passage]
    assert len(passages) >= 2
    for number in range(60):
        passage = only(passages, f"Zone {number} |")
        assert passage.count(head) == 1 and f"Zone {number} | {number * 3} Euro" in passage


@pytest.mark.parametrize("num_columns", [14, 20])
def test_a_header_of_up_to_three_quarters_of_a_passage_is_repeated(num_columns: int) -> None:
    header = "| " + " | ".join(f"N{n}" for n in range(num_columns)) + " |\n"
    rows = "\n".join(f"| {row} {'| x ' * (num_columns - 1)}|" for row in range(9))
    passages = passages_of(f"{header}|{' --- |' * num_columns}\n{rows}", 100)
    assert len(passages) >= 3 and all(header in passage and "| x " in passage for passage in passages)


@pytest.mark.parametrize(
    "text",
    [
        "Dr. Rey, e.g. on 3. May, met Mr. St. Clair vs. No. 5 in the U.S. Army. ",
        "He said: “It rises.” Then he left. ",
        "Is it? Yes! It costs 4.50 Euro... and more. ",
        "Die Flut stieg z. B. am 12. Mai. ",
        "यह पहला वाक्य है। यह दूसरा है। ",
        "これは文です。次の文です！",
        "هل هذا صحيح؟ نعم. ",
    ],
)
def test_borders_are_ends_of_sentences(text: str) -> None:
    passages = split(text * 30, count_tokens=lambda text: len(text.split()) + len(text) // 4, chunk_tokens=60)
    assert len(passages) >= 3
    assert all(re.search(r"[.!?。！？।؟”…]$", passage) for passage in passages)
    starts = ("Dr.", "He said", "Then", "Is it", "Yes", "It costs", "Die", "यह", "これ", "次", "هل", "نعم")
    assert all(passage.startswith(starts) for passage in passages)


def test_text_in_front_does_not_change_the_passages_far_behind() -> None:
    text = "\n\n".join(f"## Part {n}\n\n{prose(f'part {n}', 5 + n % 9)}" for n in range(30))
    before, after = passages_of(text), passages_of(f"A new sentence. And one more.\n\n{text}")
    assert before[-20:] == after[-20:]
