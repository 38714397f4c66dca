"""The pytrees that the jitted steps take besides weights, hidden states and pages, and what they are compiled for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt

from ccjax.kernels.inputs import AttentionInputs, PageTables
from ccjax.models.llama3.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a step is compiled for, a static argument.

    Attributes:
      implementation: of the attention, see `ccjax.kernels.attention.attention`.
      mesh: mesh of weights and pages, see `ccjax.models.llama3.sharding`; None for a single device.
    """

    config: LlamaConfig
    implementation: str | None = None
    mesh: Mesh | None = None


@struct.dataclass(kw_only=True)
class StepInputs(AttentionInputs):
    """The computed tokens and the context of a pack: several requests, one after another.

    Attributes:
      q_pos, q_request, k_pos, k_request, k_segment, num_segments: see `AttentionInputs`; padding repeats the last
        position and request of the computed tokens and the last request of the context, whose positions are INT32_MAX.
      q_slot: slot of the pool (page * T + offset) that each computed row is written to; all distinct, and not read by
        other requests; padding rows point past the end and are dropped.
      k_slot: slot of every context token of the pack, including the computed ones; past the end for padding. A slot may
        occur several times, for several requests. Each must be written before or in this call.
      q_rotation, k_rotation: `rotation_step` of `q_pos` and of `k_pos`.
    """

    q_request: Int[Array, "N"]  # pyright: ignore[reportGeneralTypeIssues]
    q_slot: Int[Array, "N"]
    q_rotation: Float[Array, "N H"]
    k_request: Int[Array, "S"]  # pyright: ignore[reportGeneralTypeIssues]
    k_slot: Int[Array, "S"]
    k_rotation: Float[Array, "S H"]  # pyright: ignore[reportGeneralTypeIssues]

    @classmethod
    def abstract(cls, num_rows: int, num_slots: int, num_segments: int, head_dim: int) -> StepInputs:
        """Shapes and dtypes, without memory."""
        rows, slots = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (num_rows, num_slots))
        rotations = (jax.ShapeDtypeStruct((count, head_dim), jnp.float32) for count in (num_rows, num_slots))
        named = {"q_pos": rows, "q_request": rows, "q_slot": rows, "k_pos": slots, "k_request": slots, "k_slot": slots}
        named |= dict(zip(("q_rotation", "k_rotation"), rotations, strict=True))
        named |= {"k_segment": slots} if num_segments else {}
        return cls(**named, num_segments=num_segments)  # pyright: ignore[reportArgumentType]


@struct.dataclass(kw_only=True)
class DecodeInputs(PageTables):
    """The new token of each request, and the pages of its context, which include the new token; padding rows have page
    lengths of 0, and their output is meaningless.

    Attributes:
      q_pos: position of each new token.
      q_slot: slot of the pool (page * T + offset) that its row is written to; past the end for padding rows.
      page_rotation: `rotation_step` of the position of each entry's first token.
    """

    q_pos: Int[Array, "B"]
    q_slot: Int[Array, "B"]

    @classmethod
    def abstract(cls, num_requests: int, num_entries: int, head_dim: int) -> DecodeInputs:
        """Shapes and dtypes, without memory."""
        row = jax.ShapeDtypeStruct((num_requests,), jnp.int32)
        table = jax.ShapeDtypeStruct((num_requests, num_entries), jnp.int32)
        rotation = jax.ShapeDtypeStruct((num_requests, num_entries, head_dim), jnp.float32)
        return cls(table, table, rotation, q_pos=row, q_slot=row)  # pyright: ignore[reportArgumentType]


@struct.dataclass
class LogitAdjustments:
    """Changes to the logits and weights of every row before a token is sampled.

    Attributes:
      token_ids: tokens whose logits change, each once in a row; ids past the end are padding.
      counts: how often the answer has that token; -1 if neither prompt nor answer has it.
      bias: added to its logit; minus infinity rules it out.
      repetition: divides positive logits of tokens in prompt or answer, and multiplies negative ones; 1 for none.
      presence, frequency: taken from the logits of tokens in the answer, the second one times the count.
      top_k: keeps so many likeliest tokens, with ties; the size of the vocabulary keeps all.
      min_p: after temperature, keeps the tokens at least this share as likely as the likeliest one.
    """

    token_ids: Int[Array, "B M"]
    counts: Int[Array, "B M"]
    bias: Float[Array, "B M"]
    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]


@struct.dataclass
class SamplingState:
    """How to sample the next token of every row.

    Attributes:
      temperature: below `GREEDY_BELOW` the likeliest token is chosen, with ties the lowest id.
      top_p: in (0, 1]: keeps the smallest set of likeliest tokens whose probability reaches it, ties in order of ids; 1
        keeps all.
      seeds: `seed_words` of each request.
      index: index of the token in its answer; each index is sampled independently.
      allowed: the tokens that may be sampled, one bit for each, the lowest first; W words cover the vocabulary. None
        allows all, in a step of its own.
      adjustments: None for no row, in a step of its own.
    """

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    seeds: UInt[Array, "B 2"]
    index: Int[Array, "B"]
    allowed: UInt[Array, "B W"] | None = None
    adjustments: LogitAdjustments | None = None
