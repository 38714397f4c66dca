"""Seconds of prefills, decode steps and loads, from a roofline over public figures or from a measured grid."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ccjax.models.llama3.config import LlamaConfig
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.store.usage import DEVICE, DISK, HOST
from scripts.simulation.hardware import Hardware


class SimulatedPiece(NamedTuple):
    """Part of a pack.

    Attributes:
      new: computed tokens of one request.
      seen: number of context tokens that the last of them sees, including itself.
      is_last: the request's next token is sampled after them, which needs the output head.
    """

    new: int
    seen: int
    is_last: bool = True


_VALUE_BYTES = 2
"""Of a weight, activation or KV value, in bfloat16."""
_MEMO = 1 << 18
"""Number of memoised prefill times: eviction asks for the same ones over and over."""


class CostModel(abc.ABC):
    """Seconds of virtual time as a function of sizes; stateless."""

    @abc.abstractmethod
    def pack_s(self, pieces: Sequence[SimulatedPiece]) -> float:
        """One pack through all layers, without loads."""

    @abc.abstractmethod
    def decode_s(self, num_seqs: int, context_tokens: int) -> float:
        """One decode step of this many sequences with this many context tokens in all."""

    @abc.abstractmethod
    def link_s(self, tier: str, num_bytes: int) -> float:
        """KV bytes from "host" memory to the device, or from "disk" to host memory, without contention."""

    @functools.cached_property
    def _one_prefill_s(self) -> Callable[[int, int], float]:
        return functools.lru_cache(_MEMO)(lambda cached, new: self.pack_s([SimulatedPiece(new, cached + new)]))

    def compute_s(self, num_tokens: int, cached_tokens: int, new_tokens: int) -> float:
        """`ccjax.cache.placement.Costs`: a chunk's part of a prefill (RAGCache eq. 4)."""
        return num_tokens * self._one_prefill_s(cached_tokens, new_tokens) / new_tokens

    def load_s(self, tier: str, num_bytes: int) -> float:
        """`ccjax.cache.placement.Costs`: time to load from a tier until the KV is on the device; from disk through host
        memory."""
        if tier == DEVICE:
            return 0.0
        return self.link_s(HOST, num_bytes) + (self.link_s(DISK, num_bytes) if tier == DISK else 0.0)


