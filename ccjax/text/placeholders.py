"""Placeholders for untrusted texts in what a chat template renders, so that no text can influence the template's own.

The template's `tojson`, and Python's `repr`, mark the placeholders in their result, so that each text is written into
the prompt as JSON, or quoted, as often as the template does it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from typing import Any

_PLACEHOLDER = re.compile(r"qZ(\d{6})([jar]*)z")
"""Of nine characters, since Mistral's templates refuse ids of any other length. After the number stands a letter for
each time that it was written as JSON, j, or a with ASCII only, or r for Python's `repr`, which lists are written with.
"""
_MOST_TEXTS = 10**6
_DEEPEST = 100


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a prompt.

    Attributes:
      trusted: the template's own text, which may have control tokens.
      is_content: said by a message, so that it may have passages; false for definitions and arguments of tools.
    """

    text: str
    trusted: bool = True
    is_content: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a rendered template: its own text, or the number of a hidden text and how that is written."""

    text: str = ""
    number: int | None = None
    encodings: str = ""


class _Placeholder(str):
    def __repr__(self) -> str:
        return self[:-1] + "rz"


class HiddenTexts:
    """Untrusted texts, each with its placeholder."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._words: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def hide(self, text: str, *, is_content: bool = False) -> str:
        """The placeholder of a text, a new one each time.

        Raises:
          ValueError: there are a million.
        """
        if len(self._parts) == _MOST_TEXTS:
            raise ValueError(f"messages: wanted at most {_MOST_TEXTS} texts with those of tools, got more")
        self._parts.append(Part(text, trusted=False, is_content=is_content))
        return _Placeholder(f"qZ{len(self._parts) - 1:06}z")

    def hide_word(self, text: str) -> str:
        """The placeholder of a name or an id: the same for the same text, since templates compare them."""
        if text not in self._words:
            self._words[text] = self.hide(text)
        return self._words[text]

    def hide_json(self, value: Any, words: Collection[str] = (), *, depth: int = 0) -> Any:
        """A JSON value with a placeholder for every string and key but `words`.

        Raises:
          ValueError: it is nested too deep.
        """
        if depth > _DEEPEST:
            raise ValueError(f"messages: wanted JSON of at most {_DEEPEST} levels, got more")
        if isinstance(value, str):
            return value if value in words else self.hide_word(value)
        if isinstance(value, list):
            return [self.hide_json(item, words, depth=depth + 1) for item in value]
        if isinstance(value, dict):
            return {
                self.hide_json(key, words): self.hide_json(item, words, depth=depth + 1) for key, item in value.items()
            }
        return value

    def part(self, piece: Piece, text: str | None = None) -> Part:
        """What a piece stands for; `text` instead of its own, before it is encoded."""
        if piece.number is None:
            return Part(piece.text)
        part = self._parts[piece.number]
        return dataclasses.replace(part, text=_encoded(part.text if text is None else text, piece.encodings))

    def text(self, number: int) -> str:
        """The text with this number."""
        return self._parts[number].text

    def shown(self, value: Any) -> Any:
        """A value with placeholders, with the texts themselves."""
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda found: self._parts[int(found[1])].text, value)
        if isinstance(value, list):
            return [self.shown(item) for item in value]
        if isinstance(value, dict):
            return {self.shown(key): self.shown(item) for key, item in value.items()}
        return value


def pieces_of(rendered: str) -> list[Piece]:
    """A rendered template as its own texts and, between them, the hidden ones."""
    found, end = list[Piece](), 0
    for match in _PLACEHOLDER.finditer(rendered):
        found += [Piece(rendered[end : match.start()]), Piece(number=int(match[1]), encodings=match[2])]
        end = match.end()
    return [*found, Piece(rendered[end:])]


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """`tojson` of templates, as in transformers, which marks placeholders."""
    mark = "a" if ensure_ascii else "j"
    written = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    return _PLACEHOLDER.sub(lambda found: f"qZ{found[1]}{found[2]}{mark}z", written)


def _encoded(text: str, encodings: str) -> str:
    for mark in encodings:
        text = repr(text) if mark == "r" else json.dumps(text, ensure_ascii=mark == "a")[1:-1]
    return text
