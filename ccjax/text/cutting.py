"""Finds passages in the text of a message: blocks between the borders that clients put around what they paste.

A block gives the same token ids wherever it stands, since its first and last word are left out: the tokenizer may join
them with what is around it. What is between blocks (numbers, dates, file names, tags) is text of its own.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator

_KINDS = "document|doc|passage|context|source|citation|chunk|result|excerpt|reference|file|page|title|id"
_LINE = r"(?<![^\n])[ \t]{0,40}"
_BORDER = re.compile(
    "|".join(
        (
            r"\n[ \t]*\n",  # a blank line
            r"(?:\\r|\\n){2,}",  # one inside a JSON string
            r"</?[A-Za-z_][\w.:-]{0,60}(?:\s[^<>\n]{0,300})?/?>",  # a tag
            r"<!\[CDATA\[|\]\]>",
            _LINE + r"```[^\n]*",  # a code fence
            _LINE + r"[^\w\s]{3,}[ \t]*(?![^\n])",  # a line of dashes or the like
            _LINE + r"(?=#{1,6} )",  # a heading, which belongs to what follows
            _LINE + r"(?:[-*•]|\d{1,3}[.)])[ \t]",  # the mark of a list item
            rf"{_LINE}[^\w\n]{{0,6}}(?i:end )?(?i:{_KINDS})\b[^\n:\w]{{0,3}}[#\w-]{{0,24}}[ \t]{{0,3}}(?:\]:?|:)",
            _LINE + r"\[\d{1,3}\]:?",
            r"[{\[,]\s{0,40}\"\w{1,60}\"\s{0,3}:\s{0,3}\"?",  # a key of a JSON object
            r"(?<!\\)\"\s{0,40}(?=[,}\]])",  # the end of a JSON string
        )
    )
)
_LONG_LINE = re.compile(r"(?<![^\n])[^\n]{100,}(?![^\n])")
"""A line that is a paragraph: it does not belong together with the lines around it."""
_WORD_ENDS = re.compile(r"(?<=\S) (?=\S)|(?<=\w)(?=[，。、；：！？])")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])[\"')\]]*(?= \S)|(?<=[。！？])")
_LEAST_CHARS, _MOST_CHARS = 400, 2000
"""Length of the parts that longer blocks are divided into."""
_ONE_OF = 3
"""One of so many ends of sentences, chosen by the words before it, divides a long block."""
_COUNTED_CHARS, _CONTEXT_CHARS, _SEEN_CHARS = 100, 1000, 100_000


def blocks_of(text: str) -> list[tuple[int, int]]:
    """Start and end, in characters, of the passages in a text, ascending; each begins and ends between two words."""
    found = []
    for start, end in _between_borders(text):
        start += len(text[start:end]) - len(text[start:end].lstrip())
        ends = [match.start() for match in _WORD_ENDS.finditer(text, start, end)]
        if len(ends) > 1:
            found += _parts(text, ends[0], ends[-1])
    return found


def has_context(text: str) -> bool:
    """True if a text looks like retrieved context: its passages of 100 characters or more have 1,000 or more in all. Of
    a text that is longer than most contexts only the beginning is looked at."""
    lengths = (end - start for start, end in blocks_of(text[:_SEEN_CHARS]))
    return len(text) >= _CONTEXT_CHARS and sum(n for n in lengths if n >= _COUNTED_CHARS) >= _CONTEXT_CHARS


def _between_borders(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for border in itertools.chain(_BORDER.finditer(text), (None,)):
        end = len(text) if border is None else border.start()
        for line in _LONG_LINE.finditer(text, start, end):
            yield start, line.start()
            yield line.start(), line.end()
            start = line.end()
        yield start, end
        start = end if border is None else border.end()


def _parts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """A block, in parts if it is long: cut at ends of sentences that its words choose, so that a text of which only
    some is quoted is cut at the same places."""
    if end - start > _MOST_CHARS:
        for match in _SENTENCE_ENDS.finditer(text, start, end):
            last_words = text[max(start, match.end() - 64) : match.end()]
            least = _MOST_CHARS if zlib.crc32(last_words.encode()) % _ONE_OF else _LEAST_CHARS
            if match.end() - start >= least:
                yield start, match.end()
                start = match.end()
    yield start, end
