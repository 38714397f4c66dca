"""Prefills that engines on one store order from each other for waiting requests: `Engine.orders`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.warming.order import PrefillOrder, order_for
from ccjax.cache.warming.passages import PassageWarmer
from ccjax.cache.warming.shared import SharedVariant, SharedWarming
from ccjax.config.engine import CacheSettings
from ccjax.engine.batch.loop import BatchLoop
from ccjax.errors import ConfigError, ReadOnlyError
from ccjax.runner.cancellation import IsCancelled
from ccjax.store.index.api import OrderBoard

logger = logging.getLogger(__name__)

ORDER_S = 60.0
"""Lifetime of an order that no process takes."""

_TAKE_S = 30.0
"""Time after which the process that took an order is presumed dead, and another may take the order."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrderCounts:
    """Counts of orders since the engine started.

    Attributes:
      placed: orders placed by this engine for waiting requests.
      taken, failed: orders of any engine taken by this one; those of them that failed.
      computed_tokens: tokens that ran through the model for the taken orders.
    """

    placed: int = 0
    taken: int = 0
    failed: int = 0
    computed_tokens: int = 0


class PrefillOrders:
    """Places orders for the waiting requests of one engine and carries out orders of any engine. One thread at a time
    may call `place`, and one `compute`.

    Attributes:
      counts: replaced by a new object at each change.
    """

    def __init__(
        self,
        config: CacheSettings,
        chunks: ChunkCache,
        warmer: PassageWarmer,
        loop: BatchLoop,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.counts = OrderCounts()
        self._config = config
        self._rates = chunks.rates
        self._store = chunks.store
        self._variants = chunks.variants
        self._planner = chunks.planner
        self._warmer = warmer
        self._loop = loop
        self._exclusive = loop.exclusive
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._looked_at: frozenset[str] = frozenset()

    def place(self) -> int:
        """Orders what requests that have been queued for `order_after_s` will have to compute; returns how many orders
        are new. Each request is considered once. Call it periodically, from any thread except the batch loop's."""
        orders, after_s = self._orders, self._config.order_after_s
        if orders is None or after_s is None:
            return 0
        now_s, num_placed = time.perf_counter(), 0
        late = [sequence for sequence in self._loop.waiting() if now_s - sequence.group.arrived_s >= after_s]
        new = [sequence for sequence in late if sequence.sequence_id not in self._looked_at]
        self._looked_at = frozenset(sequence.sequence_id for sequence in late)
        for sequence in sorted(new, key=lambda sequence: sequence.group.arrived_s):
            try:
                prefill = sequence.prefill
                needed = order_for(self._planner, self._variants, prefill.prompt, prefill.contract)
                if needed is not None:
                    num_placed += orders.place(needed.key, needed.encode(), ORDER_S)
            except OSError as error:
                logger.debug("nothing is ordered: %s", error)
                break
            except Exception:
                logger.exception("what a waiting request needs could not be ordered; it computes that itself")
        self._count(placed=num_placed)
        return num_placed

    def compute(self, *, is_cancelled: IsCancelled | None = None) -> tuple[SharedVariant, ...] | None:
        """Takes the oldest order of any process on the store and computes the variants that are still missing and not
        being computed by another process. What was computed is on disk afterwards.

        Returns:
          The result for each passage; None if there was no order.

        Raises:
          ConfigError: the engine has no `store_index`.
          ReadOnlyError: it is `read_only`.
          OSError: the index does not answer.
        """
        orders = self._orders
        if self._config.read_only:
            raise ReadOnlyError("read_only", "wanted an engine that stores chunks, this one has read_only=True")
        if orders is None:
            raise ConfigError("store_index: wanted an engine that has one")
        order = orders.take(_TAKE_S)
        if order is None:
            return None
        self._count(taken=1)
        try:
            found = PrefillOrder.decode(order.value)
            warming = found.warming(max_model_len=self._max_model_len, vocab_size=self._vocab_size)
            shared = SharedWarming(self._warmer, self._variants, self._store, self._rates, warming, self._exclusive)
            results = shared.run(is_cancelled)
        except ValueError as error:  # placed by another version of this program, or by another program
            logger.warning("an order cannot be carried out: %s", error)
            results = (SharedVariant("failed", reason=str(error)),)
        failed = any(result.status == "failed" for result in results)
        self._count(failed=int(failed), computed_tokens=sum(result.computed_tokens for result in results))
        with contextlib.suppress(OSError):  # if so, the order is taken again and found done
            orders.finish(order.key)
        return results

    @property
    def _orders(self) -> OrderBoard | None:
        return None if self._store.change_feed is None else self._store.change_feed.index.orders

    def _count(self, **more: int) -> None:
        grown = {name: getattr(self.counts, name) + number for name, number in more.items()}
        self.counts = dataclasses.replace(self.counts, **grown)
