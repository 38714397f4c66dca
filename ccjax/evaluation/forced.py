"""Scores of a given answer behind a prompt (teacher forcing). No token is sampled, so that ways to answer stay
comparable token by token even if their own answers would diverge."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence

import numpy as np

from ccjax.engine import Engine, Request
from ccjax.engine.divergence import kl_divergence, log_softmax
from ccjax.requests import Delta, Response, SamplingParams


def drawn_tokens(response: Response, end: int) -> tuple[int, ...]:
    """The tokens of an answer, with `end` last if it ended by itself; never empty, even for an empty text."""
    return response.token_ids + ((end,) if response.finish_reason == "stop" else ())


def forced_logits(engine: Engine, request: Request, answer: Sequence[int]) -> np.ndarray:
    """Logits [len(answer), V], float32, from which each token of `answer` would be sampled: behind the prompt and the
    answer's tokens before it.

    Args:
      request: its prompt and reuse mode count.

    Raises:
      ValueError: no token.
      ContextLengthError: prompt and answer are too long.
    """
    if not answer:
        raise ValueError("answer: wanted at least one token, got none")
    request = dataclasses.replace(request, sampling=SamplingParams(len(answer), prompt_logits=len(answer)))
    prompt = engine.assemble(request).extended(answer[:-1])
    events = queue.SimpleQueue[Delta | Exception]()
    engine.submit(request, events.put, prompt=prompt)
    while True:
        event = events.get()
        if isinstance(event, Exception):
            raise event
        if event.response is not None:
            logits = event.response.prompt_logits
            assert logits is not None and len(logits) == len(answer)
            return logits


def mean_kl(full: np.ndarray, own: np.ndarray) -> float:
    """Mean over tokens of KL(full || own) in nats, of logits [n, V]."""
    return float(np.mean([kl_divergence(full_row, own_row) for full_row, own_row in zip(full, own, strict=True)]))


def agreement(full: np.ndarray, own: np.ndarray) -> float:
    """Share of tokens whose likeliest token is the same in both, of logits [n, V]."""
    return float(np.mean(full.argmax(-1) == own.argmax(-1)))


def nll(logits: np.ndarray, answer: Sequence[int]) -> float:
    """Negative log-likelihood of an answer in nats, mean over its tokens, of `forced_logits`."""
    return -float(np.mean([log_softmax(row)[token] for row, token in zip(logits, answer, strict=True)]))
