"""Collections: `.jsonl` files with one document per line, in the format of BEIR's corpora.

A line is `{"_id": "...", "title": "...", "text": "...", "metadata": {...}}`; `id` is accepted for `_id`, title and
metadata are optional, other names are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ccjax.retrieval.documents import LoadedDocument, cleaned, plain_metadata
from ccjax.types import LONGEST_ID

_LONGEST_ID = LONGEST_ID - 16
"""With the collection's name before it; passages have numbers behind it."""


def is_collection(path: Path) -> bool:
    """Whether this is the name of a collection."""
    return path.suffix.lower() == ".jsonl"


def lines(path: Path, max_bytes: int) -> Iterator[bytes | None]:
    """The lines of a collection, None for those over `max_bytes`; the file is never in memory as a whole.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        while line := file.readline(max_bytes + 1):
            if len(line) <= max_bytes or line.endswith(b"\n"):
                yield line.strip()
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)
            yield None


def parse_line(line: bytes, name: str) -> tuple[str, LoadedDocument]:
    """The id of a line's document, which begins with the collection's `name`, and the document.

    Raises:
      ValueError: it is none; some lines have the JSON parser raise RecursionError.
    """
    value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    try:
        return _document_of(value, name)
    except ValueError as error:
        raise ValueError(f"not a document: {error}") from None


def _document_of(value: Any, name: str) -> tuple[str, LoadedDocument]:
    if not isinstance(value, Mapping):
        raise ValueError(f"wanted an object with _id and text, got {type(value).__name__}")
    own_id = _text(value.get("_id", value.get("id")), "_id")
    title, text = _text(value.get("title") or "", "title"), _text(value.get("text"), "text").strip("\n").rstrip()
    if not own_id.strip() or not text.strip():
        raise ValueError(f"wanted {'text' if own_id.strip() else '_id'}, got nothing")
    if len(name) + len(own_id) > _LONGEST_ID:
        raise ValueError(f"_id: wanted at most {max(0, _LONGEST_ID - len(name))} characters, got {len(own_id)}")
    title = " ".join(title.split()) or own_id
    return f"{name}/{own_id}", LoadedDocument(title, text, metadata=plain_metadata(value.get("metadata")))


def _text(value: Any, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name == "_id":
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name}: wanted text, got {type(value).__name__}")
    return cleaned(value)
