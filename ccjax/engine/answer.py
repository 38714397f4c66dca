"""Builds an answer token by token: decodes the text and checks the stop conditions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from ccjax.errors import LogitsError
from ccjax.requests import Choice, Delta, FinishReason, TokenLogprob
from ccjax.runner.adjustments import Adjustments
from ccjax.runner.sampling import SampledToken
from ccjax.sampling import SamplingParams
from ccjax.text import IncrementalDecoder, Matcher, StopStrings, Tokenizer


def ends_of(sampling: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end an answer, of a model with these end-of-text tokens."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token ids of texts that an answer does not have: in the middle of a text, with and without a space before
    (as in vLLM)."""
    found = []
    for word in words:
        assert tokenizer is not None
        for text in (word, f" {word.lstrip()}"):
            ids = tokenizer.encode_parts([(text, False)], follows="text")
            found += [ids] if ids else []
    return found


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
        matcher: Matcher | None = None,
        allowed: bytes | None = None,
        adjustments: Adjustments | None = None,
    ) -> None:
        """
        Args:
          index: its index among the answers to the prompt.
          matcher: follows it through its grammar; None if everything is allowed.
          allowed: the only tokens of the answer, as in `SampleSpec.mask`; None for all.
          adjustments: follow it to change the logits of its next tokens; None if they stay as they are.
        """
        self._matcher, self._allowed = matcher, allowed
        self.adjustments = adjustments
        self._index = index
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._ends = ends_of(sampling, eos_ids)
        self._silent_ends = frozenset() if sampling.ignore_eos else eos_ids
        self._decoder = None
        if tokenizer is not None:
            skips = sampling.skip_special_tokens
            self._decoder = IncrementalDecoder(tokenizer, prompt_tail, skip_special=skips)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._first_logits: np.ndarray | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far, without the end-of-turn token."""
        return len(self._token_ids)

    @property
    def mask(self) -> Callable[[], bytes] | None:
        """`SampleSpec.mask` of the next token."""
        if self._matcher is None:
            return None if self._allowed is None else lambda: self._allowed or b""
        return self._matcher.mask if self._allowed is None else self._joint_mask

    def push(self, token: SampledToken) -> Delta:
        """Adds a token; the returned delta has the text it completes, without any part of a stop string.

        Raises:
          RequestError: the answer's grammar is too complex to be followed further.
          LogitsError: the logits were not finite.
        """
        if math.isnan(token.logprob):
            raise LogitsError(
                f"the model's logits for token {len(self._token_ids)} of the answer are not finite: a weight may be "
                "damaged, or the prompt leads to an overflow"
            )
        token_id = token.token_id
        if self._matcher is not None:
            self._matcher.push(token_id)
        if token.logits is not None:
            self._first_logits = token.logits
        if self.adjustments is not None:
            self.adjustments.push(token_id)
        if token_id in self._ends:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self._silent_ends else token_id
            if not self._sampling.include_stop:
                return self._delta("")
        self._token_ids.append(token_id)
        logprobs = ()
        if self._sampling.logprobs is not None:
            skips = self._sampling.skip_special_tokens
            logprobs = (token_logprob(token, self._tokenizer, skip_special=skips),)
            self._logprobs.extend(logprobs)
        text = ""
        if self._decoder is not None:
            may_stop = len(self._token_ids) > self._sampling.min_tokens
            text = self._stops.push(self._decoder.push(token_id), may_stop=may_stop)
        if self._stops.matched is not None or (self._matcher is not None and self._matcher.is_complete):
            self.finish_reason = "stop"
            self.stop_reason = self._stops.matched if self.stop_reason is None else self.stop_reason
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
            stop_reason=self.stop_reason,
        )
        unseen = last if self.finish_reason is not None else self._delta("")
        ended = {"finish_reason": choice.finish_reason, "stop_reason": self.stop_reason}
        return dataclasses.replace(unseen, text=unseen.text + tail, **ended), choice

    def _joint_mask(self) -> bytes:
        """What both the grammar and `allowed` let come next; what the grammar does if that is no token."""
        assert self._matcher is not None and self._allowed is not None
        grammars = self._matcher.mask()
        both = np.frombuffer(grammars, np.uint8) & np.frombuffer(self._allowed, np.uint8)
        return both.tobytes() if both.any() else grammars

    def _delta(self, text: str, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()) -> Delta:
        return Delta(text, token_ids, logprobs, index=self._index)


def token_logprob(token: SampledToken, tokenizer: Tokenizer | None, *, skip_special: bool) -> TokenLogprob:
    """The token as callers see it; with `skip_special`, special tokens are not in the text."""

    def bytes_of(token_id: int) -> bytes:
        if tokenizer is None:
            return b""
        return tokenizer.token_bytes(token_id) or tokenizer.decode([token_id]).encode()

    top = tuple((token_id, bytes_of(token_id), logprob) for token_id, logprob in token.top)
    is_shown = not (skip_special and tokenizer is not None and token.token_id in tokenizer.special_ids)
    return TokenLogprob(token.token_id, bytes_of(token.token_id), token.logprob, top, token.rank, is_shown)
