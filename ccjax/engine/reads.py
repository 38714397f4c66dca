"""Reads the planned variants of one prefill, none waited for longer than computing its chunk would take.

Knows no plan and no model: what is read comes from the caller, how long to wait from `ccjax.policy.loading`.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Mapping

import numpy as np

from ccjax.engine.prefill import IsCancelled, PrefillCancelledError, PrefillResult
from ccjax.policy.loading import longest_load_wait_s
from ccjax.types import VariantId
from store.errors import ShardNotFoundError, StoreError
from store.tickets import LoadTicket

_POLL_S = 0.05
"""How often a wait looks up to see whether the request is cancelled."""

_NUM_RUNS = 16


class LoadFailedError(Exception):
    """Planned variants could not be read, or not in time; the prompt must be planned anew without them.

    `causes`: a StoreError or TimeoutError for each of them.
    """

    def __init__(self, causes: Mapping[VariantId, Exception]) -> None:
        super().__init__("; ".join(f"variant {variant_id}: {cause}" for variant_id, cause in causes.items()))
        self.causes = dict(causes)


class ComputeRate:
    """How long a computed token takes here: the least seconds per token of the last 16 runs.

    The least, because whatever else there is (padding of a short run, other programs) only adds time.
    """

    def __init__(self) -> None:
        self._recent: collections.deque[float] = collections.deque(maxlen=_NUM_RUNS)

    @property
    def seconds_per_token(self) -> float | None:
        """None until a run was measured."""
        return min(self._recent, default=None)

    def observe(self, result: PrefillResult, num_layers: int, seconds: float, waited_s: float) -> None:
        """Takes in a finished run of `seconds`; one that waited for loads, or may have compiled, says nothing."""
        if not waited_s and not result.has_new_sizes:
            self._recent.append(seconds * num_layers / result.computed_token_layers)


class BoundedReader:
    """A `ReadLayers` over a ticket. Raises LoadFailedError in place of the store's errors and of too long a wait.

    A wait counts for every variant whose layers are not there meanwhile: they load side by side. `waited_s` is the sum.
    """

    def __init__(
        self,
        ticket: LoadTicket,
        num_tokens: Mapping[VariantId, int],
        seconds_per_token: float | None,
        is_cancelled: IsCancelled | None,
    ) -> None:
        """
        Args:
          num_tokens: of every variant of the ticket.
          seconds_per_token: what computing one of them would take; None while unknown.
          is_cancelled: asked while waiting; PrefillCancelledError once it says so.
        """
        self.waited_s = 0.0
        self._ticket = ticket
        self._longest_s = {
            variant_id: longest_load_wait_s(count, seconds_per_token) for variant_id, count in num_tokens.items()
        }
        self._waited_s = dict.fromkeys(num_tokens, 0.0)
        self._is_cancelled = is_cancelled

    def start(self, num_layers: int) -> None:
        """Starts all reads in the background.

        Raises:
          LoadFailedError: no tier has some of the variants any more.
        """
        if self._ticket.missing:
            missing = sorted(self._ticket.missing)
            raise LoadFailedError({VariantId(key): ShardNotFoundError("no tier holds it any more") for key in missing})
        for variant_id in self._ticket.tiers:
            self._ticket.prefetch(variant_id, 0, num_layers)

    def __call__(self, variant_id: VariantId, first: int, last: int) -> np.ndarray:
        """KV [last - first, 2, T, K, H] of layers [first, last)."""
        try:
            while not self._ticket.ready(variant_id, first, last):
                self._wait(variant_id, first, last)
            return self._ticket.read_layers(variant_id, first, last)
        except StoreError as error:
            raise LoadFailedError({variant_id: error}) from error

    def _wait(self, variant_id: VariantId, first: int, last: int) -> None:
        """Waits a moment for layers that are under way."""
        late = [key for key in self._longest_s if not self._ticket.ready(key, first, last)]
        left_s = self._longest_s[variant_id] - self._waited_s[variant_id]
        started = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            self._ticket.read_layers(variant_id, first, last, timeout_s=max(0.0, min(left_s, _POLL_S)))
        waited_s = time.perf_counter() - started
        self.waited_s += waited_s
        for key in late:
            self._waited_s[key] += waited_s
        if self._is_cancelled is not None and self._is_cancelled():
            raise PrefillCancelledError
        overdue = [
            key
            for key in late
            if self._waited_s[key] >= self._longest_s[key] and not self._ticket.ready(key, first, last)
        ]
        if variant_id in overdue:
            raise LoadFailedError(
                {key: TimeoutError(f"not there within {self._longest_s[key]:.2f} s") for key in overdue}
            )
