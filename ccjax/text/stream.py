"""Streamed text of an answer: whole characters only, and stop strings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ccjax.text.tokenizer import Tokenizer

_MAX_CHARACTER_TOKENS = 4
_CONTEXT_TOKENS = 6


class IncrementalDecoder:
    """Text that can no longer change, token by token; the pieces joined are the text of all ids decoded at once.

    A token may be a part of a character, and some tokenizers drop or add a space depending on the text before. So each
    step decodes the ids since an earlier border twice, without and with the new tokens, and emits the difference once
    it ends in a whole character. Work per token does not grow with the answer. (Only with bytes that are not UTF-8 may
    text differ: some tokenizers then also replace the whole characters just before them.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True):
        """
        Args:
          prompt_ids: tokens before the answer; the last few of them determine a leading space.
          skip_special: leave out special tokens.
        """
        self._skip_special = skip_special
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)[-_CONTEXT_TOKENS:]
        self._start = 0
        self._emitted = len(self._ids)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that it completes, often empty."""
        self._ids.append(token_id)
        before, after = self._texts()
        border = len(self._ids)
        if after.endswith("\ufffd"):
            # A character has at most 4 bytes, so bytes that 4 more tokens left unchanged are not text.
            border -= _MAX_CHARACTER_TOKENS
            if border - self._emitted < _MAX_CHARACTER_TOKENS:
                return ""
            settled = self._tokenizer.decode(self._ids[self._start : border], skip_special=self._skip_special)
            if not after.startswith(settled):
                return ""
            after = settled
        if len(after) <= len(before):
            return ""
        self._start, self._emitted = self._emitted, border
        return after[len(before) :]

    def flush(self) -> str:
        """The rest at the end of the answer; incomplete characters become U+FFFD."""
        before, after = self._texts()
        self._start = self._emitted = len(self._ids)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = functools.partial(self._tokenizer.decode, skip_special=self._skip_special)
        return decode(self._ids[self._start : self._emitted]), decode(self._ids[self._start :])


class StopStrings:
    """Cuts a stream of text at the first stop string, even across pieces.

    Text that could still become a stop string is held back; `flush` returns it when the stream ends without one.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """`include`: a stop string that is found is shown, too."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop: wanted a list of non-empty strings, got {stops!r}")
        self._stops, self._is_included = tuple(stops), include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next piece; returns what may be shown. After a match, sets `matched` and returns nothing more.
        Without `may_stop`, no stop string that ends in this piece counts."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found and may_stop:
            at, _, self.matched = min(found)
            at += len(self.matched) if self._is_included else 0
            shown, self._held = self._held[:at], ""
            return shown
        longest = max((self._open_length(stop) for stop in self._stops), default=0)
        cut = len(self._held) - longest
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The text still held back, when no more comes."""
        shown, self._held = self._held, ""
        return shown

    def _open_length(self, stop: str) -> int:
        """Length of the longest proper start of `stop` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
