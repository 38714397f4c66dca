"""Token counts of many parts of one text, most of them summed up from counts of its words. Knows no borders."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence

_BLOCK_CHARS = 4096
_WORD = re.compile(r"\s{0,64}\S+(?:[^\S\n]{0,8}\n\s{0,64}\S+)?|\s{1,64}")
_LONGEST_WORD = 128
_PART = re.compile(r"\s+|[^\W\d_]{1,8}|\d{1,3}|([^\w\s])\1{1,63}|[^\w\s]{1,4}|_+")
"""Of what is longer than a word: few of these are distinct, whatever the text."""
_MOST_KNOWN = 100_000
_NUM_SAMPLES = 64


class WindowCounter:
    """Counts tokens of parts of a window of a text.

    A count of a part is the sum of those of its words, which are remembered, as long as that is clearly above or below
    the limit; near it `count_tokens` says. What "near" is follows from how far sums were off so far.
    """

    def __init__(self, text: str, count_tokens: Callable[[str], int], limit: int) -> None:
        """Args:
        limit: what counts are compared with, in tokens."""
        self._text, self._count_tokens, self._limit = text, count_tokens, limit
        self._known: dict[str, int] = {}
        self._slack = 8.0 + limit / 8
        self._num_samples, self._most_off = 0, 0.0
        self._window, self._start, self._found_at = "", 0, 0
        self._ends, self._sums = [0], [0]
        self._exact: dict[str, int] = {}

    def open(self, start: int, num_tokens: int) -> str:
        """The text from `start` on, as much of it as has about `num_tokens` tokens; what is counted next."""
        ends, sums, end = [0], [0], start
        while end < len(self._text) and sums[-1] < num_tokens:
            for word in _WORD.findall(self._text[end : end + _BLOCK_CHARS]):
                for part in (word,) if len(word) <= _LONGEST_WORD else _parts(word):
                    ends.append(ends[-1] + len(part))
                    sums.append(sums[-1] + self._count(part))
            end = start + ends[-1]
        last = bisect.bisect_left(sums, num_tokens)
        self._ends, self._sums = ends[: last + 1], sums[: last + 1]
        self._window, self._start = self._text[start : start + self._ends[-1]], start
        self._found_at = 0
        self._exact.clear()
        return self._window

    def __call__(self, part: str) -> int:
        """Tokens of a part of the window; above or below the limit if they are, and close to their number."""
        at = self._window.find(part, self._found_at)
        if at < 0 and (at := self._window.find(part)) < 0:
            return self._count_tokens(part)
        self._found_at = at
        about = self._sum_to(at + len(part)) - self._sum_to(at)
        if abs(about - self._limit) > self._slack:
            return round(about)
        if (count := self._exact.get(part)) is not None:
            return count
        count = self._exact[part] = self._count_tokens(part)
        self._most_off = max(self._most_off, abs(about - count))
        self._num_samples += 1
        if self._num_samples >= _NUM_SAMPLES:
            self._slack = 2 * self._most_off
        return count

    def num_followed_by(self, starts: Sequence[int], num_tokens: int) -> int:
        """How many of some places in the text, ascending, are followed by `num_tokens` tokens of the window."""
        bound = self._sums[-1] - num_tokens
        return bisect.bisect_right(starts, bound, key=lambda start: self._sum_to(start - self._start))

    def _count(self, word: str) -> int:
        count = self._known.get(word)
        if count is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            count = self._known[word] = self._count_tokens(word)
        return count

    def _sum_to(self, place: int) -> float:
        """Tokens of the window before `place`; within a word, in proportion."""
        after = bisect.bisect_left(self._ends, place)
        if after >= len(self._ends):
            return self._sums[-1]
        if self._ends[after] == place:
            return self._sums[after]
        share = (place - self._ends[after - 1]) / (self._ends[after] - self._ends[after - 1])
        return self._sums[after - 1] + share * (self._sums[after] - self._sums[after - 1])


def _parts(word: str) -> list[str]:
    return [match[0] for match in _PART.finditer(word)]
