"""Replaces approximate variants by exact ones in idle time."""

from __future__ import annotations

import dataclasses
import logging

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.exclusive import Exclusive
from ccjax.cache.planned_prefill import Prefilled
from ccjax.engine.background import BackgroundPrefills
from ccjax.policy.variants import choose_repair
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.types import VariantId, VariantMeta

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class MaintenanceCounts:
    """Counts since the engine started.

    Attributes:
      repaired: approximate variants, and lossy copies that preceded them, that were replaced by exact ones.
      repair_failed: approximate variants that could not be computed again; they remain.
      prepared: passages of requests that were prepared.
      adopted, vanished: variants that other processes added to, or removed from, the same store.
    """

    repaired: int = 0
    repair_failed: int = 0
    prepared: int = 0
    adopted: int = 0
    vanished: int = 0


class Maintenance:
    """Repairs the variants of one engine; for one thread at a time.

    Attributes:
      counts: replaced by a new object at each change.
    """

    def __init__(
        self,
        chunks: ChunkCache,
        background: BackgroundPrefills,
        exclusive: Exclusive,
        *,
        max_model_len: int,
    ) -> None:
        self.counts = MaintenanceCounts()
        self._capture = chunks.capture
        self._background = background
        self._exclusive = exclusive
        self._variants = chunks.variants
        self._max_model_len = max_model_len
        self._given_up: set[VariantId] = set()

    def repair_one(self, is_cancelled: IsCancelled | None) -> bool:
        """Computes the most useful approximate variant again behind its own prefix and replaces it by the exact one.

        Approximate variants of chunks in that prefix are replaced, too. A variant whose repair fails is not tried
        again. Returns False if there was nothing to do, the engine is in use, or `is_cancelled` returned True.
        """
        with self._exclusive(wait=False) as is_ours:
            meta = self._choose(is_cancelled) if is_ours else None
            if meta is None:
                return False
            if self._variants.drop_if_replaced(meta):
                self.count(repaired=1)
                return True
        try:
            repaired = self._compute(meta, is_cancelled)
        except PrefillCancelledError:
            return False
        except Exception:
            logger.exception("variant %s: could not be computed anew, it stays approximate", meta.variant_id)
            self._given_up.add(meta.variant_id)
            self.count(repair_failed=1)
        else:
            self.count(repaired=repaired)
        return True

    def _choose(self, is_cancelled: IsCancelled | None) -> VariantMeta | None:
        approximate = self._variants.approximate(is_cancelled)
        self._given_up.intersection_update(meta.variant_id for meta in approximate)
        candidates = (meta for meta in approximate if meta.variant_id not in self._given_up and self._fits(meta))
        return choose_repair(candidates, self._variants.tokens.known())

    def _fits(self, meta: VariantMeta) -> bool:
        """True if the prompt with its one-token question is within `max_model_len`; an engine with a larger limit may
        have stored the variant."""
        prefix = self._variants.tokens.num_tokens(meta.prefix_ids)
        return prefix + meta.num_tokens + 1 <= self._max_model_len

    def _compute(self, meta: VariantMeta, is_cancelled: IsCancelled | None) -> int:
        """Computes a variant's chunk behind its prefix; returns how many approximate variants were replaced."""
        repaired = 0

        def keep(prefilled: Prefilled) -> None:
            nonlocal repaired
            repaired = self._capture.replace_approximate(prefilled)

        with self._exclusive():
            prompt = self._variants.prompt_of(meta)  # fails if the chunk was erased meanwhile
        self._background.run(prompt, "exact", keep, is_cancelled=is_cancelled)
        return repaired

    def count(self, **more: int) -> None:
        """Adds to `counts`."""
        grown = {name: getattr(self.counts, name) + number for name, number in more.items()}
        self.counts = dataclasses.replace(self.counts, **grown)
