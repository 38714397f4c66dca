"""Checks in idle time whether answers over reused KV equal those of a full prefill."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading

import numpy as np

from ccjax.engine.background import BackgroundPrefills
from ccjax.engine.batch.group import Emit
from ccjax.engine.divergence import kl_divergence
from ccjax.policy.shadow import ShareControl
from ccjax.prompts import Prompt
from ccjax.requests import Delta, Response, SamplingParams
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError

MOST_WAITING = 32
"""Most answers that wait for their check; each holds a row of logits. Beyond that the oldest is dropped unchecked."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Results since the engine started.

    Attributes:
      checks: answers checked.
      greedy: those of them that were sampled greedily.
      same: greedy answers equal to full prefill's, token by token; this is known of greedy answers only.
      tokens, agreed_tokens: tokens of greedy answers; those of them that full prefill would also have chosen there.
      first_kl: sum over all checks of KL(full prefill, answer) in nats, of the first token's distribution.
      dropped: answers that were selected but not checked, for lack of idle time.
      factor: the current `ShareControl.factor`.
    """

    checks: int = 0
    greedy: int = 0
    same: int = 0
    tokens: int = 0
    agreed_tokens: int = 0
    first_kl: float = 0.0
    dropped: int = 0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    """An answer that waits for its check."""

    prompt: Prompt
    sampling: SamplingParams
    response: Response
    is_controlled: bool


class ShadowChecks:
    """The shadow checks of one engine. `watched` and the functions it returns may be called from any thread,
    `check_one` from one thread at a time.

    Attributes:
      counts: replaced by a new object at each change.
      control: adjusts the recomputed share by the results so far.
    """

    def __init__(
        self,
        background: BackgroundPrefills,
        eos_ids: frozenset[int],
        *,
        ratio: float,
        target: float,
    ) -> None:
        """
        Args:
          ratio: share of the approximate answers that are checked.
          target: share of these that should equal full prefill's.
        """
        self.counts = ShadowCounts()
        self.control = ShareControl(target)
        self._background = background
        self._eos_ids = eos_ids
        self._ratio = ratio
        self._lock = threading.Lock()
        self._random = random.Random()
        self._waiting: collections.deque[_Sample] = collections.deque()

    @property
    def num_waiting(self) -> int:
        """Answers that wait for their check."""
        return len(self._waiting)

    def watched(
        self, prompt: Prompt, sampling: SamplingParams, emit: Emit, *, is_controlled: bool
    ) -> tuple[SamplingParams, Emit]:
        """Selects a share of the requests for a check: for these, returns sampling parameters and an `emit` that record
        the answer; for all others, the arguments unchanged.

        Args:
          is_controlled: how much the request recomputes follows `control`, which learns from its check.
        """
        # Full prefill's likeliest token may be one that is ruled out or less likely here.
        is_free = sampling.constraint is None and sampling.allowed_token_ids is None and not sampling.is_adjusted
        if sampling.n > 1 or not is_free or self._random.random() >= self._ratio:
            return sampling, emit

        def record(event: Delta | Exception) -> None:
            response = event.response if isinstance(event, Delta) else None
            if isinstance(event, Delta) and response is not None:
                if not response.reuse.exact:
                    self._add(_Sample(prompt, sampling, response, is_controlled))
                if not sampling.first_logits:
                    event = dataclasses.replace(event, response=dataclasses.replace(response, first_logits=None))
            emit(event)

        return dataclasses.replace(sampling, first_logits=True), record

    def _add(self, sample: _Sample) -> None:
        self._waiting.append(sample)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._count(dropped=1)

    def check_one(self, is_cancelled: IsCancelled | None) -> bool:
        """Checks the newest waiting answer with a full prefill. Returns False if none waits, or if `is_cancelled`
        returned True; then the answer keeps waiting."""
        try:
            sample = self._waiting.pop()
        except IndexError:
            return False
        try:
            logits = self._full_logits(sample.prompt, sample.response, is_cancelled)
        except PrefillCancelledError:
            self._waiting.append(sample)
            return False
        self._note(sample, logits)
        return True

    def _full_logits(self, prompt: Prompt, response: Response, is_cancelled: IsCancelled | None) -> np.ndarray:
        """Logits [tokens of the answer + 1, V] after the prompt and after each token of the answer."""
        whole = prompt.extended(response.token_ids)
        num_logits = len(response.token_ids) + 1
        logits = self._background.run(whole, "off", num_logits=num_logits, is_cancelled=is_cancelled).prompt_logits
        assert logits is not None
        return logits

    def _note(self, sample: _Sample, logits: np.ndarray) -> None:
        sampling, response = sample.sampling, sample.response
        assert response.first_logits is not None
        kl = kl_divergence(logits[0], response.first_logits)
        self._count(checks=1, first_kl=kl)
        if sampling.temperature == 0.0:
            drawn = logits.argmax(-1)
            agreed = int((drawn[:-1] == np.asarray(response.token_ids, np.int64)).sum())
            # If a stop string ended the answer, the next token of full prefill does not matter.
            has_stops = bool(sampling.stop or sampling.stop_token_ids)
            ends_alike = response.finish_reason == "length" or has_stops or int(drawn[-1]) in self._eos_ids
            is_same = agreed == len(response.token_ids) and ends_alike
            if sample.is_controlled:
                self.control = self.control.after(is_same)
            self._count(greedy=1, same=int(is_same), tokens=len(response.token_ids), agreed_tokens=agreed)

    def _count(self, **more: float) -> None:
        with self._lock:
            grown = {name: getattr(self.counts, name) + number for name, number in more.items()}
            self.counts = dataclasses.replace(self.counts, **grown, factor=self.control.factor)
