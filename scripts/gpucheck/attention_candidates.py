"""Candidates in the timing of attention, on Llama-3-8B's heads in bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.kernels.attention import attention
from scripts.gpucheck import torch_peers
from scripts.gpucheck.attention_numerics import is_library
from scripts.gpucheck.timing import Timed, lowered_jax, random_bfloat16

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SEGMENTS = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
COMPUTED = {"15 %": (5, 32), "30 %": (5, 16), "100 %": (1, 1)}
"""Computed shares of a context, after the engine's padding to buckets: 15.6 and 31.3 %."""
FULL = "100 %"
_ALL_SCORES = ("reference", "tokamax_xla")


def visible_pairs(q_pos: np.ndarray, k_pos: np.ndarray) -> int:
    """Number of (query, slot) pairs with the slot's position at most the query's."""
    return int(np.searchsorted(np.sort(k_pos), q_pos, side="right").sum())


def attention_flops(q_pos: np.ndarray, k_pos: np.ndarray, num_heads: int, head_dim: int) -> int:
    """Operations of the two products over visible pairs, 2 * H each, for every query head."""
    return 4 * head_dim * num_heads * visible_pairs(q_pos, k_pos)


def scattered_positions(context: int, num_queries: int) -> np.ndarray:
    """Ascending positions [N] int32: the question, a 64th of the context at its end, and tokens anywhere before it."""
    question = context // 64
    before = np.random.default_rng(context).choice(context - question, num_queries - question, replace=False)
    return np.concatenate([np.sort(before), np.arange(context - question, context)]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """One problem for several kernels: arguments of `attention`, slots at positions 0, 1, ..."""

    context: int
    computed: str
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_pos: jax.Array
    k_pos: jax.Array
    k_segment: jax.Array
    flops: int

    @property
    def num_queries(self) -> int:
        return self.q.shape[0]


def work(context: int, computed: str) -> AttentionProblem:
    """Random arrays on the device; keys and values are the same for every computed share."""
    part, whole = COMPUTED[computed]
    num_queries = context * part // whole
    slots = np.arange(context, dtype=np.int32)
    q_pos = scattered_positions(context, num_queries) if computed != FULL else slots
    return AttentionProblem(
        context,
        computed,
        q=random_bfloat16(5, num_queries, NUM_HEADS, HEAD_DIM),
        k=random_bfloat16(3, context, NUM_KV_HEADS, HEAD_DIM),
        v=random_bfloat16(4, context, NUM_KV_HEADS, HEAD_DIM),
        q_pos=jnp.asarray(q_pos),
        k_pos=jnp.asarray(slots),
        k_segment=jnp.asarray((slots.astype(np.int64) * NUM_SEGMENTS // context).astype(np.int32)),
        flops=attention_flops(q_pos, slots, NUM_HEADS, HEAD_DIM),
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel and its problem.

    Attributes:
      lower: calls per sample -> a function that builds the kernel and warms it up; either may raise an exception of the
        kernel.
      in_threads: whether the latter may run in a thread, in parallel with others.
      rows_of: a result and row numbers -> its output there, [R, Q, H] float32.
      is_library: another project's kernel.
    """

    name: str
    work: AttentionProblem
    lower: Callable[[int], Callable[[], Timed]]
    rows_of: Callable[[Any, np.ndarray], np.ndarray]
    with_mass: bool = False
    is_library: bool = True
    in_threads: bool = True


def ours(work: AttentionProblem, name: str, with_mass: bool) -> Candidate:
    """An implementation of `attention`."""
    arrays = [work.q, work.k, work.v, work.q_pos, work.k_pos, *([work.k_segment] if with_mass else [])]

    def attend(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, k_segment: Any = None) -> Any:
        return attention(
            q,
            k,
            v,
            q_pos=q_pos,
            k_pos=k_pos,
            scale=SCALE,
            k_segment=k_segment,
            num_segments=NUM_SEGMENTS if with_mass else 0,
            implementation=name,
        )

    return Candidate(
        name,
        work,
        lower=lambda calls: lowered_jax(attend, arrays, calls),
        rows_of=lambda result, rows: np.asarray(result.out[rows].astype(jnp.float32)),
        with_mass=with_mass,
        is_library=is_library(name),
    )


def cudnn(work: AttentionProblem) -> Candidate:
    """cuDNN's causal attention through JAX; all tokens computed."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        batch = q[None], k[None], v[None]
        return jax.nn.dot_product_attention(*batch, scale=SCALE, is_causal=True, implementation="cudnn")

    return Candidate(
        "cudnn",
        work,
        lower=lambda calls: lowered_jax(attend, (work.q, work.k, work.v), calls),
        rows_of=lambda result, rows: np.asarray(result[0][rows].astype(jnp.float32)),
    )


def from_torch(work: AttentionProblem, name: str, call: Callable[..., torch_peers.Call]) -> Candidate:
    """A kernel of PyTorch; `call` creates it from the tensors q, k and v."""

    def lower(calls: int) -> Callable[[], Timed]:
        reason = torch_peers.missing()
        if reason:
            raise ImportError(reason)
        tensors = (torch_peers.tensor(x) for x in (work.q, work.k, work.v))
        return lambda: torch_peers.timed_torch(call(*tensors), calls)

    return Candidate(name, work, lower, torch_peers.rows_of, in_threads=False)


def torch_causal(work: AttentionProblem, name: str, backend: str) -> Candidate:
    """PyTorch's causal attention by a backend of SDPBackend; all tokens computed."""
    return from_torch(work, name, lambda q, k, v: torch_peers.causal(q, k, v, scale=SCALE, backend=backend))


def torch_flex(work: AttentionProblem) -> Candidate:
    """FlexAttention, compiled for the problem."""
    return from_torch(work, "torch flex", lambda q, k, v: torch_peers.flex(q, k, v, work.q_pos, scale=SCALE))


def candidates(context: int, names: Sequence[str], *, is_quick: bool) -> list[Candidate]:
    """All candidates of one context, those that compile slowly last.

    Implementations that hold all scores at once are excluded, and `xla`, slow on a GPU, is included only for small
    shares. A quick run leaves out FlexAttention, which compiles for half a minute.
    """
    works = [work(context, computed) for computed in COMPUTED if not (is_quick and computed == "30 %")]
    full = works[-1]
    return [
        *(
            ours(work, name, with_mass)
            for work in works
            for name in names
            if name not in _ALL_SCORES and (name != "xla" or work is works[0])
            for with_mass in (False, True)
        ),
        cudnn(full),
        torch_causal(full, "torch flash", "FLASH_ATTENTION"),
        torch_causal(full, "torch cudnn", "CUDNN_ATTENTION"),
        *(torch_flex(work) for work in works if not is_quick),
    ]
