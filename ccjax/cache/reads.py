"""How long a prefill has waited for the stored KV of each variant, and when it stops waiting."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ccjax.policy.loading import longest_load_wait_s
from ccjax.types import VariantId


class LoadFailedError(Exception):
    """Planned variants could not be read, or not in time; the prompt must be planned again without them.

    `causes`: a StoreError or TimeoutError per variant.
    """

    def __init__(self, causes: Mapping[VariantId, Exception]) -> None:
        super().__init__("; ".join(f"variant {variant_id}: {cause}" for variant_id, cause in causes.items()))
        self.causes = dict(causes)


class WaitLimit:
    """Limits the wait for each variant to the time that computing it would take, over all layers and attempts.

    Variants that are late together load in parallel, while computing them would take the sum of their times: so each is
    charged a share of the wait in proportion to its tokens, and a variant may wait longer with others than alone.
    """

    def __init__(self, seconds_per_token: float | None) -> None:
        """
        Args:
          seconds_per_token: time to compute a token; None while unknown.
        """
        self._seconds_per_token = seconds_per_token
        self._num_tokens: dict[VariantId, int] = {}
        self._waited_s: dict[VariantId, float] = {}
        self._charged_s: dict[VariantId, float] = {}

    def expect(self, num_tokens: Mapping[VariantId, int]) -> None:
        """Adds variants to wait for, with their numbers of tokens; a known variant keeps its waiting time so far."""
        for variant_id, count in num_tokens.items():
            self._num_tokens[variant_id] = count
            self._waited_s.setdefault(variant_id, 0.0)
            self._charged_s.setdefault(variant_id, 0.0)

    def spend(self, late: Collection[VariantId], seconds: float) -> None:
        """Counts a wait of `seconds` for `late`."""
        together = sum(self._num_tokens[key] for key in late)
        for key in late:
            self._waited_s[key] += seconds
            self._charged_s[key] += seconds * self._num_tokens[key] / together

    def check(self, late: Collection[VariantId]) -> None:
        """Checks that every variant of `late` may still be waited for.

        Raises:
          LoadFailedError: some have used up their time; it names all of these.
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
