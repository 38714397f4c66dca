"""Types of settings that are more than a number, a text or a choice. A command line or a file gives all of them as
text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from ccjax.config.base import Described

Value = TypeVar("Value")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def num_bytes(text: str) -> int:
    """Parses "2GiB", "500MB" or "1073741824".

    Raises:
      ValueError: says which values are accepted.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("wanted a size such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def _different_layers(value: tuple[int, ...]) -> tuple[int, ...]:
    if not value or min(value) < 0 or len({*value}) < len(value):
        raise ValueError("wanted one or more different layers from 0")
    return value


def _of_text(read: Callable[[str], Value]) -> BeforeValidator:
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _names(value: Any) -> Any:
    """Parses "a,b", or several such texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return value
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


NumBytes = Annotated[int, _of_text(num_bytes), Described(metavar="SIZE")]
Layers = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    AfterValidator(_different_layers),
    Described("one or more different layers from 0"),
]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), Described("names", "NAME")]
FilePath = Annotated[str, BeforeValidator(_path), Described("a path", "FILE")]
FolderPath = Annotated[str, BeforeValidator(_path), Described("a path", "DIR")]
Share = Annotated[float, Field(ge=0, le=1), Described(metavar="SHARE")]
Seconds = Annotated[float, Field(gt=0), Described("a positive number of seconds", "S")]


def or_none(value: Any) -> Any:
    """None for the text "none"."""
    return None if value == "none" else value


OrNone = BeforeValidator(or_none)
"""Metadata of an optional field, whose None is "none" on the command line."""
