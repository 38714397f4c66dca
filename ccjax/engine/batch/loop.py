"""The thread that runs all requests of an engine: carries out what `ccjax.policy.scheduling` decides, step by step. Knows no
HTTP and no text."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ccjax.engine.batch.decode import DecodeBatch
from ccjax.engine.batch.pack import JobFailedError, Pack, Piece
from ccjax.engine.batch.serving import Serving
from ccjax.engine.cached_prefill import CachedPrefill
from ccjax.engine.pool import DevicePool
from ccjax.engine.prefill import Prefiller
from ccjax.engine.rates import Rates
from ccjax.engine.reads import LoadFailedError
from ccjax.engine.sampling import draw
from ccjax.engine.variants import VariantIndex
from ccjax.policy.scheduling import Costs, LineFullError, NeverFitsError, Scheduler, SchedulerSettings, Work
from store.errors import TierFullError
from store.tiered import TieredStore
from store.usage import DEVICE

logger = logging.getLogger(__name__)

_UNMEASURED_S_PER_TOKEN = 1e-3
_LOOK_S = 0.002
"""How often a wait for a load looks up."""


class CancelledError(Exception):
    """The request was cancelled before its answer was complete."""


class BatchLoop:
    """Runs requests until `close`. `submit` and `paused` may be called from any thread.

    Between two steps of the loop `paused` lets one other thread use the engine: no prefill is under way then, answers
    may be.
    """

    def __init__(
        self,
        model: Prefiller,
        prefill: CachedPrefill,
        variants: VariantIndex,
        store: TieredStore,
        pool: DevicePool,
        rates: Rates,
        settings: SchedulerSettings,
        *,
        decode_implementation: str | None = None,
    ) -> None:
        self._model = model
        self._prefill = prefill
        self._variants = variants
        self._store = store
        self._pool = pool
        self._rates = rates
        self._decoder = DecodeBatch(model, pool, implementation=decode_implementation)
        self._scheduler = Scheduler(settings)
        self._servings: dict[str, Serving] = {}
        self._pack: Pack | None = None
        self._pieces: dict[str, Piece] = {}
        self._changed = threading.Condition()
        self._new: collections.deque[Serving] = collections.deque()
        self._num_guests = 0
        self._is_paused = False
        self._closed = False
        self._thread: threading.Thread | None = None
