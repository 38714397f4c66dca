"""How a process logs: lines for people, or JSON objects for whatever collects them."""

from __future__ import annotations

import logging
from typing import Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Sends what this process logs to stderr, once per process.

    Args:
      level: of Python's logging, such as "INFO".
      log_format: "json" gives one object a line: `timestamp` (UTC), `level`, `logger`, `message`, `exc_info` where
        there is one, and whatever else the record was given.
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
    # In place of what some import has set up already: Orbax logs as it is imported, and absl takes the root for that.
    logging.basicConfig(level=level, handlers=[handler], force=True)
