"""Logging of a process: text lines, or JSON objects for log collectors."""

from __future__ import annotations

import logging
from typing import Literal

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Sends the logs of this process to stderr; call it once.

    Args:
      level: of Python's logging, such as "INFO".
      log_format: "json" gives one object per line: `timestamp` (UTC), `level`, `logger`, `message`, `exc_info` if there
        is one, and any extra fields of the record.
    """
    handler = logging.StreamHandler()
    if log_format == "json":
        from pythonjsonlogger.json import JsonFormatter

        names = {"levelname": "level", "name": "logger"}
        handler.setFormatter(
            JsonFormatter("{levelname}{name}{message}", style="{", rename_fields=names, timestamp=True)
        )
    else:
        handler.setFormatter(logging.Formatter(_TEXT))
    # Replaces what imports have set up already: Orbax logs on import, and absl then configures the root logger.
    logging.basicConfig(level=level, handlers=[handler], force=True)
