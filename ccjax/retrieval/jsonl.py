"""Collections: `.jsonl` files with one document per line, in the format of BEIR's corpora.

A line is `{"_id": "...", "title": "...", "text": "...", "metadata": {...}}`; `id` is accepted for `_id`, title and
metadata are optional, other names are ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ccjax.retrieval.documents import DocumentError, LoadedDocument, cleaned, plain_metadata, reason_of
from ccjax.types import LONGEST_ID

_LONGEST_ID = LONGEST_ID - 16
"""With the collection's name before it; passages have numbers behind it."""


def is_collection(path: Path) -> bool:
    """Whether this is the name of a collection."""
    return path.suffix.lower() == ".jsonl"


@dataclasses.dataclass(frozen=True)
class CollectionLine:
    """One document of a collection; `version` is the sha256 (hex) of its line."""

    document_id: str
    version: str
    document: LoadedDocument


def read_lines(path: Path, name: str, *, max_line_bytes: int) -> Iterator[CollectionLine | DocumentError]:
    """Yields the documents of a collection, or an error for each bad line; the file is never in memory as a whole.

    Args:
      name: the collection's own id, prefix of the ids of its documents.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, max_line_bytes), 1):
            try:
                if line is None:
                    raise ValueError(f"too large: over the limit max_file_bytes={max_line_bytes}")
                if line.strip():
                    yield _parse(line.strip(), name)
            except Exception as error:
                yield DocumentError(f"{path}:{number}", reason_of(error))


def _lines(file: IO[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """Line by line, None for those that are too long."""
    while line := file.readline(max_bytes + 1):
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(max_bytes)
        yield None


def _parse(line: bytes, name: str) -> CollectionLine:
    value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    if not isinstance(value, Mapping):
        raise ValueError(f"wanted an object with _id and text, got {type(value).__name__}")
    own_id = _text(value.get("_id", value.get("id")), "_id")
    title, text = _text(value.get("title") or "", "title"), _text(value.get("text"), "text").strip("\n").rstrip()
    if not own_id or not text.strip():
        raise ValueError(f"wanted {'_id' if not own_id else 'text'}, got nothing")
    if len(name) + len(own_id) > _LONGEST_ID:
        raise ValueError(f"_id: wanted at most {max(0, _LONGEST_ID - len(name))} characters, got {len(own_id)}")
    title = " ".join(title.split()) or own_id
    document = LoadedDocument(title, text, metadata=plain_metadata(value.get("metadata")))
    return CollectionLine(f"{name}/{own_id}", hashlib.sha256(line).hexdigest(), document)


def _text(value: Any, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name == "_id":
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name}: wanted text, got {type(value).__name__}")
    return cleaned(value)
