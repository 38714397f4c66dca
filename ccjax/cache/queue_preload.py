"""Reads the KV of queued requests while another request runs (CacheCraft sec. 3.5).

A preload holds what it read, pinned in its tier, until it is closed; a load of the same variants meanwhile shares these
reads (`store.sharing`). Nothing is evicted for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore
from ccjax.types import VariantId

logger = logging.getLogger(__name__)

_LAYERS_AT_ONCE = 2
"""Layers in flight: two keep the link busy, and reads of the running request wait for at most two layers."""

_LOOK_S = 0.005
"""How often a preload checks that its reads are done and the running request has none; only while one is unfinished."""

Wanted = Callable[[], Mapping[VariantId, int]]
"""Returns the variants that a request would load if it ran now, with their bytes."""


class Preload:
    """One request's preload; `close` it once the request has started its own load or was dropped."""

    def __init__(self, owner: Preloader, wanted: Wanted) -> None:
        self._owner = owner
        self._wanted = wanted
        self._ticket: LoadTicket | None = None
        self._num_bytes: dict[VariantId, int] = {}
        self._next_layer = 0

    def close(self) -> None:
        """Stops reading, unpins, and releases what no running request has taken over. Idempotent."""
        self._owner._close(self)


class Preloader:
    """Executes preloads in order, on its own thread, which exists while any are open. Thread-safe."""

    def __init__(self, store: TieredStore, *, budget_bytes: int, must_wait: Callable[[], bool]) -> None:
        """
        Args:
          budget_bytes: KV that all open preloads may hold together; a variant beyond it is left on disk. 0 = none.
          must_wait: True while a running request has reads in flight; those go first.
        """
        self._store = store
        self._budget_bytes = budget_bytes
        self._must_wait = must_wait
        self._num_layers = store.kv_spec.num_layers
        self._changed = threading.Condition()
        self._open: list[Preload] = []
        self._thread: threading.Thread | None = None
        self._closed = budget_bytes == 0

    @property
    def held_bytes(self) -> int:
        """KV bytes that the open preloads hold or are about to read."""
        with self._changed:
            return sum(self._held().values())

    def add(self, wanted: Wanted) -> Preload:
        """Adds a preload of what `wanted` returns; the preloader's thread calls it once, soon."""
        preload = Preload(self, wanted)
        with self._changed:
            if not self._closed:
                self._open.append(preload)
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="ccjax-preload", daemon=True)
                    self._thread.start()
        return preload

    def close(self) -> None:
        """Closes all preloads and ends the thread; later preloads read nothing."""
        with self._changed:
            self._closed = True
            thread = self._thread
        for preload in tuple(self._open):
            self._close(preload)
        if thread is not None:
            thread.join()

    def _close(self, preload: Preload) -> None:
        with self._changed:
            if preload not in self._open:
                return
            self._open.remove(preload)
            ticket, preload._ticket = preload._ticket, None
            self._changed.notify_all()
        if ticket is not None:
            self._store.complete_load(ticket, ok=False)

    def _held(self) -> dict[VariantId, int]:
        return {key: size for preload in self._open for key, size in preload._num_bytes.items()}

    # -- the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (preload := self._next_to_prepare()) is not None:
            try:
                self._prepare(preload, preload._wanted())
            except Exception:  # cannot be planned, or no memory: the request reports it when it runs
                logger.debug("nothing is read ahead for a request", exc_info=True)
                with self._changed:
                    preload._num_bytes, preload._next_layer = {}, self._num_layers

    def _next_to_prepare(self) -> Preload | None:
        """Starts reads in queue order until a preload needs preparing; None once no preload is open."""
        with self._changed:
            while self._open:
                unfinished = [preload for preload in self._open if preload._next_layer < self._num_layers]
                new = next((preload for preload in unfinished if preload._ticket is None), None)
                if new is not None:
                    return new  # at once: so what it shares with earlier preloads stays pinned when those are closed
                if not unfinished:
                    self._changed.wait()
                    continue
                preload = unfinished[0]
                assert preload._ticket is not None
                if self._must_wait() or not _has_room(preload):
                    self._changed.wait(_LOOK_S)
                else:
                    for variant_id in preload._num_bytes:
                        preload._ticket.prefetch(variant_id, preload._next_layer, preload._next_layer + 1)
                    preload._next_layer += 1
            self._thread = None
            return None

    def _prepare(self, preload: Preload, wanted: Mapping[VariantId, int]) -> None:
        """Pins what is on disk and fits into the budget."""
        with self._changed:
            held = self._held()
            left_bytes = self._budget_bytes - sum(held.values())
            for variant_id, num_bytes in wanted.items():
                cost = 0 if variant_id in held else num_bytes
                if preload in self._open and cost <= left_bytes and self._store.unread_bytes(variant_id):
                    preload._num_bytes[variant_id] = num_bytes
                    left_bytes -= cost
            ticket = self._store.prepare_load(preload._num_bytes, counted=False)
            for variant_id in ticket.missing:
                del preload._num_bytes[VariantId(variant_id)]
            if preload._num_bytes:
                preload._ticket = ticket
            else:  # also if it was closed meanwhile
                preload._next_layer = self._num_layers
                self._store.complete_load(ticket, ok=False)


def _has_room(preload: Preload) -> bool:
    """True while fewer than `_LAYERS_AT_ONCE` layers are in flight."""
    last = preload._next_layer - _LAYERS_AT_ONCE + 1
    assert preload._ticket is not None
    return last <= 0 or all(preload._ticket.ready(key, 0, last) for key in preload._num_bytes)
