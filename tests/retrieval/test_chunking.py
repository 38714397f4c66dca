"""Chunks stay under the limit, lose nothing, and end where sentences do."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from ccjax.retrieval import chunking
from ccjax.retrieval.chunking import split
from ccjax.retrieval.counting import WindowCounter

COUNTS = {
    "words": lambda text: len(text.split()),
    "characters": len,
    # Like a subword tokenizer: long words cost more, and two halves can cost more than the whole.
    "subwords": lambda text: sum(-(-len(piece) // 4) for piece in re.findall(r"\w+|[^\w\s]", text)),
}
TEXTS = st.one_of(
    st.text(max_size=300),
    st.lists(
        st.sampled_from(
            ["One two. ", "Mr. A said no! ", "\n\n", "- item\n", "# Head\n", "```\nx = 1\n```\n", "日本語。", "🙂"]
        )
    ).map("".join),
)


@given(TEXTS, st.sampled_from([1, 1, 30]), st.sampled_from(sorted(COUNTS)), st.integers(1, 30), st.booleans())
def test_chunks_stay_within_the_limit_and_lose_no_text(
    text: str, repeats: int, count: str, limit: int, markdown: bool
) -> None:
    text *= repeats  # so that there are many windows
    chunks = split(text, count_tokens=COUNTS[count], chunk_tokens=limit, markdown=markdown)
    assert all(0 < COUNTS[count](chunk) <= limit for chunk in chunks if chunk)
    assert "".join("".join(chunks).split()) == "".join(text.split())


@given(TEXTS, st.integers(2, 30), st.data())
def test_overlapping_chunks_lose_no_text(text: str, limit: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, limit - 1))
    chunks = split(text, count_tokens=COUNTS["words"], chunk_tokens=limit, overlap_tokens=overlap)
    assert all(COUNTS["words"](chunk) <= limit for chunk in chunks)
    end = 0
    for chunk in chunks:  # every chunk starts no later than where the one before it ended, white space aside
        start = text.find(chunk, max(0, end - len(chunk)))
        start = start if start >= 0 else text.find(chunk)
        assert start >= 0
        end = max(end, start + len(chunk))
    assert {char for char in text if not char.isspace()} == {char for c in chunks for char in c if not char.isspace()}


PROSE = "The moon pulls the sea. Dr. Rey measured it twice! Was she right? Yes. The tide rose by 4.6 mm."


def test_chunks_end_with_sentences() -> None:
    chunks = split(PROSE, count_tokens=COUNTS["words"], chunk_tokens=11)
    assert chunks == [
        "The moon pulls the sea. Dr. Rey measured it twice!",
        "Was she right? Yes. The tide rose by 4.6 mm.",
    ]


def test_overlap_repeats_whole_sentences() -> None:
    chunks = split(PROSE, count_tokens=COUNTS["words"], chunk_tokens=11, overlap_tokens=5)
    assert len(chunks) > 2
    assert all(after.split(". ")[0].rstrip(".") in before for before, after in zip(chunks, chunks[1:], strict=False))


def test_splits_prefer_paragraph_boundaries_over_sentences() -> None:
    text = "One two three. Four five.\n\nSix seven eight. Nine ten."
    assert split(text, count_tokens=COUNTS["words"], chunk_tokens=8) == text.split("\n\n")


def test_markdown_sections_are_not_merged_across_headings() -> None:
    text = "Intro words here.\n\n## A\n\nAlpha text.\n\n## B\n\nBeta text."
    chunks = split(text, count_tokens=COUNTS["words"], chunk_tokens=9, markdown=True)
    assert chunks == ["Intro words here.\n\n## A\n\nAlpha text.", "## B\n\nBeta text."]


def test_text_without_boundaries_is_cut_at_the_limit() -> None:
    assert [len(chunk) for chunk in split("a" * 1001, count_tokens=len, chunk_tokens=250)] == [250, 250, 250, 250, 1]


def test_blank_text_has_no_chunks() -> None:
    assert split(" \n\n ", count_tokens=len, chunk_tokens=5) == []


@pytest.mark.parametrize(
    ("chunk_tokens", "overlap_tokens", "message"),
    [
        (0, 0, "chunk_tokens: wanted at least 1, got 0"),
        (5, 5, "overlap_tokens: wanted at least 0 and less than chunk_tokens=5, got 5"),
        (5, -1, "overlap_tokens: .* got -1"),
    ],
)
def test_bad_settings_are_refused(chunk_tokens: int, overlap_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split("text", count_tokens=len, chunk_tokens=chunk_tokens, overlap_tokens=overlap_tokens)


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
def test_work_is_linear_in_the_text_length(name: str, markdown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    windows, counted = [], []

    class Watched(WindowCounter):
        def open(self, start: int, num_tokens: int) -> str:
            windows.append(super().open(start, num_tokens))
            return windows[-1]

    def count(text: str) -> int:
        counted.append(len(text))
        return COUNTS["subwords"](text)

    monkeypatch.setattr(chunking, "WindowCounter", Watched)
    monkeypatch.setattr(chunking, "_LEAST_MARKDOWN_WINDOW", 0)
    text = INPUTS[name]
    split(text, count_tokens=count, chunk_tokens=30, markdown=markdown)
    assert sum(map(len, windows)) <= 2 * len(text)
    assert max(map(COUNTS["subwords"], windows)) <= 35 * 30  # within one, the splitter takes the square of it
    assert sum(counted) <= 14 * len(text)


@pytest.mark.parametrize("overlap", [0, 12])
@pytest.mark.parametrize("name", ["prose", "one line", "Japanese", "lists", "code"])
def test_windowed_splitting_equals_splitting_the_whole_text(name: str, overlap: int) -> None:
    text = INPUTS[name][:20_000]
    whole = TextSplitter.from_callback(COUNTS["subwords"], 60, overlap=overlap).chunks(text)
    assert split(text, count_tokens=COUNTS["subwords"], chunk_tokens=60, overlap_tokens=overlap) == whole


def test_windowed_markdown_splitting_equals_splitting_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "_LEAST_MARKDOWN_WINDOW", 0)
    code = "```python\n# not a heading\nx = 1\n\n\ny = 2\n```"
    section = f"## Part\n\nSome words here.\n\n{code}\n\n- one\n  - two\n- three\n\n"
    text = "# All\n\n" + section * 200
    whole = MarkdownSplitter.from_callback(COUNTS["words"], 20).chunks(text)
    assert split(text, count_tokens=COUNTS["words"], chunk_tokens=20, markdown=True) == whole


def test_limit_holds_for_nonadditive_token_counts() -> None:
    def count(text: str) -> int:  # words together cost what none of them costs alone
        return -(-len(text) // 3) + text.count("a b")

    chunks = split("a b " * 500, count_tokens=count, chunk_tokens=40)
    assert all(count(chunk) <= 40 for chunk in chunks) and "".join(chunks).count("a") == 500
