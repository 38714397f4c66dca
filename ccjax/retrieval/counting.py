"""Token counts of many parts of one text, most of them sums of the counts of its words."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence

_BLOCK_CHARS = 4096
_WORD = re.compile(r"\s{0,64}\S+(?:[^\S\n]{0,8}\n\s{0,64}\S+)?|\s{1,64}")
_LONGEST_WORD = 128
_PART = re.compile(r"\s+|([^\w\s])\1{2,63}|[^\w\s]?(?:[^\W\d_]{1,16}|\d{1,3})|[^\w\s]{1,4}|_+")
"""Runs longer than a word; any text has few distinct ones."""
_MOST_KNOWN = 100_000
_LEAST_SLACK = 8.0
_RUN_CHARS = 256
_RUN = re.compile(rf"[!-~]{{{_RUN_CHARS}}}")
_SPARE = 2
"""Tolerance in tokens for sums that end in a long run of numbers or signs without blanks: no border there is better
than another, and finding the last one that fits would take many counts."""
_NUM_SAMPLES = 64


class WindowCounter:
    """Counts tokens of parts of a window of a text.

    A count is the sum of the (memoised) counts of the part's words, as long as that is clearly above or below every
    limit; near a limit, `count_tokens` decides. How near follows from the errors of sums so far.
    """

    def __init__(self, text: str, count_tokens: Callable[[str], int], *limits: int) -> None:
        """Args:
        limits: thresholds, in tokens, that counts are compared with.
        """
        self._text, self._count_tokens, self._limits = text, count_tokens, limits
        self._known: dict[str, int] = {}
        self._slack = _LEAST_SLACK + max(limits) / 8
        self._num_samples, self._most_off = 0, 0.0
        self._window, self._start, self._found_at = "", 0, 0
        self._ends, self._sums = [0], [0]
        self._exact: dict[str, int] = {}
        self._counted = (-1, 0, 0)
        self.is_exact = False
        """Whether sums are too imprecise in this window, so that `count_tokens` is used for everything."""

    def open(self, start: int, num_tokens: int) -> str:
        """Moves the window to the text from `start` on, about `num_tokens` tokens of it."""
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
        self._counted = (-1, 0, 0)
        self.is_exact = False
        return self._window

    def __call__(self, part: str) -> int:
        """Tokens of a part of the window: on the right side of every limit, and close to the exact number."""
        at = self._window.find(part, self._found_at)
        if at < 0 and (at := self._window.find(part)) < 0:
            return self._count_tokens(part)
        self._found_at = at
        end = at + len(part)
        about, slack = self._sum_to(end) - self._sum_to(at), self._slack
        if at == self._counted[0]:  # close to a known count
            _, counted_end, count = self._counted
            more = self._sum_to(end) - self._sum_to(counted_end)
            about, slack = count + more, min(slack, 2.0 + abs(more) / 8)
            if _RUN.match(part, max(0, len(part) - _RUN_CHARS)):
                about, slack = about + _SPARE, -1.0
        if not self.is_exact and all(abs(about - limit) > slack for limit in self._limits):
            return max(0, round(about))
        if (count := self._exact.get(part)) is None:
            count = self._exact[part] = self._count_tokens(part)
            self._learn(abs(self._sum_to(end) - self._sum_to(at) - count))
        self._counted = at, end, count
        return count

    def _learn(self, off: float) -> None:
        """Adapts to the error of a sum."""
        self._most_off = max(self._most_off, off)
        self._num_samples += 1
        if self._num_samples >= _NUM_SAMPLES:
            self._slack = 2 * self._most_off

    def num_followed_by(self, starts: Sequence[int], num_tokens: int) -> int:
        """Number of the given places in the text, ascending, that are followed by `num_tokens` tokens of the window."""
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
