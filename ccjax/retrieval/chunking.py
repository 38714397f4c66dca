"""Splits a document's text into chunks of bounded token count.

For each chunk, the splitter reads the whole rest of the text and counts the same parts repeatedly, which takes
quadratic time. Here it sees a window of a few chunks at a time, and most counts are sums of the counts of words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from ccjax.retrieval.counting import WindowCounter
from ccjax.retrieval.markdown import best_start

_BLANK = re.compile(r"\s*")
_WINDOW_CHUNKS = 10
_MARKDOWN_WINDOW_CHUNKS = 32
_LEAST_MARKDOWN_WINDOW = 12_800
"""Window size in tokens, about 50 kB: large enough to contain a heading, where the next window may begin. A window that
begins inside a list or a table is split as plain text."""
_LONGEST_INDENT = 1024
_LOOKAHEAD_CHUNKS = 2
"""A chunk does not depend on text further behind its start than this; 1 would suffice if counts of parts added up."""


def split(
    text: str,
    *,
    count_tokens: Callable[[str], int],
    chunk_tokens: int,
    overlap_tokens: int = 0,
    markdown: bool = False,
) -> list[str]:
    """Splits a text into chunks of at most `chunk_tokens` tokens, as full as the borders allow, in reading order.

    Borders are paragraphs where possible, else lines, sentences, words, characters; with `markdown`, headings, list
    items and code blocks as well. White space around a chunk is dropped. Without overlap every other character appears
    exactly once. The same text, counts and settings always give the same chunks. Takes time proportional to the text:
    `count_tokens` sees a few times its characters, in pieces of bounded length.

    Raises:
      ValueError: `chunk_tokens` or `overlap_tokens` is out of range, or one character alone exceeds `chunk_tokens`.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: wanted at least 1, got {chunk_tokens}")
    if not 0 <= overlap_tokens < chunk_tokens:
        raise ValueError(
            f"overlap_tokens: wanted at least 0 and less than chunk_tokens={chunk_tokens}, got {overlap_tokens}"
        )
    counter = WindowCounter(text, count_tokens, *{chunk_tokens, overlap_tokens or chunk_tokens})
    splitter = (MarkdownSplitter if markdown else TextSplitter).from_callback(
        counter, chunk_tokens, overlap=overlap_tokens
    )
    chunks: list[str] = []
    for chunk in _chunks(text, splitter, counter, chunk_tokens, markdown):
        if counter(chunk) > chunk_tokens and (size := count_tokens(chunk)) > chunk_tokens:
            raise ValueError(
                f"chunk_tokens: wanted at least {size}, the size of the indivisible {chunk!r}, got {chunk_tokens}"
            )
        chunks.append(chunk)
    return chunks


def _chunks(
    text: str,
    splitter: MarkdownSplitter | TextSplitter,
    counter: WindowCounter,
    chunk_tokens: int,
    markdown: bool,
) -> Iterator[str]:
    """The chunks of the whole text, window by window."""
    num_tokens = chunk_tokens * _WINDOW_CHUNKS
    if markdown:
        num_tokens = max(chunk_tokens * _MARKDOWN_WINDOW_CHUNKS, _LEAST_MARKDOWN_WINDOW)
    start = end_of_last = 0
    while (start := _without_blank_lines(text, start)) < len(text):
        window = counter.open(start, num_tokens)
        found = _found(splitter, window, start)
        if any(counter(chunk) > chunk_tokens for _, chunk in found):  # a sum was too imprecise
            counter.is_exact = True
            found = _found(splitter, window, start)
        next_start = start + len(window)
        if next_start < len(text) and found:
            starts = [begin for begin, _ in found]
            sure = counter.num_followed_by(starts, _LOOKAHEAD_CHUNKS * chunk_tokens)
            if sure < 2:
                found = found[:1]
                next_start = starts[0] + len(found[0][1])
            else:
                last = 1 + best_start(window, [begin - start for begin in starts[1:sure]]) if markdown else sure - 1
                found, next_start = found[:last], starts[last]
        for begin, chunk in found:
            if begin + len(chunk) > end_of_last:  # else an overlap without new text
                end_of_last = begin + len(chunk)
                yield chunk
        start = next_start


def _found(splitter: MarkdownSplitter | TextSplitter, window: str, start: int) -> list[tuple[int, str]]:
    """The chunks of a window with their positions in the text; `start` is that of the window."""
    return [(start + offset, chunk) for offset, chunk in splitter.chunk_indices(window) if chunk.strip()]


def _without_blank_lines(text: str, start: int) -> int:
    """Start of the first non-blank line from `start` on; `start` if that line contains it."""
    blank = _BLANK.match(text, start)
    assert blank is not None
    begin = max(start, text.rfind("\n", start, blank.end()) + 1)
    return begin if blank.end() - begin <= _LONGEST_INDENT else blank.end()
