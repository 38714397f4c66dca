"""Orders of a shared index, sealed with the keys of a store."""

from __future__ import annotations

import logging

from ccjax.store.index.api import Order, OrderBoard
from ccjax.store.signing import SealError
from ccjax.store.spec import StoreIdentity

_log = logging.getLogger(__name__)

_MOST_FORGED = 64
"""Most orders without a valid seal that one call removes."""


class SealedOrders:
    """Wraps an `OrderBoard` for an identity with keys. Orders without a seal by one of them are removed, not carried
    out.

    Attributes:
      num_forged: number of such orders found so far.
    """

    def __init__(self, board: OrderBoard, identity: StoreIdentity) -> None:
        self._board = board
        self._identity = identity
        self.num_forged = 0

    def place(self, key: str, value: bytes, seconds: float) -> bool:
        return self._board.place(key, self._identity.seal("order", key, value), seconds)

    def take(self, seconds: float) -> Order | None:
        for _ in range(_MOST_FORGED):
            order = self._board.take(seconds)
            if order is None:
                return None
            try:
                return Order(order.key, self._identity.unseal("order", order.key, order.value), order.attempt)
            except SealError as error:
                _log.warning("store: %s; the order is ignored", error)
                self.num_forged += 1
                self._board.finish(order.key)
        return None

    def finish(self, key: str) -> None:
        self._board.finish(key)

    def __len__(self) -> int:
        return len(self._board)
