"""Builds an answer token by token: decodes the text and checks the stop conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ccjax.requests import Choice, Delta, FinishReason, SamplingParams, TokenLogprob
from ccjax.runner.sampling import SampledToken
from ccjax.text import IncrementalDecoder, StopStrings, Tokenizer


class Answer:
    """One answer; `push` adds tokens until `finish_reason` is set."""

    def __init__(
        self,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        prompt_tail: Sequence[int],
        *,
        index: int = 0,
    ) -> None:
        """
        Args:
          index: its index among the answers to the prompt.
        """
        self._index = index
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._decoder = IncrementalDecoder(tokenizer, prompt_tail) if tokenizer is not None else None
        self._stops = StopStrings(sampling.stop)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._first_logits: np.ndarray | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far, without the end-of-turn token."""
        return len(self._token_ids)

    def push(self, token: SampledToken) -> Delta:
        """Adds a token; the returned delta has the text it completes, without any part of a stop string."""
        token_id = token.token_id
        if token.logits is not None:
            self._first_logits = token.logits
        if token_id in self._eos_ids and not self._sampling.ignore_eos:
            self.finish_reason = "stop"
            return self._delta("")
        self._token_ids.append(token_id)
        logprobs = ()
        if self._sampling.logprobs is not None:
            logprobs = (self._logprob(token),)
            self._logprobs.extend(logprobs)
        text = self._stops.push(self._decoder.push(token_id)) if self._decoder is not None else ""
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        self._text.append(text)
        return self._delta(text, (token_id,), logprobs)

    def finish(self, last: Delta) -> tuple[Delta, Choice]:
        """Returns the last delta, with the text still held back, and the complete answer. `last` is the delta that the
        last `push` returned."""
        tail = ""
        if self._decoder is not None and self._stops.matched is None:
            tail = self._stops.push(self._decoder.flush()) + self._stops.flush()
            self._text.append(tail)
        choice = Choice(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason or "length",
            logprobs=tuple(self._logprobs) if self._sampling.logprobs is not None else None,
            first_logits=self._first_logits,
        )
        unseen = last if self.finish_reason is not None else self._delta("")
        return dataclasses.replace(unseen, text=unseen.text + tail, finish_reason=choice.finish_reason), choice

    def _delta(self, text: str, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()) -> Delta:
        return Delta(text, token_ids, logprobs, index=self._index)

    def _logprob(self, token: SampledToken) -> TokenLogprob:
        top = tuple((token_id, self._decode(token_id), logprob) for token_id, logprob in token.top)
        return TokenLogprob(token.token_id, self._decode(token.token_id), token.logprob, top)

    def _decode(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id]) if self._tokenizer is not None else ""
