"""One request's prefill, across the packs that its pieces run in: collects their results and chooses the tokens to
drop."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from ccjax.policy.focus import FocusState, observe
from ccjax.policy.hkvd import most_deviating
from ccjax.policy.question import revise
from ccjax.runner.pages import RequestPages
from ccjax.runner.plan_rows import (
    LayerRows,
    PrefillOutcome,
    computed_offsets,
    mass_columns,
    question_stats,
    rows_outside,
    segment_of_tokens,
    unfocused,
)
from ccjax.types import PrefillPlan


class LoadedRows(NamedTuple):
    """Loaded KV of one layer.

    Attributes:
      positions: [n], of the tokens in the prompt; the same in all layers.
      k, v: [N, K, H], keys before RoPE and values, on the device; rows from n on are padding.
    """

    positions: np.ndarray
    k: jax.Array
    v: jax.Array


class Contexts(Protocol):
    """Source of the reused variants' KV, layer by layer.

    Attributes:
      waited_s: seconds that `take` has waited so far.
    """

    waited_s: float

    def is_ready(self, layer: int) -> bool:
        """True if `take` of the layer would not wait."""
        ...

    def take(self, layer: int) -> Sequence[LoadedRows]:
        """Returns the rows of a layer, in as many pieces for each; called once per layer, in order."""
        ...


class PrefillJob:
    """The prefill of one request.

    Attributes:
      offsets: positions, ascending, of all tokens that run through the model.
      segment_of: [n + a] int32, segment of every token; the answer belongs to the question's segment.
      column_of: [n + a] int32, the column that the mass on every token is counted in (`mass_columns`).
      result: its results so far.
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        plan: PrefillPlan,
        pages: RequestPages,
        *,
        contexts: Contexts | None = None,
        collect: bool = False,
        num_logits: int = 0,
        num_top: int | None = None,
    ) -> None:
        """
        Args:
          token_ids: [n + a] int32: the prompt and, after a preemption, the answer so far.
          pages: pages with a slot for each of them.
          contexts: source of the KV of reused segments that are not in `pages.shared`, layer by layer.
          collect: keep the masses that capture needs.
          num_logits: number of last tokens whose logits are kept.
          num_top: score the tokens of the prompt, with so many likeliest ones; None does not.
        """
        if token_ids.shape != (pages.num_tokens,):
            raise ValueError(f"token_ids: wanted shape ({pages.num_tokens},), a slot each, got {token_ids.shape}")
        reused = {index for index, segment in enumerate(plan.segments) if segment.action == "reuse"}
        if contexts is None and not reused <= pages.shared:
            raise ValueError("contexts: wanted a source for the plan's reused variants, got None")
        self.token_ids = token_ids
        self.plan = plan
        self.pages = pages
        self.contexts = contexts
        self.collect = collect
        self.num_logits = num_logits
        self.num_top = num_top
        self.offsets = self._computed_offsets()
        self.segment_of = segment_of_tokens(plan, len(token_ids))
        self.column_of = mass_columns(plan)[self.segment_of]
        self.result = PrefillOutcome()
        self._is_candidate = np.zeros(len(token_ids), bool)
        """Tokens among which deviation chooses."""
        if plan.hkvd_counts_by_layer:
            fixed = {index for index in reused if plan.segments[index].recompute_offsets}
            self._is_candidate = np.isin(self.segment_of, list(fixed))
            self.result.partly_recomputed = frozenset(fixed)
            self.result.recomputed_tokens_of = {index: plan.segments[index].num_tokens for index in fixed}
        self._focus = FocusState()
        self._pending: collections.deque[LayerRows] = collections.deque()

    @property
    def watches_focus(self) -> bool:
        """True while CacheCraft alg. 1 needs the question's masses."""
        return self.plan.focus_window is not None and self._focus.decided is None

    @property
    def question_offsets(self) -> np.ndarray:
        """Positions of the question's tokens. Neither the answer so far nor one that is scored behind the question
        (`num_logits`) may influence what is recomputed."""
        start, num_scored = self.plan.segments[-1].start, max(0, self.num_logits - 1)
        last = np.arange(start, max(start + 1, self.plan.num_tokens - num_scored))
        return np.concatenate([np.arange(*self.plan.early_question), last])

    @property
    def is_stored(self) -> np.ndarray:
        """[n + a] bool, the tokens whose KV is reused, or is there to be replaced by what is recomputed."""
        reused = [index for index, segment in enumerate(self.plan.segments) if segment.action == "reuse"]
        return np.isin(self.segment_of, reused)

    def revise(self, received: np.ndarray) -> None:
        """Chooses the tokens to recompute again, by the question's attention [n] to each token of the prompt; their
        number stays."""
        self.plan = revise(self.plan, received.tolist())
        self.offsets = self._computed_offsets()

    def _computed_offsets(self) -> np.ndarray:
        answer = np.arange(self.plan.num_tokens, len(self.token_ids))
        return np.concatenate([computed_offsets(self.plan), answer])

    def filters(self, layer: int) -> bool:
        """True if some candidates are dropped before this layer runs (CacheBlend sec. 4.3)."""
        counts = self.plan.hkvd_counts_by_layer
        return layer > 0 and bool(counts) and counts[layer] < counts[layer - 1]

    def expected_rows(self, begin: int, offsets: np.ndarray) -> np.ndarray:
        """Expected number of rows in each layer from `begin` on, of the rows at these offsets that run through that
        one."""
        counts = self.plan.hkvd_counts_by_layer[begin:]
        if not counts:
            return np.asarray(len(offsets))
        num_candidates = int(self._is_candidate[offsets].sum())
        return len(offsets) - num_candidates + -(-np.asarray(counts) * num_candidates // counts[0])

    def most_deviating(self, layer: int, offsets: np.ndarray, deviations: np.ndarray) -> np.ndarray:
        """Chooses the rows that run through this layer and the following ones.

        Args:
          offsets: offsets of all current rows of the prompt.
          deviations: [rows], the distance between the KV that the layer would compute for them and the stored KV.
        """
        candidates = np.flatnonzero(self._is_candidate[offsets])
        wanted = min(self.plan.hkvd_counts_by_layer[layer], len(candidates))
        chosen = most_deviating(deviations[candidates].tolist(), wanted)
        stays = ~self._is_candidate[offsets]
        stays[candidates[list(chosen)]] = True
        if not any(self.filters(earlier) for earlier in range(layer)):
            self.result.not_recomputed.append(offsets[~stays])
            for index in self.result.recomputed_tokens_of:
                self.result.recomputed_tokens_of[index] -= int((self.segment_of[offsets[~stays]] == index).sum())
        return np.flatnonzero(stays)

    def add_layer(self, rows: LayerRows, *, is_last_piece: bool, num_layers: int) -> bool:
        """Adds the output of a layer; returns True if CacheCraft alg. 1 decides the focus with it, so that only
        `focused_rows` run through the next one."""
        self.result.computed_token_layers += len(rows.offsets)
        if self.collect:
            self.result.layers.append(rows)
        if not (is_last_piece and self.watches_focus) or rows.mass is None:
            return False
        # The policy reads one layer late: while it processes the previous layer, the device computes this one.
        rows.mass.copy_to_host_async()
        self._pending.append(rows)
        if len(self._pending) < 2 or rows.layer + 1 == num_layers:
            return False
        window, rule = self.plan.focus_window, self.plan.focus_rule
        assert window is not None
        stats = question_stats(self.plan, self._pending.popleft())
        self._focus = observe(self._focus, stats, window=window, rule=rule)
        self.result.focused = self._focus.decided
        return self._focus.decided is not None

    def focused_rows(self, layer: int, offsets: np.ndarray) -> np.ndarray:
        """Indices of the rows, at these offsets, that stay after `layer`, the one that decided the focus."""
        assert self._focus.decided is not None
        dropped = unfocused(self.plan, self._focus.decided)
        cut = frozenset(index for index in dropped if np.isin(self.segment_of[offsets], index).any())
        if cut:
            self.result.partly_recomputed |= cut
            self.result.focus_cut_layer = layer + 1
        return rows_outside(self.plan, offsets, dropped)
