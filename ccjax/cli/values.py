"""Parsers of command-line options that are not settings, and sizes as text."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path


def size_text(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def positive_int(text: str) -> int:
    """Parses a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer above 0, got {text!r}")
    return int(text)


def check_installed(extra: str, *packages: str) -> None:
    """Checks that optional packages are there, before a long run ends without them.

    Raises:
      ImportError: says how to install the first that is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ImportError(f"wanted the package {name}, which is not installed: pip install 'ccjax[{extra}]'")


def check_writable(name: str, path: str | Path | None) -> None:
    """Checks that a file can be written there; otherwise a long run would end without it.

    Raises:
      ValueError: names the option.
    """
    folder = None if path is None else Path(path).absolute().parent
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"--{name}: wanted a file in a directory that can be written to, got {path}")
