"""The right to use what otherwise only the batch loop's thread uses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Exclusive(Protocol):
    """`with exclusive():` no prefill is under way and no other thread is inside; answers may be decoding.

    With `wait=False` the value is False, and nothing may be used, where a request or another thread would have to be
    waited for. RuntimeError: the engine is closed.
    """

    def __call__(self, *, wait: bool = True) -> AbstractContextManager[bool]: ...
