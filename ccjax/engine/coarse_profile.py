"""Measures T(cached, new) coarsely in idle time, for an eviction policy that depends on it (RAGCache sec. 5.1)."""

from __future__ import annotations

import logging
import random

from ccjax.cache.costs import MeasuredCosts
from ccjax.config import EngineConfig
from ccjax.engine.background import BackgroundPrefills
from ccjax.loading.prefill_profile import KeptProfile
from ccjax.policy.eviction import make_policy
from ccjax.policy.prefill_cost import coarse_grid
from ccjax.prompts import Prompt, chunk_id
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.types import Chunk, Segment

logger = logging.getLogger(__name__)

_LONGEST, _STEP, _RUNS = 1024, 4, 3
"""The longest prompt, and how much shorter each of the two others is; runs of each, of which the fastest counts."""


class CoarseProfile:
    """Profiles one engine, unless its policy needs no profile or one was given or kept. For one thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        costs: MeasuredCosts,
        kept: KeptProfile,
        background: BackgroundPrefills,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._costs = costs
        self._kept = kept
        self._background = background
        self._vocab_size = vocab_size
        longest = min(_LONGEST, max_model_len - 1)
        lengths = [longest // _STEP**2, longest // _STEP, longest]
        self._left: list[int] = []
        if make_policy(config.eviction_policy).needs_profile and config.stores_chunks and lengths[0] > 1:
            self._left = lengths * _RUNS
        self._fastest_s: dict[int, float] = {}

    def measure_one(self, is_cancelled: IsCancelled | None) -> bool:
        """Runs one full prefill of random tokens, which is not stored; the last one sets `costs.grid` and keeps it.
        Returns False if nothing is left to measure, it failed, or `is_cancelled` returned True."""
        if self._costs.grid is not None or not self._left:
            return False
        length = self._left[-1]
        tokens = tuple(random.Random(len(self._left)).choices(range(self._vocab_size), k=length))
        prompt = Prompt((Segment("question", Chunk(chunk_id(tokens), tokens)),), max_new_tokens=1)
        try:
            response = self._background.run(prompt, "off", is_cancelled=is_cancelled)
        except PrefillCancelledError:
            return False
        except Exception:
            self._left = []  # else each idle time would try again, and get to nothing else
            logger.exception("eviction: T(cached, new) cannot be measured")
            return False
        self._left.pop()
        seconds = response.reuse.prefill_s
        self._fastest_s[length] = min(seconds, self._fastest_s.get(length, seconds))
        if not self._left:
            self._costs.grid = coarse_grid(sorted(self._fastest_s.items()))
            self._kept.write(self._costs.grid)
            logger.info("eviction: T(cached, new) was measured in idle time")
        return True
