"""Reads an answer that comes in pieces; each step waits (yields) where it needs more text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

_BRACKETS = re.compile(r"[\"{}\[\]]")
_STRING_ENDS = re.compile(r"[\"\\]")
_SCALAR = re.compile(r"[^\s,}\]]*")
_PYTHON_BRACKETS = re.compile(r"[\"'()\[\]{}]")
_QUOTE_ENDS = {quote: re.compile(rf"\\.|{quote}|\\\Z", re.DOTALL) for quote in "'\""}


class CutError(Exception):
    """The answer ended within something that has to be read whole."""


class AnswerReader:
    """What was received of an answer and how far it was read.

    Attributes:
      buffer: the text so far.
      at: place of the next character.
      is_closed: no more text comes.
    """

    def __init__(self) -> None:
        self.buffer, self.at = "", 0
        self.is_closed = False

    def more(self) -> Generator[None, None, bool]:
        """Waits for more text; False at the end of the answer."""
        num_chars = len(self.buffer)
        while len(self.buffer) == num_chars:
            if self.is_closed:
                return False
            yield
        return True

    def next(self) -> Generator[None, None, str]:
        """The next character that is no white space, which is not consumed; "" at the end of the answer."""
        while True:
            while self.at < len(self.buffer):
                if not self.buffer[self.at].isspace():
                    return self.buffer[self.at]
                self.at += 1
            if not (yield from self.more()):
                return ""

    def skips(self, text: str) -> Generator[None, None, bool]:
        """Consumes `text` if it comes next."""
        while not self.buffer.startswith(text, self.at):
            if not text.startswith(self.buffer[self.at :]) or not (yield from self.more()):
                return False
        self.at += len(text)
        return True

    def word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Consumes the longest text that the pattern matches."""
        end = self.at
        while True:
            found = pattern.match(self.buffer, end)
            assert found is not None
            end = found.end()
            if end < len(self.buffer) or not (yield from self.more()):
                word, self.at = self.buffer[self.at : end], end
                return word

    def until(self, marks: tuple[str, ...], pass_on: Callable[[str], None]) -> Generator[None, None, bool]:
        """Consumes the text before the first of some marks, which goes to `pass_on` as it comes. False if the answer
        ends first."""
        while True:
            found = min((place for mark in marks if (place := self.buffer.find(mark, self.at)) >= 0), default=-1)
            end = found if found >= 0 else len(self.buffer)
            if found < 0 and not self.is_closed:
                end = max(self.at, end - max((open_length(self.buffer, mark) for mark in marks), default=0))
            pass_on(self.buffer[self.at : end])
            self.at = end
            if found >= 0 or self.is_closed:
                return found >= 0
            yield

    def string(self) -> Generator[None, None, str | None]:
        """Consumes a JSON string; None if it does not end or is none."""
        text = yield from self.whole_value()
        try:
            return json.loads(text, strict=False)
        except ValueError:
            return None

    def whole_value(self) -> Generator[None, None, str]:
        """Consumes a JSON value and returns its text."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    def value(self, pass_on: Callable[[str], None]) -> Generator[None]:
        """Consumes a JSON value, whose text goes to `pass_on` as it comes; of an object or list only the brackets are
        counted."""
        if self.buffer[self.at : self.at + 1] not in ("{", "[", '"'):
            pass_on((yield from self.word(_SCALAR)))
            return
        start, depth, in_string = self.at, 0, False
        while True:
            found = (_STRING_ENDS if in_string else _BRACKETS).search(self.buffer, self.at)
            is_cut = found is not None and found[0] == "\\" and found.end() == len(self.buffer)
            if found is None or is_cut:
                self.at = len(self.buffer)
                pass_on(self.buffer[start : self.at])
                start = self.at
                if not (yield from self.more()):
                    return
                self.at += is_cut  # the character behind the backslash
                continue
            self.at = found.end()
            if found[0] == "\\":
                self.at += 1
            elif found[0] == '"':
                in_string = not in_string
            else:
                depth += 1 if found[0] in "{[" else -1
            if not in_string and depth <= 0:
                pass_on(self.buffer[start : self.at])
                return

    def python_arguments(self) -> Generator[None, None, str]:
        """Consumes what is between the parentheses of a call in Python, and the closing one.

        Raises:
          CutError: there is none.
        """
        start, depth, quote = self.at, 1, ""
        while True:
            found = (_QUOTE_ENDS[quote] if quote else _PYTHON_BRACKETS).search(self.buffer, self.at)
            if found is None or found[0] == "\\":
                if not (yield from self.more()):
                    raise CutError
                continue
            self.at = found.end()
            if found[0] in ("'", '"'):
                quote = "" if quote else found[0]
            elif not quote:
                depth += 1 if found[0] in "([{" else -1
            if not depth:
                return self.buffer[start : self.at - 1]


def open_length(text: str, mark: str) -> int:
    """Length of the longest proper start of `mark` that the text ends with."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
