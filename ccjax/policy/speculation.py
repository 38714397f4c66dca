"""Decides when to answer from the preliminary passages of a search (RAGCache alg. 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ccjax.policy._checks import check_count


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationStep:
    """What to do after a stage of the search.

    Attributes:
      give_up: the running answer is from other passages: stop it after its current step.
      begin: start an answer from the current passages.
    """

    give_up: bool
    begin: bool


class Speculation:
    """One request's search, stage by stage.

    An answer is started from what was found, unless `max_pending` prompts or more are waiting or being computed; it is
    abandoned once something else is found, since the final passages decide. Alg. 2 as printed tries each list once; our
    reading: a list that could not start is tried again at the next stage.

    Args:
      max_pending: the paper's `max_prefill_bs`: the number of prompts that the device computes together efficiently; 0
        never starts before the search is complete.
    """

    def __init__(self, max_pending: int) -> None:
        check_count("max_pending", max_pending, least=0)
        self._max_pending = max_pending
        self._begun: tuple[str, ...] | None = None

    def next_step(self, found: Sequence[str], *, is_final: bool, num_pending: int) -> SpeculationStep:
        """Processes a stage that found these passages, best first, while this many other prompts are pending. The
        returned step must be carried out; after the final stage an answer from `found` exists or is started."""
        passages = tuple(found)
        if passages == self._begun:
            return SpeculationStep(give_up=False, begin=False)
        give_up = self._begun is not None
        begin = is_final or (bool(passages) and num_pending < self._max_pending)
        self._begun = passages if begin else None
        return SpeculationStep(give_up, begin)

    def refused(self) -> None:
        """Reports that an answer could not be started."""
        self._begun = None
