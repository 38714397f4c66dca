"""Type of a fuzzing target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class FuzzTarget:
    """A parser under test.

    Attributes:
      run: called with any bytes; every exception except `allowed` is a finding.
      allowed: exceptions that the parser promises for invalid input.
      seeds: valid inputs to begin from.
      imports: modules that it imports when it runs, for the fuzzer to instrument.
    """

    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    imports: tuple[str, ...] = ()
