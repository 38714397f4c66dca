"""How long a prefill has waited for stored KV, variant by variant, and when it has waited enough."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ccjax.policy.loading import longest_load_wait_s
from ccjax.types import VariantId


class LoadFailedError(Exception):
    """Planned variants could not be read, or not in time; the prompt must be planned anew without them.

    `causes`: a StoreError or TimeoutError for each of them.
    """

    def __init__(self, causes: Mapping[VariantId, Exception]) -> None:
        super().__init__("; ".join(f"variant {variant_id}: {cause}" for variant_id, cause in causes.items()))
        self.causes = dict(causes)


class Patience:
    """No variant is waited for longer than computing would take, in sum over all layers and attempts.

    Variants that are late together load side by side, and to compute them all takes the sum of their times: so each is
    charged its part of the wait by its tokens, and one that waited with others may wait longer than alone.

    Attributes:
      spent_s: seconds waited for reads so far.
    """

    def __init__(self, seconds_per_token: float | None) -> None:
        """
        Args:
          seconds_per_token: what computing a token would take; None while unknown.
        """
        self.spent_s = 0.0
        self._seconds_per_token = seconds_per_token
        self._num_tokens: dict[VariantId, int] = {}
        self._waited_s: dict[VariantId, float] = {}
        self._charged_s: dict[VariantId, float] = {}

    def expect(self, num_tokens: Mapping[VariantId, int]) -> None:
        """Adds variants, with their tokens, that may be waited for; one that is known keeps what was waited."""
        for variant_id, count in num_tokens.items():
            self._num_tokens[variant_id] = count
            self._waited_s.setdefault(variant_id, 0.0)
            self._charged_s.setdefault(variant_id, 0.0)

    def spend(self, late: Collection[VariantId], seconds: float) -> None:
        """Counts a wait of `seconds` for `late`."""
        self.spent_s += seconds if late else 0.0
        together = sum(self._num_tokens[key] for key in late)
        for key in late:
            self._waited_s[key] += seconds
            self._charged_s[key] += seconds * self._num_tokens[key] / together

    def check(self, late: Collection[VariantId]) -> None:
        """Nothing, while every one of `late` may be waited for.

        Raises:
          LoadFailedError: some may not; it names all of those.
        """
        causes: dict[VariantId, Exception] = {}
        for key in late:
            longest_s = self._longest_s(key)
            if self._waited_s[key] >= longest_s:
                causes[key] = TimeoutError(f"not there within {longest_s:.2f} s")
        if causes:
            raise LoadFailedError(causes)

    def _longest_s(self, variant_id: VariantId) -> float:
        alone = self._num_tokens[variant_id]
        charged_s = self._charged_s[variant_id]
        together = alone * self._waited_s[variant_id] / charged_s if charged_s else alone  # on average over the wait
        return longest_load_wait_s(max(alone, round(together)), self._seconds_per_token)
