"""Computes, from shapes alone, the memory that serving a model takes on each device, and whether it fits.

All figures are per device. Weights and KV are exact; activations and workspace are the peak of the steps of
`ccjax.models.llama3.paged_steps`, from their shapes (docs/operations.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import ParamSpec, build_params
from ccjax.models.llama3.sharding import make_mesh, num_kv_shards, param_sharding
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.buckets import batch_bucket, token_bucket
from ccjax.runner.budgets import least_pool_bytes
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.store.spec import KVSpec

WeightBytes = Callable[[ParamSpec, int], float]
"""Bytes of a part of a weight, given its number of elements."""

_SIZES_TRIED = (1, 2, 4, 8, 16, 32)
_CONTEXT_COPIES = 3
"""Copies of one context array in the blocked attention: keys and values as gathered, and one of them as blocks."""
_ROW_COPIES = 2
"""Of the queries, beside a float32 output and the masses."""
_LAYERS_IN_FLIGHT = 2
_LOGITS_COPIES = 3
"""The logits, and two temporaries of the same size while tokens are sampled."""


def plain(dtype: str) -> WeightBytes:
    """Every weight in `dtype`."""
    return lambda spec, size: size * jnp.dtype(dtype).itemsize


def in_8_bits(dtype: str, quantization: str = "int8") -> WeightBytes:
    """Matrices of layers in 8 bits with a float32 scale per output channel, the rest in `dtype`; in int8 on CPUs
    besides a copy in 8 bits of the head, which is as large as the embedding."""
    with_head = quantization == "int8" and jax.default_backend() == "cpu"

    def num_bytes(spec: ParamSpec, size: int) -> float:
        if spec.scales is None:
            copy = size + 4 * size / spec.shape[1] if with_head and spec.axes[0] == "vocab" else 0
            return size * jnp.dtype(dtype).itemsize + copy
        return size + 4 * size / spec.num_inputs

    return num_bytes


@dataclasses.dataclass(frozen=True)
class ServedShapes:
    """What determines the memory of serving a model.

    Attributes:
      dtype: dtype of activations and KV.
      sizes: the sizes that steps are compiled for.
      weight_bytes: `plain` or `in_8_bits`.
    """

    config: LlamaConfig
    dtype: str
    sizes: BatchSizes
    weight_bytes: WeightBytes
    tensor_parallel_size: int = 1


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The use of one device's memory, in bytes.

    Attributes:
      total: the memory of the device.
      source: the origin of that figure, in words.
      fraction: share of the memory that may be used.
      weights: exact.
      activations: hidden states of a layer's computed tokens; cosines and sines of the positions.
      workspace: temporaries of a layer's attention or of its MLP, whichever is more.
      transit: KV of layers loaded ahead of a prefill, and of computed tokens until they are stored as variants.
      logits: logits of a decode step, while tokens are sampled.
      kv_per_token: KV of a token in all layers.
      least_pool: smallest permitted pool: the pages of the longest request.
      pool: the page pool.
    """

    shapes: ServedShapes
    total: int
    source: str
    fraction: float
    weights: int
    activations: int
    workspace: int
    transit: int
    logits: int
    kv_per_token: int
    least_pool: int
    pool: int

    @property
    def besides_pool(self) -> int:
        """Everything except the pool."""
        return self.weights + self.activations + self.workspace + self.transit + self.logits

    @property
    def usable(self) -> int:
        """Memory that may be used."""
        return int(self.total * self.fraction)

    @property
    def missing(self) -> int:
        """Bytes that are missing; 0 if it fits."""
        return max(0, self.besides_pool + self.pool - self.usable)

    @property
    def num_pool_tokens(self) -> int:
        """Number of tokens that fit into the pool."""
        return self.pool // (self.kv_per_token * PAGE_TOKENS) * PAGE_TOKENS

    def rows(self) -> list[tuple[str, int, str]]:
        """(item, bytes, explanation), for a table."""
        sizes, shapes = self.shapes.sizes, self.shapes
        split = "" if shapes.tensor_parallel_size == 1 else f", split over {shapes.tensor_parallel_size} devices"
        return [
            ("weights", self.weights, f"{_count(num_parameters(shapes.config))} parameters{split}"),
            ("activations", self.activations, f"{_rows(sizes):,} tokens in a layer"),
            ("workspace", self.workspace, f"of the attention over {sizes.context_tokens:,} tokens, or of the MLP"),
            ("KV in transit", self.transit, f"{_LAYERS_IN_FLIGHT} layers ahead; computed, until it is stored"),
            ("logits", self.logits, f"{batch_bucket(sizes.max_num_seqs)} x {shapes.config.vocab_size:,}"),
            ("KV pool", self.pool, f"{self.num_pool_tokens:,} tokens of {self.kv_per_token:,} bytes"),
            ("left", self.total - self.besides_pool - self.pool, f"of {_gb(self.total)}: {self.source}"),
        ]


