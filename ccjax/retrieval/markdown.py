"""Finds where Markdown can be split so that each part reads as in the whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r"#{1,6}[ \t]")


class Fences:
    """Fed line by line, tracks whether a line belongs to a code fence, including the fence's own lines."""

    def __init__(self) -> None:
        self._open: str | None = None

    def takes(self, line: str) -> bool:
        """Whether the next line is code or a fence."""
        mark = _FENCE.match(line)
        if self._open is None:
            self._open = mark[1] if mark else None
            return mark is not None
        if mark and mark[1].startswith(self._open) and not line.strip().strip(self._open[0]):
            self._open = None
        return True


def best_start(text: str, starts: Sequence[int]) -> int:
    """Chooses the best of some ascending positions to split at, so that what follows reads the same on its own: the
    last one at a heading, else the last one outside code, else the last one. Returns an index into `starts`.

    Args:
      text: begins outside code.
    """
    fences, end, is_code = Fences(), 0, False
    outside = at_heading = None
    lines = iter(text.splitlines(keepends=True))
    for number, start in enumerate(starts):
        while end <= start:
            line = next(lines)
            is_code, end = fences.takes(line), end + len(line)
        if not is_code:
            outside = number
            if _HEADING.match(text, start):
                at_heading = number
    found = outside if at_heading is None else at_heading
    return len(starts) - 1 if found is None else found
