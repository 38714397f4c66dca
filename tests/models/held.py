"""Counts how many arrays are in memory at once."""

from __future__ import annotations

import weakref

import numpy as np


class Held:
    """Counts the registered arrays that are still referenced.

    Attributes:
      most: largest number of them at once, including the newest.
    """

    def __init__(self) -> None:
        self.most = 0
        self._arrays: list[weakref.ref[np.ndarray]] = []

    def show(self, array: np.ndarray) -> np.ndarray:
        self._arrays = [reference for reference in self._arrays if reference() is not None] + [weakref.ref(array)]
        self.most = max(self.most, len(self._arrays))
        return array
