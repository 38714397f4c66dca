"""What changes the logits of one answer token by token: penalties, biases, and tokens that are ruled out for now."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ccjax.models.llama3.inputs import LogitAdjustments
from ccjax.sampling import SamplingParams

_UNSEEN = -1
"""The count of a token that neither prompt nor answer has."""


class Adjustments:
    """The tokens of one answer whose logits change; `push` follows the answer."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: np.ndarray,
        *,
        ends: Collection[int],
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """
        Args:
          prompt: token ids of the whole prompt, int32.
          ends: the tokens that end the answer, ruled out before `sampling.min_tokens`.
          bad_words: token ids of texts that the answer does not have.
        """
        self.sampling = sampling
        self._bad_words = bad_words
        self._answer: list[int] = []
        self._ends = sorted(ends) if sampling.min_tokens else []
        prompt = np.unique(prompt) if sampling.repetition_penalty != 1.0 else prompt[:0]
        more = {*sampling.logit_bias, *self._ends, *(word[-1] for word in bad_words)}.difference(prompt.tolist())
        self._ids = np.concatenate([prompt, np.fromiter(more, np.int32)]).astype(np.int32)
        self._counts = np.full(len(self._ids), _UNSEEN, np.int32)
        self._counts[: len(prompt)] = 0
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}
        self._bias = np.zeros(len(self._ids), np.float32)
        for token, bias in sampling.logit_bias.items():
            self._bias[self._place[token]] = bias

    def push(self, token_id: int) -> None:
        """Takes the next token of the answer."""
        self._answer.append(token_id)
        if not self.sampling.has_penalties:
            return
        place = self._place.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids = np.append(self._ids, np.int32(token_id))
            self._counts = np.append(self._counts, np.int32(0))
            self._bias = np.append(self._bias, np.float32(0.0))
        self._counts[place] = max(0, self._counts[place]) + 1

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, counts and biases of the tokens, as in `LogitAdjustments`, for the next token of the answer."""
        ruled_out = self._ends if len(self._answer) < self.sampling.min_tokens else []
        ruled_out = ruled_out + [word[-1] for word in self._bad_words if self._ends_with(word[:-1])]
        bias = self._bias
        if ruled_out:
            bias = bias.copy()
            bias[[self._place[token] for token in ruled_out]] = -np.inf
        return self._ids, self._counts, bias

    def _ends_with(self, start: Sequence[int]) -> bool:
        return not start or self._answer[-len(start) :] == list(start)


def batched(rows: Sequence[Adjustments | None], size: int, vocab_size: int) -> LogitAdjustments | None:
    """The adjustments of a batch, padded to `size` rows and a size that is compiled; None if no row has any."""
    if all(row is None for row in rows):
        return None
    entries = [(np.zeros(0), np.zeros(0), np.zeros(0)) if row is None else row.entries() for row in rows]
    most = min(_bucket(max(len(ids) for ids, _, _ in entries)), vocab_size)
    token_ids = np.full((size, most), vocab_size, np.int32)
    counts, bias = np.full((size, most), _UNSEEN, np.int32), np.zeros((size, most), np.float32)
    for row, (ids, own_counts, own_bias) in enumerate(entries):
        token_ids[row, : len(ids)], counts[row, : len(ids)], bias[row, : len(ids)] = ids, own_counts, own_bias
    params = [SamplingParams() if row is None else row.sampling for row in rows]
    params += [SamplingParams()] * (size - len(rows))

    def column(name: str, dtype: type) -> np.ndarray:
        return np.asarray([getattr(sampling, name) for sampling in params], dtype)

    penalties = [column(f"{name}_penalty", np.float32) for name in ("repetition", "presence", "frequency")]
    top_k = np.asarray([min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params], np.int32)
    return LogitAdjustments(token_ids, counts, bias, *penalties, top_k, column("min_p", np.float32))  # pyright: ignore


def _bucket(count: int) -> int:
    """Pads the number of tokens of a row to 0, 64, 512, 4,096 and so on, the sizes that are compiled."""
    size = 64 if count else 0
    while size < count:
        size *= 8
    return size