@dataclasses.dataclass(frozen=True)
class RooflineCosts(CostModel):
    """A step takes the larger of its compute time and its memory time, plus a fixed time per layer.

    Compute: 2 FLOPs per token for each weight of a layer (only its own experts'), 4 for each pair of query and key
    value; the output head for one token per request. Memory: all weights once per step (only experts with a token), and
    the KV read. A split model has two all-reduces per layer, rings of `2 (n-1)/n` of the activations. Padding and
    ccjax's attention masses are part of `Hardware.compute_ratio`.

    Attributes:
      tensor_parallel_size: devices that the model is split over; rates and host links add up.
    """

    config: LlamaConfig
    hardware: Hardware
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel_size > 1 and not self.hardware.link_bytes_per_s:
            raise ValueError(
                f"tensor_parallel_size: wanted 1, {self.hardware.name} has no link between devices, got "
                f"{self.tensor_parallel_size}"
            )

    @functools.cached_property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, on all devices."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * _VALUE_BYTES

    @functools.cached_property
    def weight_bytes(self) -> int:
        """All weights, on all devices."""
        c = self.config
        per_layer = self._attention_weights + max(1, c.num_experts) * self._mlp_weights
        vocab = (1 if c.tie_embeddings else 2) * c.vocab_size * c.d_model
        return (c.num_layers * per_layer + vocab) * _VALUE_BYTES

    @functools.cached_property
    def _attention_weights(self) -> int:
        c = self.config
        return 2 * c.d_model * c.head_dim * (c.num_heads + c.num_kv_heads)

    @functools.cached_property
    def _mlp_weights(self) -> int:
        return 3 * self.config.d_model * self.config.d_ff

    @functools.cached_property
    def _token_flops(self) -> int:
        c = self.config
        return 2 * c.num_layers * (self._attention_weights + max(1, c.num_experts_per_token) * self._mlp_weights)

    @functools.cached_property
    def _pair_flops(self) -> int:
        c = self.config
        return 4 * c.num_layers * c.num_heads * c.head_dim

    @functools.cached_property
    def _head_weights(self) -> int:
        return self.config.vocab_size * self.config.d_model

    @functools.cached_property
    def _flops_per_s(self) -> float:
        return self.hardware.flops_per_s * self.hardware.compute_ratio * self.tensor_parallel_size

    @functools.cached_property
    def _bytes_per_s(self) -> float:
        return self.hardware.memory_bytes_per_s * self.hardware.memory_ratio * self.tensor_parallel_size

    def _step_s(self, num_tokens: int, num_pairs: float, num_heads: int, context_tokens: int) -> float:
        c, hardware, size = self.config, self.hardware, self.tensor_parallel_size
        flops = num_tokens * self._token_flops + num_pairs * self._pair_flops + 2 * num_heads * self._head_weights
        experts = min(c.num_experts, num_tokens * c.num_experts_per_token) if c.num_experts else 1
        head_weights = self._head_weights if num_heads else 0
        weights = c.num_layers * (self._attention_weights + experts * self._mlp_weights) + head_weights
        moved = weights * _VALUE_BYTES + context_tokens * self.kv_bytes_per_token
        seconds = max(flops / self._flops_per_s, moved / self._bytes_per_s) + c.num_layers * hardware.layer_s
        if size > 1:
            ring = 2 * (size - 1) / size * num_tokens * c.d_model * _VALUE_BYTES
            seconds += 2 * c.num_layers * ring / hardware.link_bytes_per_s
        return seconds

    def pack_s(self, pieces: Sequence[SimulatedPiece]) -> float:
        """See `CostModel`. Computed tokens are assumed to be at the end of their context. Tokens recomputed by
        CacheCraft are spread over it and see less: their attention is overestimated, by a tenth of all FLOPs of an 8B
        model behind 5,000 tokens."""
        num_tokens = context = num_heads = 0
        pairs = 0.0
        for new, seen, is_last in pieces:
            num_tokens += new
            context += seen
            num_heads += is_last
            pairs += new * (seen - (new - 1) / 2)
        return self._step_s(num_tokens, pairs, num_heads, context)

    def decode_s(self, num_seqs: int, context_tokens: int) -> float:
        """See `CostModel`."""
        return self._step_s(num_seqs, context_tokens, num_seqs, context_tokens)

    def link_s(self, tier: str, num_bytes: int) -> float:
        """See `CostModel`; each device of a split model has a host link of its own, the disk is shared."""
        if tier == DISK:
            return num_bytes / self.hardware.disk_bytes_per_s
        return num_bytes / (self.hardware.host_bytes_per_s * self.tensor_parallel_size)


@dataclasses.dataclass(frozen=True)
class GridCosts(CostModel):
    """T(cached, new) as measured by `scripts/profile_prefill.py`, decode steps and links as given.

    A pack takes the sum of its pieces' times, with the constant part of a prefill counted once. The grid was measured
    with its cached tokens in the fastest tier that accepted them, so it includes moving them from host memory, and
    `link_s` of "host" is 0.

    Attributes:
      decode_fixed_s, decode_seq_s, decode_token_s: a decode step, each sequence in it, each token of their contexts.
      disk_bytes_per_s: from disk to host memory.
    """

    grid: PrefillGrid
    decode_fixed_s: float
    decode_seq_s: float = 0.0
    decode_token_s: float = 0.0
    disk_bytes_per_s: float = 1e9

    @functools.cached_property
    def fixed_s(self) -> float:
        """Constant part of the grid's shortest prefills: their linear fit at zero new tokens."""
        (first, second), row = self.grid.new[:2], self.grid.seconds[0]
        return max(0.0, row[0] - first * (row[1] - row[0]) / (second - first))

    def pack_s(self, pieces: Sequence[SimulatedPiece]) -> float:
        """See `CostModel`."""
        prefills = sum(max(self.fixed_s, self.grid.prefill_s(max(0, seen - new), new)) for new, seen, _ in pieces)
        return prefills - max(0, len(pieces) - 1) * self.fixed_s

    def decode_s(self, num_seqs: int, context_tokens: int) -> float:
        """See `CostModel`."""
        return self.decode_fixed_s + num_seqs * self.decode_seq_s + context_tokens * self.decode_token_s

    def link_s(self, tier: str, num_bytes: int) -> float:
        """See `CostModel`."""
        return num_bytes / self.disk_bytes_per_s if tier == DISK else 0.0


def overlapped_s(compute_s: float, load_s: float, num_layers: int) -> float:
    """Seconds of a pack whose KV is loaded layer by layer while layers run (CacheCraft sec. 3.4.2): the slower of the
    two, plus one layer of the other, which nothing hides."""
    if not load_s:
        return compute_s
    return max(compute_s + load_s / num_layers, load_s + compute_s / num_layers)
