"""ccjax.text.stream: streamed pieces are the whole text, never half a character, never part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.text import IncrementalDecoder, StopStrings, load_tokenizer
from tests.text import small_tokenizers as small

TEXTS = ["The red ball 😀 is 東京!", "  two  spaces ", "Grüße\n\n", "👩‍👩‍👧 नमस्ते", "x", "�", "a�b"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte level": load_tokenizer(small.byte_level(home / "byte")),
        "prepend": load_tokenizer(small.sentencepiece(home / "prepend", "prepend")),
        "first": load_tokenizer(small.sentencepiece(home / "first", "first")),
    }


def pieces_of(tokenizer, ids, prompt_ids=()) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt_ids)
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


@pytest.mark.parametrize("kind", ["byte level", "prepend", "first"])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text(loaded, kind, text):
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, allow_special=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


def test_character_of_several_tokens_is_emitted_in_one_piece(loaded):
    tokenizer = loaded["prepend"]
    ids = tokenizer.encode("a🦜b", allow_special=False)
    pieces = pieces_of(tokenizer, ids)
    assert len(ids) > 5 and [piece for piece in pieces if piece] == ["a", "🦜", "b"]


def test_unfinished_character_is_flushed_as_replacement_at_the_end(loaded):
    tokenizer = loaded["prepend"]
    ids = tokenizer.encode("a🦜", allow_special=False)[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert all("\ufffd" not in piece for piece in pieces[:-1]) and set(pieces[-1]) == {"\ufffd"}


@pytest.mark.parametrize("kind", ["prepend", "first"])
def test_leading_space_depends_on_the_prompt(loaded, kind):
    tokenizer = loaded[kind]
    prompt = tokenizer.encode("The red", allow_special=False)
    ids = tokenizer.encode(" ball", allow_special=False)
    alone, behind = "".join(pieces_of(tokenizer, ids)), "".join(pieces_of(tokenizer, ids, prompt))
    assert behind == tokenizer.decode([*prompt, *ids])[len("The red") :]
    assert behind.startswith(" ") and behind.lstrip() == alone.lstrip() == "ball"


def test_special_tokens_have_no_text(loaded):
    tokenizer = loaded["first"]
    ids = tokenizer.encode("red ball", allow_special=False)
    end = tokenizer.special_names["</s>"]
    assert "".join(pieces_of(tokenizer, [end, *ids, end, end])) == tokenizer.decode(ids)


def test_special_tokens_are_shown_at_once_before_bytes_that_are_no_text(loaded):
    tokenizer = loaded["byte level"]
    special = min(tokenizer.special_ids)
    byte = next(token for token in range(500) if tokenizer.token_bytes(token) == b"\xff")
    ids = [special, *[byte] * 12]
    decoder = IncrementalDecoder(tokenizer, skip_special=False)
    pieces = [decoder.push(token) for token in ids]
    assert len("".join(pieces)) > len(tokenizer.decode([special], skip_special=False)), "not all is held to the end"
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids, skip_special=False)


@given(ids=st.lists(st.integers(0, 499), max_size=80))
def test_arbitrary_byte_level_tokens_stream_to_the_decoded_text(loaded, ids):
    """Also bytes that are no UTF-8: what an untrained model writes."""
    tokenizer = loaded["byte level"]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_arbitrary_text_streams_to_the_decoded_text(loaded, text, prompt):
    for tokenizer in loaded.values():
        ids = tokenizer.encode(text, allow_special=False)
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_work_per_token_does_not_grow(loaded):
    tokenizer = loaded["byte level"]

    class Counting:
        longest = 0

        def decode(self, ids, *, skip_special=True):
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids, skip_special=skip_special)

    invalid = tokenizer.encode("é", allow_special=False)  # one character or its two bytes
    lone = next(i for i in range(500) if tokenizer.decode([i]) == "\ufffd")
    for ids in (tokenizer.encode("red ball " * 300, allow_special=False), [lone] * 3000, invalid * 500):
        counting = Counting()
        assert "".join(pieces_of(counting, ids)) == tokenizer.decode(ids)
        assert counting.longest < 32


def streamed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["\n\nQ:"], ["one\n", "\n", "Q", ": two", " three"], ["one", "", "", "", "", ""], "\n\nQ:"),
        (["STOP"], ["xS", "T", "OPE"], ["x", "", "", ""], "STOP"),
        (["STOP"], ["xS", "T", "ART S"], ["x", "", "START ", "S"], None),  # emitted later
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (["b", "a"], ["xab"], ["x", ""], "a"),  # the leftmost, then the longest
        (["a", "ab"], ["xab"], ["x", ""], "ab"),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_stop_string_across_pieces(stops, pieces, shown, matched):
    assert streamed(stops, pieces) == (shown, matched)


@pytest.mark.parametrize("stops", ["abc", [""], [None], [3]])
def test_bad_stops_are_refused(stops):
    with pytest.raises(ValueError, match="stop: wanted a list of non-empty strings"):
        StopStrings(stops)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_streamed_cut_equals_the_cut_of_the_whole_text(pieces, stops):
    shown, matched = streamed(stops, pieces)
    # The stream ends with the first piece that completes a stop string; of those in it the leftmost counts.
    text = ""
    for piece in pieces:
        text += piece
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            assert matched is not None and "".join(shown) == text[: min(starts)]
            return
    assert matched is None and "".join(shown) == text
