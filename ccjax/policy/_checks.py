"""Argument checks of the policy modules, with one clear ValueError each."""

from __future__ import annotations

import math
from collections.abc import Iterable


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Raises ValueError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: wanted an integer of at least {least}, got {value!r}")


def check_ratio(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a number in [0, 1]."""
    if type(value) is float and 0.0 <= value <= 1.0:  # the usual case, frequent in planning
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: wanted a number in [0, 1], got {value!r}")


def check_mass(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a finite number of at least 0."""
    if type(value) is float and 0.0 <= value < math.inf:  # the usual case, frequent in planning
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name}: wanted a finite number of at least 0, got {value!r}")


def check_masses(name: str, values: Iterable[float]) -> None:
    """Raises ValueError unless every value is a finite number of at least 0; the message names the first bad index."""
    for index, value in enumerate(values):
        if type(value) is not float or not 0.0 <= value < math.inf:
            check_mass(f"{name}[{index}]", value)
