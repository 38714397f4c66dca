"""Exclusive access to the state that belongs to the batch loop's thread."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Exclusive(Protocol):
    """`with exclusive():` no prefill runs and no other thread is inside; sequences may be decoding.

    With `wait=False` the context's value is False, and the state must not be used, if a request or another thread has
    access. Raises RuntimeError if the engine is closed.
    """

    def __call__(self, *, wait: bool = True) -> AbstractContextManager[bool]: ...