def plan_memory(
    shapes: ServedShapes, total: int, *, source: str, fraction: float = 1.0, pool: int | None = None
) -> MemoryPlan:
    """Plans the memory of one device; `check_fits` tells whether the plan fits.

    Args:
      pool: bytes of the pool on this device; None for all that the rest leaves of `fraction`, but at least the minimum.

    Raises:
      ConfigError: the model cannot be split this way.
    """
    config, sizes = shapes.config, shapes.sizes
    item = jnp.dtype(shapes.dtype).itemsize
    num_shards = kv_shards(shapes)
    kv_heads, heads = config.num_kv_heads // num_shards, config.num_heads // shapes.tensor_parallel_size
    kv_spec = KVSpec(config.num_layers, kv_heads, config.head_dim, shapes.dtype)
    row = kv_spec.num_bytes(1) // config.num_layers
    rows, slots, masses = _rows(sizes), sizes.context_tokens, sizes.num_segments
    attention = (_CONTEXT_COPIES * config.head_dim + masses) * slots * kv_heads * item
    attention += rows * heads * (_ROW_COPIES * config.head_dim * item + 4 * (config.head_dim + masses))
    vocab = config.vocab_size // (
        shapes.tensor_parallel_size if config.vocab_size % shapes.tensor_parallel_size == 0 else 1
    )
    plan = MemoryPlan(
        shapes=shapes,
        total=total,
        source=source,
        fraction=fraction,
        weights=weight_bytes(shapes),
        activations=rows * 2 * config.d_model * item + 4 * config.head_dim * (rows + slots),
        workspace=max(attention, _mlp_bytes(config, rows, config.d_ff // shapes.tensor_parallel_size, item)),
        transit=_LAYERS_IN_FLIGHT * slots * row + slots * config.num_layers * (row + 4 * (masses + 1)),
        logits=_LOGITS_COPIES * batch_bucket(sizes.max_num_seqs) * vocab * 4,
        kv_per_token=kv_spec.num_bytes(1),
        least_pool=least_pool_bytes(kv_spec, sizes.max_model_len),
        pool=0,
    )
    left = plan.usable - plan.besides_pool
    return dataclasses.replace(plan, pool=max(plan.least_pool, left) if pool is None else pool)


def check_fits(plan: MemoryPlan) -> None:
    """Checks that the plan fits into the usable memory.

    Raises:
      ConfigError: it does not fit; says how much is missing, and what would fit.
    """
    if not plan.missing:
        return
    *parts, _ = plan.rows()
    raise ConfigError(
        f"model: wanted {_gb(plan.besides_pool + plan.pool)} of each device "
        f"({', '.join(f'{name} {_gb(size)}' for name, size, _ in parts)}), got {_gb(plan.usable)} "
        f"({_gb(plan.total)}: {plan.source}), {_gb(plan.missing)} too few; {_what_fits(plan)}"
    )


def kv_shards(shapes: ServedShapes) -> int:
    """Number of devices that the kv heads are split over.

    Raises:
      ConfigError: the model cannot be split this way.
    """
    return num_kv_shards(_mesh(shapes))


def weight_bytes(shapes: ServedShapes) -> int:
    """Bytes of the weights on one device.

    Raises:
      ConfigError: the model cannot be split this way.
    """
    mesh = _mesh(shapes)
    sizes: list[float] = []

    def note(_: str, spec: ParamSpec) -> None:
        part = math.prod(param_sharding(mesh, spec).shard_shape(spec.shape))
        sizes.append(shapes.weight_bytes(spec, part))

    build_params(shapes.config, note)
    return math.ceil(sum(sizes))


@functools.cache
def num_parameters(config: LlamaConfig) -> int:
    """Number of parameters of the model."""
    sizes: list[int] = []
    build_params(config, lambda _, spec: sizes.append(math.prod(spec.shape)))
    return sum(sizes)


def _mesh(shapes: ServedShapes) -> AbstractMesh:
    """A mesh of devices that need not exist."""
    try:
        mesh = make_mesh(shapes.config, range(shapes.tensor_parallel_size))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names)


def _rows(sizes: BatchSizes) -> int:
    """Rows of a full pack."""
    return token_bucket(min(sizes.max_num_batched_tokens, sizes.context_tokens))


def _mlp_bytes(config: LlamaConfig, rows: int, inner: int, item: int) -> int:
    """Temporaries of an MLP: two inner arrays; with experts (`ccjax.models.llama3.experts`) also their input and output
    rows or, if an expert gets more rows than its capacity, copies of its weights."""
    if not config.num_experts:
        return 2 * rows * inner * item
    pairs = rows * config.num_experts_per_token
    capacity = min(rows, 2 << (-(-pairs // config.num_experts) - 1).bit_length())
    batched = config.num_experts * capacity * (2 * inner + 2 * config.d_model)
    blocks = 2 * (pairs + config.num_experts * capacity // 2) * config.d_model + 3 * config.d_model * inner
    return max(batched, blocks) * item


def _what_fits(plan: MemoryPlan) -> str:
    """Describes other ways to serve the same model on such devices."""
    found: dict[int, str] = {}
    for name, kind in (("", plan.shapes.weight_bytes), (" with quantization int8", in_8_bits(plan.shapes.dtype))):
        for size in (size for size in _SIZES_TRIED if size >= plan.shapes.tensor_parallel_size):
            other = dataclasses.replace(plan.shapes, tensor_parallel_size=size, weight_bytes=kind)
            try:
                tried = plan_memory(other, plan.total, source=plan.source, fraction=plan.fraction)
            except ConfigError:
                continue
            if not tried.missing:
                found.setdefault(size, f"tensor_parallel_size {size}{name}")
                break
    return f"what fits: {', '.join(found.values())}" if found else "it does not fit on any number of such devices"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
