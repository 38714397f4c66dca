"""When to answer from passages that a search has found so far (RAGCache alg. 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ccjax.policy._checks import check_count


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationStep:
    """What to do after a stage of the search.

    Attributes:
      give_up: the answer that was begun is from other passages: it ends after its current step.
      begin: an answer from the passages at hand is to begin.
    """

    give_up: bool
    begin: bool


class Speculation:
    """One request's search, stage by stage.

    An answer is begun from what was found, unless `max_pending` prompts or more are waiting or being computed; once
    something else is found it is given up, for the passages that are found last decide. Alg. 2 as printed tries each
    list once; reading: one that found no room tries again at the next stage, as nothing speaks against it then.

    Args:
      max_pending: the paper's `max_prefill_bs`: as many prompts as the device computes together to advantage; 0 never
        begins before the search is through.
    """

    def __init__(self, max_pending: int) -> None:
        check_count("max_pending", max_pending, least=0)
        self._max_pending = max_pending
        self._begun: tuple[str, ...] | None = None

    def next_step(self, found: Sequence[str], *, is_final: bool, num_pending: int) -> SpeculationStep:
        """After a stage that knows these passages, best first, while so many other prompts are pending. What it says
        has to be done; after the final stage an answer from `found` is there or begins."""
        passages = tuple(found)
        if passages == self._begun:
            return SpeculationStep(give_up=False, begin=False)
        give_up = self._begun is not None
        begin = is_final or (bool(passages) and num_pending < self._max_pending)
        self._begun = passages if begin else None
        return SpeculationStep(give_up, begin)

    def refused(self) -> None:
        """What should have begun did not: there was no place for it."""
        self._begun = None
