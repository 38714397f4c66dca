"""How many of some arrays are in memory at once."""

from __future__ import annotations

import weakref

import numpy as np


class Held:
    """Counts arrays that it was shown and that somebody still holds.

    Attributes:
      most: of them at once, the newest among them.
    """

    def __init__(self) -> None:
        self.most = 0
        self._arrays: list[weakref.ref[np.ndarray]] = []

    def show(self, array: np.ndarray) -> np.ndarray:
        self._arrays = [one for one in self._arrays if one() is not None] + [weakref.ref(array)]
        self.most = max(self.most, len(self._arrays))
        return array
