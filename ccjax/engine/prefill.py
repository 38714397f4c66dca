"""Executes a PrefillPlan layer by layer: merge stored KV, compute the chosen tokens, drop what loses the focus.

Knows how to run a plan, not how one is made: no variant is chosen here, nothing is stored.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from ccjax.engine.buckets import segment_bucket, slot_bucket, token_bucket
from ccjax.engine.compiled_sizes import CompiledSizes
from ccjax.engine.kernels import decode_implementation
from ccjax.engine.plan_rows import (
    LayerRows,
    PrefillOutcome,
    computed_offsets,
    padded_to,
    question_stats,
    rows_outside,
    segment_of_tokens,
    unfocused,
    without_sink,
)
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sharding import EVERYWHERE, KV_ROWS, mesh_of, placement
from ccjax.models.llama3.steps import embed_step, layer_step, logits_step, rotate_step, select_step
from ccjax.models.lockstep import fetch, put, zeros
from ccjax.policy.focus import FocusState, observe
from ccjax.types import PrefillPlan

IsCancelled = Callable[[], bool]
"""True once nobody wants the result any more; asked often, from the thread that works."""


class Contexts(Protocol):
    """Source of the reused variants' KV, merged layer by layer.

    Attributes:
      waited_s: seconds that `take` waited so far.
    """

    waited_s: float

    @property
    def loaded_bytes(self) -> int:
        """KV bytes that came so far."""
        ...

    def is_ready(self, layer: int) -> bool:
        """True when `take` of the layer would not wait."""
        ...

    def take(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Keys before RoPE and values [S, K, H] of a layer, zeros elsewhere; called once for each, in order."""
        ...


Size = tuple[int, int, int]
"""What a layer step is compiled for: rows, context slots, columns of the mass output (0 without)."""


class PrefillCancelledError(Exception):
    """`is_cancelled` said so between two layers; nothing of the run is kept."""


@dataclasses.dataclass
class PrefillResult(PrefillOutcome):
    """What a run gave.

    Attributes:
      hidden: [N, D], hidden states after the last layer; the last real row is the prompt's last token.
      num_rows: real rows of `hidden`.
    """

    hidden: jax.Array = dataclasses.field(kw_only=True)
    num_rows: int = 0


