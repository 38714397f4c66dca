"""Draws the answer token by token from a prefilled context. Knows no chunk, no text and no stop rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.engine.buckets import slot_bucket
from ccjax.engine.prefill import Prefiller, PrefillResult
from models.llama3.steps import embed_step, layer_step, logits_step


class Decoder:
    """One running sequence: feeds a token, returns the logits of the next."""

    def __init__(
        self,
        model: Prefiller,
        result: PrefillResult,
        *,
        num_prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """Takes over the contexts of `result`, which is empty of them afterwards, and makes room for the answer."""
        self._model = model
        num_slots = slot_bucket(num_prompt_tokens + max_new_tokens)
        self._k = [_grown(context, num_slots) for context in result.k_contexts]
        self._v = [_grown(context, num_slots) for context in result.v_contexts]
        result.k_contexts, result.v_contexts = [], []
        self._slot_positions = jnp.arange(num_slots, dtype=jnp.int32)
        self._next = num_prompt_tokens

    def step(self, token_id: int) -> np.ndarray:
        """Logits [V], float32, of the token after `token_id`, which becomes part of the context."""
        where = np.asarray([self._next], np.int32)
        x = embed_step(self._model.top, np.asarray([token_id], np.int32))
        for number, layer in enumerate(self._model.params.layers):
            out = layer_step(
                layer,
                x,
                self._k[number],
                self._v[number],
                where,
                where,
                self._slot_positions,
                None,
                config=self._model.config,
                num_segments=0,
                implementation=self._model.implementation,
            )
            x, self._k[number], self._v[number] = out.x, out.k_context, out.v_context
        self._next += 1
        return np.asarray(logits_step(self._model.top, x, config=self._model.config))[0]


def _grown(context: jax.Array, num_slots: int) -> jax.Array:
    extra = num_slots - context.shape[0]
    return jnp.pad(context, ((0, extra), (0, 0), (0, 0))) if extra > 0 else context
