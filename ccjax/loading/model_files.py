"""JSON files with measurements of a model, stored in its directory or at a given path."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ccjax.errors import ConfigError

logger = logging.getLogger(__name__)
Content = TypeVar("Content")


def read_model_file(path: Path, argument: str, program: str, parse: Callable[[Any], Content]) -> Content:
    """The JSON in a file, converted by `parse`.

    Raises:
      ConfigError: it cannot be read, or `parse` raised ValueError; the message names `argument`.
    """
    try:
        return parse(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{argument}: wanted a file that {program} wrote, got {path}: {error}") from error


def write_model_file(path: Path, value: Any) -> None:
    """Writes JSON atomically: on failure an existing file stays unchanged."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def model_file(
    argument: str,
    program: str,
    parse: Callable[[Any], Content],
    why_not: Callable[[Content], str | None],
    *,
    beside: Path | None,
    named: str | None,
) -> Content | None:
    """The content of the file `named`, or else of `beside`; None if `beside` does not exist, or does not apply, which
    is logged.

    Args:
      why_not: returns why a content does not apply, or None.

    Raises:
      ConfigError: the file `named` does not exist or does not apply, or a file is damaged.
    """
    path = beside if named is None else Path(named)
    if path is None or (named is None and not path.exists()):
        return None
    found = read_model_file(path, argument, program, parse)
    reason = why_not(found)
    if reason is None:
        return found
    if named is not None:
        raise ConfigError(f"{argument}: wanted one of this model here, got {path}, which {reason}")
    logger.warning("%s %s: it is not used", path, reason)
    return None