class Prefiller:
    """Runs prefills of one model; between runs it only remembers which sizes it has run.

    Attributes:
      sizes: of the steps of a batch; `run`, whose steps are others, pads to its own.
    """

    def __init__(
        self,
        params: Params,
        config: LlamaConfig,
        *,
        implementation: str | None = None,
        sizes: CompiledSizes | None = None,
    ) -> None:
        self.params = params
        self.top = dataclasses.replace(params, layers=())
        """The weights outside the layers: a call flattens every leaf that it is given."""
        self.config = config
        self.dtype = np.dtype(params.embedding.dtype)
        self.implementation = implementation
        self.decode_implementation = decode_implementation(implementation)
        self.mesh = mesh_of(params)
        """What the weights lie on; None for a single device."""
        self.context_placement = placement(self.mesh, KV_ROWS)
        """Of [S, K, H], a layer's context: for `ccjax.models.lockstep.put`."""
        self.sizes = CompiledSizes() if sizes is None else sizes
        self._sizes: set[Size] = set()

    def put(self, values: Any) -> Any:
        """Arrays of the host, on every device that the model is on."""
        return put(values, placement(self.mesh, EVERYWHERE))

    def size_of(self, plan: PrefillPlan) -> Size:
        """The size that a collecting run of the plan begins with."""
        num_rows = token_bucket(len(computed_offsets(plan)))
        return num_rows, slot_bucket(plan.num_tokens), segment_bucket(len(plan.segments))

    def context_shape(self, plan: PrefillPlan) -> tuple[int, int, int]:
        """[S, K, H] of a layer's context."""
        return slot_bucket(plan.num_tokens), self.config.num_kv_heads, self.config.head_dim

    def has_run(self, size: Size) -> bool:
        """True if `run` used that size before, so that it is compiled."""
        return size in self._sizes

    def run(
        self,
        token_ids: np.ndarray,
        plan: PrefillPlan,
        *,
        contexts: Contexts | None = None,
        collect: bool = False,
        first_pos: int = 0,
        is_cancelled: IsCancelled | None = None,
        queued_layers: int = 1,
    ) -> PrefillResult:
        """The plan carried out over the prompt `token_ids` [n], int32.

        Args:
          contexts: source of the reused variants' KV, of `context_shape(plan)`; whatever it raises ends the run.
          collect: keep computed KV and masses of every layer, for capture.
          first_pos: RoPE position of the prompt's first token.
          is_cancelled: asked before every layer.
          queued_layers: layers that may wait behind the one that runs while that is asked: 1 keeps the device busy, 0
            stops soonest.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True.
        """
        num_tokens = plan.num_tokens
        if token_ids.shape != (num_tokens,):
            raise ValueError(f"token_ids: wanted shape ({num_tokens},) as planned, got {token_ids.shape}")
        if contexts is None and any(segment.action == "reuse" for segment in plan.segments):
            raise ValueError("contexts: wanted a source for the plan's reused variants, got None")
        num_slots = slot_bucket(num_tokens)
        positions = np.arange(first_pos, first_pos + num_slots, dtype=np.int32)
        segment_of_slot = padded_to(without_sink(segment_of_tokens(plan, num_tokens)), num_slots, -1)

        offsets = computed_offsets(plan)
        rows = self._rows(offsets, first_pos, num_slots)
        x = embed_step(self.top, self.put(padded_to(token_ids[offsets], rows.size, 0)))
        result = PrefillResult(hidden=x, num_rows=rows.count)
        focus = FocusState()
        pending: collections.deque[LayerRows] = collections.deque()
        slot_positions, slot_segments = self.put((positions, segment_of_slot))
        sizes: set[Size] = set()
        under_way: collections.deque[jax.Array] = collections.deque()
        for layer in range(self.config.num_layers):
            want_mass = collect or (plan.focus_window is not None and focus.decided is None)
            num_segments = segment_bucket(len(plan.segments)) if want_mass else 0
            if contexts is not None and not contexts.is_ready(layer):
                x.block_until_ready()  # what is waited for while the device works is not waited for
            k_context, v_context = self._context(layer, contexts, slot_positions)
            # The host runs ahead of the device: without this wait every layer is queued before the first answer, and
            # all contexts are on the device at once.
            under_way.append(x)
            if len(under_way) > queued_layers:
                under_way.popleft().block_until_ready()
            if is_cancelled is not None and is_cancelled():
                raise PrefillCancelledError
            out = layer_step(
                self.params.layers[layer],
                x,
                k_context,
                v_context,
                rows.positions,
                rows.slots,
                slot_positions,
                slot_segments if want_mass else None,
                config=self.config,
                num_segments=num_segments,
                implementation=self.implementation,
                mesh=self.mesh,
            )
            sizes.add((rows.size, num_slots, num_segments))
            x = out.x
            result.computed_token_layers += len(offsets)
            computed = LayerRows(layer, offsets, 0, out.k, out.v, out.mass, out.self_mass)
            if collect:
                result.layers.append(computed)
            if plan.focus_window is None or focus.decided is not None or out.mass is None:
                continue
            # Policy reads one layer late: while it looks at the layer before, the device is busy with this one.
            out.mass.copy_to_host_async()
            pending.append(computed)
            if len(pending) < 2 or layer + 1 == self.config.num_layers:
                continue
            focus = observe(
                focus, question_stats(plan, pending.popleft()), window=plan.focus_window, rule=plan.focus_rule
            )
            if focus.decided is not None:
                result.unrepaired = unfocused(plan, focus.decided)
                kept = rows_outside(plan, offsets, result.unrepaired)
                if len(kept) < len(offsets):
                    offsets, result.focus_cut_layer = offsets[kept], layer + 1
                    rows = self._rows(offsets, first_pos, num_slots)
                    x = select_step(x, self.put(padded_to(kept, rows.size, int(kept[-1]))))
        result.hidden, result.num_rows, result.focused = x, rows.count, focus.decided
        if contexts is not None:
            result.loaded_bytes, result.load_wait_s = contexts.loaded_bytes, contexts.waited_s
        result.has_new_sizes = not sizes <= self._sizes
        self._sizes |= sizes
        return result

    def last_logits(self, result: PrefillResult) -> np.ndarray:
        """Logits [V], float32, of the prompt's last token."""
        row = select_step(result.hidden, self.put(np.asarray([result.num_rows - 1], np.int32)))
        return fetch(logits_step(self.top, row, config=self.config))[0]

    def turned(self, k: np.ndarray, shift: int) -> np.ndarray:
        """Keys before RoPE [T, K, H], turned by so many positions, which may be negative."""
        return np.asarray(rotate_step(k, np.full(len(k), shift, np.int32), config=self.config))

    def all_logits(self, result: PrefillResult) -> np.ndarray:
        """Logits [n, V], float32, of every row of the last layer."""
        return fetch(logits_step(self.top, result.hidden, config=self.config))[: result.num_rows]

    def _context(self, layer: int, contexts: Contexts | None, slot_positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values [S, K, H] of one layer with the reused variants in place, zeros elsewhere."""
        if contexts is None:
            shape = (len(slot_positions), self.config.num_kv_heads, self.config.head_dim)
            empty = functools.partial(zeros, shape, self.dtype, self.context_placement)
            return empty(), empty()
        k_context, v_context = contexts.take(layer)
        return rotate_step(k_context, slot_positions, config=self.config), v_context

    def _rows(self, offsets: np.ndarray, first_pos: int, num_slots: int) -> _Rows:
        size = token_bucket(len(offsets))
        positions = padded_to((offsets + first_pos).astype(np.int32), size, int(offsets[-1]) + first_pos)
        slots = padded_to(offsets.astype(np.int32), size, num_slots)  # past the end: dropped
        return _Rows(len(offsets), size, *self.put((positions, slots)))


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Positions and slots of the `count` computed tokens, padded to a bucket."""

    count: int
    size: int
    positions: jax.Array
    slots: jax.Array
