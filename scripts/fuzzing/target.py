"""What a target of fuzzing is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class FuzzTarget:
    """A parser under test.

    Attributes:
      run: called with any bytes; whatever it raises besides `allowed` is a finding.
      allowed: what the parser promises to raise for what it refuses.
      seeds: inputs to begin from, which it takes.
      imports: modules that it imports when it runs, for the fuzzer to see into.
    """

    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    imports: tuple[str, ...] = ()
