"""Masks of grammars against the texts that they allow, for several vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ccjax.errors import RequestError
from ccjax.text import ByteTokenizer, Grammars, Matcher, load_tokenizer
from tests.text import small_tokenizers as small

BYTES = ByteTokenizer()
END = min(BYTES.eos_ids)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    found = Grammars(BYTES, BYTES.eos_ids, 300)
    yield found
    found.close()


def allowed(matcher: Matcher) -> set[int]:
    """The token ids in the mask."""
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    assert len(bits) == 320
    return set(np.flatnonzero(bits).tolist())


def text_of(tokens: set[int]) -> set[str]:
    return {"END" if token in BYTES.eos_ids else chr(token) for token in tokens}


def test_masks_allow_what_may_come_next(grammars: Grammars) -> None:
    matcher = grammars.matcher('start: "ab" | "ac" | "a"').begin()
    assert text_of(allowed(matcher)) == {"a"}
    matcher.push(ord("a"))
    assert text_of(allowed(matcher)) == {"b", "c", "END"} and BYTES.eos_ids <= allowed(matcher)
    assert not matcher.is_complete
    matcher.push(ord("c"))
    assert matcher.is_complete


@pytest.mark.parametrize("vocab_size", [300, 319, 320, 321])
def test_masks_have_a_bit_for_each_token_in_whole_words(vocab_size: int) -> None:
    grammars = Grammars(BYTES, BYTES.eos_ids, vocab_size)
    matcher = grammars.matcher('start: "ab"').begin()
    assert len(matcher.mask()) == 4 * ((vocab_size + 31) // 32)
    matcher.push(ord("a"))
    assert len(matcher.mask()) == 4 * ((vocab_size + 31) // 32)
    grammars.close()


def test_an_end_token_completes_and_a_forbidden_token_is_an_error(grammars: Grammars) -> None:
    matcher = grammars.matcher("start: /a*/").begin()
    matcher.mask()
    matcher.push(END)
    assert matcher.is_complete
    other = grammars.matcher("start: /a*/").begin()
    other.mask()
    with pytest.raises(RuntimeError, match="token 98 is not in the grammar"):
        other.push(ord("b"))


def test_a_grammar_with_too_many_alternatives_is_refused_where_that_shows(grammars: Grammars) -> None:
    matcher = grammars.matcher("start: " + " | ".join(f'"value {number}"' for number in range(3000))).begin()
    with pytest.raises(RequestError, match="constraint: .* items; max is 2000"):
        for letter in "value":
            matcher.mask()
            matcher.push(ord(letter))


def test_matchers_of_one_grammar_are_independent(grammars: Grammars) -> None:
    first, second = (grammars.matcher('start: "xy" "z"').begin() for _ in range(2))
    assert text_of(allowed(first)) == text_of(allowed(second)) == {"x"}
    first.push(ord("x"))
    assert text_of(allowed(first)) == {"y"} and text_of(allowed(second)) == {"x"}
    assert text_of(allowed(grammars.matcher('start: "xy" "z"').begin())) == {"x"}


def test_control_tokens_are_allowed_only_by_name(grammars: Grammars) -> None:
    name = "<|start_header_id|>"
    by_text = grammars.matcher(f'start: "{name}"').begin()
    assert text_of(allowed(by_text)) == {"<"}
    by_token = grammars.matcher(f"start: {name}").begin()
    assert allowed(by_token) == {BYTES.special_names[name]}


def test_partial_characters_are_followed(grammars: Grammars) -> None:
    matcher = grammars.matcher('start: "é" | "è"').begin()
    for byte in "é".encode():
        assert byte in allowed(matcher)
        matcher.push(byte)
    assert matcher.is_complete


def test_a_model_without_end_tokens_takes_no_grammar() -> None:
    grammars = Grammars(BYTES, frozenset(), 300)
    with pytest.raises(RequestError, match="constraint: wanted none: this model has no token that ends an answer"):
        grammars.matcher("start: /a/")
    grammars.close()


TEXTS = ["Hello, world!", " two  spaces\n\ttab", "größe 日本 🎉", "x"]


@pytest.mark.parametrize("kind", ["byte level", "prepend", "first"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(tmp_path, kind: str, text: str) -> None:
    make = {"byte level": small.byte_level, "prepend": lambda path: small.sentencepiece(path, "prepend")}
    make["first"] = lambda path: small.sentencepiece(path, "first")
    tokenizer = load_tokenizer(make[kind](tmp_path / "tokenizer"))
    assert tokenizer is not None
    ids = tokenizer.encode_parts([(text, False)], follows="text")
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    for name, token_id in tokenizer.special_names.items():
        assert tokenizer.token_bytes(token_id) == name.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
