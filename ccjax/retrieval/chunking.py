"""Splits a document's text into chunks of bounded token count. Knows no tokenizer, only how to count with one."""

from __future__ import annotations

from collections.abc import Callable

from semantic_text_splitter import MarkdownSplitter, TextSplitter


def split(
    text: str,
    *,
    count_tokens: Callable[[str], int],
    chunk_tokens: int,
    overlap_tokens: int = 0,
    markdown: bool = False,
) -> list[str]:
    """Chunks of at most `chunk_tokens` tokens, as full as the borders allow, in reading order.

    Borders are paragraphs where possible, else lines, sentences, words, characters; with `markdown`, headings, list
    items and code blocks as well. White space around a chunk is dropped. Without overlap every other character
    appears exactly once. The same text, counts and settings always give the same chunks.

    Raises:
      ValueError: `chunk_tokens` or `overlap_tokens` is out of range, or one character alone is over `chunk_tokens`.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: wanted at least 1, got {chunk_tokens}")
    if not 0 <= overlap_tokens < chunk_tokens:
        raise ValueError(
            f"overlap_tokens: wanted at least 0 and less than chunk_tokens={chunk_tokens}, got {overlap_tokens}"
        )
    splitter = (MarkdownSplitter if markdown else TextSplitter).from_callback(
        count_tokens, chunk_tokens, overlap=overlap_tokens
    )
    chunks = [chunk for chunk in splitter.chunks(text) if chunk.strip()]
    for chunk in chunks:
        if count_tokens(chunk) > chunk_tokens:
            raise ValueError(
                f"chunk_tokens: wanted at least {count_tokens(chunk)}, the size of the indivisible {chunk!r}, "
                f"got {chunk_tokens}"
            )
    return chunks
