"""Values of command-line options that are more than a number or a text."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def num_bytes(text: str) -> int:
    """The number in "2GiB", "500MB" or "1073741824"; the type of arguments that are sizes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"wanted a size such as 2GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def int_or_none(text: str) -> int | None:
    """The number, or None for "none"."""
    if text == "none":
        return None
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"wanted a number or none, got {text!r}")
    return int(text)


def layer_list(text: str) -> tuple[int, ...]:
    """The numbers in "0,1"."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"wanted layers such as 0,1, got {text!r}")
    return tuple(map(int, text.split(",")))


def replica_range(text: str) -> tuple[int, int]:
    """The bounds in "2:6"; "2" for both."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"wanted a number such as 2, or bounds such as 2:6, got {text!r}")
    least, _, most = text.partition(":")
    if int(most or least) < int(least):
        raise argparse.ArgumentTypeError(f"wanted LEAST:MOST with LEAST not above MOST, got {text!r}")
    return int(least), int(most or least)


def cluster_address(text: str) -> str:
    """HOST:PORT as it is."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"wanted HOST:PORT, got {text!r}")
    return text


AUTO = "auto"


def coordinator(text: str) -> str:
    """HOST:PORT or "auto"."""
    return text if text == AUTO else cluster_address(text)


def resource_list(text: str) -> dict[str, float]:
    """The numbers in "GPU=1,fast=0.5"."""
    if not re.fullmatch(r"\w+=\d+(\.\d+)?(,\w+=\d+(\.\d+)?)*", text):
        raise argparse.ArgumentTypeError(f"wanted resources such as GPU=1, got {text!r}")
    return {name: float(number) for name, number in (part.split("=") for part in text.split(","))}


def count(text: str) -> int:
    """A number of at least 0."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"wanted a number of at least 0, got {text!r}")
    return int(text)


def positive_int(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer above 0, got {text!r}")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"wanted 0 (any free port) to 65535, got {text!r}")
    return int(text)


def check_writable(name: str, path: Path | None) -> None:
    """Nothing, unless a file could not be written there: then a long run would end without it.

    Raises:
      ValueError: names the option.
    """
    if path is not None and not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise ValueError(f"--{name}: wanted a file in a directory that can be written to, got {path}")
