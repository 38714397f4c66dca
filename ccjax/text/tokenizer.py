"""Text to token ids and back: what all tokenizers have in common.

Text is either trusted (chat templates: control tokens count) or not (documents, users: control tokens are plain text).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

Follows = Literal["start", "control", "text"]
"""What precedes a text: nothing, a control token, or other text."""


class Tokenizer(Protocol):
    """Interface of tokenizers.

    Attributes:
      bos_id: the token a prompt starts with, or None.
      eos_ids: tokens that end an answer.
      vocab_size: one above the largest id.
      special_ids: tokens that represent no text: `decode` leaves them out.
      special_names: special token as written in templates -> id.
      fingerprint: sha256 (hex) of everything that determines the ids of a text.
      longest_token: most characters of a text that one token stands for; None if there is no such bound.
    """

    @property
    def longest_token(self) -> int | None: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def special_names(self) -> Mapping[str, int]: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Ids of `text` on its own, without a bos token.

        Args:
          allow_special: True only for trusted text. False: the result holds no control token, whatever `text` says.
        """
        ...

    def encode_parts(self, parts: Sequence[tuple[str, bool]], *, follows: Follows = "start") -> list[int]:
        """Ids of parts (text, trusted) read as one text: words extend across parts unless a control token is between
        them, and only trusted parts yield control tokens.

        Args:
          follows: what precedes the parts; determines whether a SentencePiece-like tokenizer puts a space before the
            first word.
        """
        ...

    def borders(self, parts: Sequence[tuple[str, bool]], *, follows: Follows = "start") -> list[int]:
        """For each untrusted part, the number of tokens of `encode_parts(parts)` that begin before it."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text, which may be a part of a character; a control token's are its
        name. Empty for an id outside the vocabulary."""
        ...


class BaseTokenizer:
    """Separation of control tokens from text, common to both file formats."""

    def __init__(
        self,
        control: Mapping[str, int],
        *,
        strip_before: Collection[str] = frozenset(),
        strip_behind: Collection[str] = frozenset(),
    ):
        """
        Args:
          control: name -> id.
          strip_before, strip_behind: names of those that include the white space before or behind them.
        """
        self._control = dict(control)
        self._control_ids = frozenset(control.values())
        self._strip_before, self._strip_behind = strip_before, strip_behind
        ordered = sorted(control, key=len, reverse=True)
        self._name_pattern = re.compile("|".join(re.escape(name) for name in ordered) or "(?!)")

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        return self.encode_parts([(text, allow_special)])

    def encode_parts(self, parts: Sequence[tuple[str, bool]], *, follows: Follows = "start") -> list[int]:
        ids: list[int] = []
        for run, _ in self._runs(parts):
            if isinstance(run, int):
                ids.append(run)
                follows = "control"
            else:
                ids += self._encode_untrusted(run, follows)
                follows = "text"
        return ids

    def borders(self, parts: Sequence[tuple[str, bool]], *, follows: Follows = "start") -> list[int]:
        found: list[int] = []
        num_tokens = 0
        for run, begins in self._runs(parts):
            starts = [0] if isinstance(run, int) else self._token_starts(run, follows)
            follows = "control" if isinstance(run, int) else "text"
            found += [num_tokens + bisect.bisect_left(starts, begin) for begin in begins]
            num_tokens += len(starts)
        return found

    def _runs(self, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[int | str, list[int]]]:
        """The parts as control tokens and, between them, the longest runs of plain text; each with the offsets at which
        untrusted parts begin in it."""
        text, begins, last = "", list[int](), ""

        def stripped(more: str) -> str:
            return more.lstrip() if not text and last in self._strip_behind else more

        for part, trusted in parts:
            part, start = _valid_unicode(part), 0
            if not trusted:
                begins.append(len(text))
            for match in self._name_pattern.finditer(part) if trusted else ():
                text += stripped(part[start : match.start()])
                last = match[0]
                if last in self._strip_before:
                    text = text.rstrip()
                if text:
                    yield text, begins
                    begins = []
                yield self._control[last], begins
                text, begins, start = "", [], match.end()
            text += stripped(part[start:])
        if text or begins:
            yield text, begins

    def _encode_untrusted(self, text: str, follows: Follows) -> list[int]:
        ids = self._encode_plain(text, follows)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The vocabulary contains a control token as an ordinary word: split the word in two.
        ids, start = [], 0
        for end in [match.start() + 1 for match in self._name_pattern.finditer(text)] + [len(text)]:
            ids += self._encode_plain(text[start:end], "text" if start else follows)
            start = end
        found = self._control_ids.intersection(ids)
        if found:
            names = sorted(name for name, token_id in self._control.items() if token_id in found)
            raise ValueError(
                f"text: wanted plain text, got {text[:80]!r}, which the tokenizer can only read as {names}"
            )
        return ids

    def _encode_plain(self, text: str, follows: Follows) -> list[int]:
        raise NotImplementedError

    def _token_starts(self, text: str, follows: Follows) -> list[int]:
        """Offset in `text` of each token's first character."""
        raise NotImplementedError


def _valid_unicode(text: str) -> str:
    """`text` with lone surrogates, which JSON can carry and UTF-8 cannot, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
