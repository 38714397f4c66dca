"""Every weight of the model, declared once: shape, logical axes, initialiser and Hugging Face name.

The abstract tree, random initialisation and checkpoint loading all derive from the two tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Float

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.quantized import WEIGHT_FORMATS, PackedWeight, QuantizedWeight, quantize

_DRAWN_AT_ONCE = 1 << 23
_KEEP_DTYPE = frozenset({"vocab", "router"})
Layout = Literal["as_is", "flat", "linear"]
"""How Hugging Face stores the tensor: `as_is`, `flat` = `ours.reshape(-1)`, or `linear` = [out, in], which is
`ours.reshape(in, out).T`."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One weight: our shape, the logical axis names, the standard deviation of its init (None = ones).

    `num_experts` tensors of a checkpoint, with `{expert}` in `hf_name`, are stacked on the first axis; 0 for a single
    tensor.
    """

    hf_name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float | None
    layout: Layout = "linear"
    num_inputs: int = 0
    num_experts: int = 0

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a Hugging Face checkpoint; for experts that of a single expert."""
        if self.layout == "as_is":
            return self.shape
        if self.layout == "flat":
            return (math.prod(self.shape),)
        return (math.prod(self.shape) // (self.num_inputs * max(self.num_experts, 1)), self.num_inputs)

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The axes that products sum over; they are adjacent and come first, or directly after the axis of experts."""
        first = int(self.axes[0] == "experts")
        behind = next(n for n in range(first, len(self.shape) + 1) if math.prod(self.shape[first:n]) == self.num_inputs)
        return tuple(range(first, behind))

    def to_hf(self, leaf: Any, expert: int = 0) -> np.ndarray:
        """The weight (or that of one expert) as Hugging Face stores it; `tensor_parts.read_part` is the inverse."""
        host = np.asarray(leaf[expert] if self.num_experts else leaf)
        return (host.reshape(self.num_inputs, -1).T if self.layout == "linear" else host).reshape(self.hf_shape)

    @property
    def scales(self) -> ParamSpec | None:
        """Spec of the scales of the weight in an 8-bit format, float32, with the logical axes of its output channels.

        None for weights that keep their dtype: norms, biases, embedding and `lm_head`, as in vLLM, and the router of
        experts.
        """
        if self.layout != "linear" or not _KEEP_DTYPE.isdisjoint(self.axes):
            return None
        kept = [axis for axis in range(len(self.shape)) if axis not in self.input_axes]
        shape, axes = tuple(self.shape[axis] for axis in kept), tuple(self.axes[axis] for axis in kept)
        return ParamSpec(self.hf_name + "_scale", shape, axes, None, "as_is")


@struct.dataclass
class LayerParams:
    """Weights of one transformer layer; those of its matrix products may be in 8 bits, and those of options that the
    model lacks are None.

    If `wk` and `wv` are None, their heads follow those of the queries in `wq`; if `w_up` is, its outputs follow those
    of `w_gate` (`ccjax.models.llama3.fused`).
    """

    attention_norm: Float[Array, "D"]
    wq: Float[Array, "D Q H"] | PackedWeight
    wk: Float[Array, "D K H"] | PackedWeight | None
    wv: Float[Array, "D K H"] | PackedWeight | None
    wo: Float[Array, "Q H D"] | PackedWeight
    mlp_norm: Float[Array, "D"]
    w_gate: Float[Array, "D F"] | PackedWeight
    w_up: Float[Array, "D F"] | PackedWeight | None
    w_down: Float[Array, "F D"] | PackedWeight
    bq: Float[Array, "Q H"] | None = struct.field(default=None, kw_only=True)
    bk: Float[Array, "K H"] | None = struct.field(default=None, kw_only=True)
    bv: Float[Array, "K H"] | None = struct.field(default=None, kw_only=True)
    bo: Float[Array, "D"] | None = struct.field(default=None, kw_only=True)
    q_norm: Float[Array, "H"] | None = struct.field(default=None, kw_only=True)
    k_norm: Float[Array, "H"] | None = struct.field(default=None, kw_only=True)


@struct.dataclass
class RoutedLayerParams(LayerParams):
    """Weights of a layer whose MLP is a mixture of experts; each token is computed by `num_chosen` of them."""

    w_gate: Float[Array, "E D F"] | QuantizedWeight
    w_up: Float[Array, "E D F"] | QuantizedWeight
    w_down: Float[Array, "E F D"] | QuantizedWeight
    router: Float[Array, "D E"]
    num_chosen: int = struct.field(pytree_node=False)


@struct.dataclass
class Params:
    """All weights; `lm_head` is None if the embedding is tied."""

    embedding: Float[Array, "V D"]
    layers: tuple[LayerParams, ...]
    final_norm: Float[Array, "D"]
    lm_head: Float[Array, "D V"] | PackedWeight | None


def layer_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Field of `LayerParams` -> spec; `{layer}` in `hf_name` is the layer number."""
    d, f, q, k, h = config.d_model, config.d_ff, config.num_heads, config.num_kv_heads, config.head_dim
    block = "model.layers.{layer}."
    into, out = d**-0.5, (2 * config.num_layers) ** -0.5
    if config.num_experts:
        mlp = _expert_table(config)
    else:
        mlp = {
            "w_gate": ParamSpec(block + "mlp.gate_proj.weight", (d, f), ("embed", "ffn"), into, num_inputs=d),
            "w_up": ParamSpec(block + "mlp.up_proj.weight", (d, f), ("embed", "ffn"), into, num_inputs=d),
            "w_down": ParamSpec(block + "mlp.down_proj.weight", (f, d), ("ffn", "embed"), f**-0.5 * out, num_inputs=f),
        }
    heads = {"q": (q, "heads"), "k": (k, "kv_heads"), "v": (k, "kv_heads")}
    options: dict[str, ParamSpec] = {}
    if config.attention_bias:
        options |= {
            f"b{n}": ParamSpec(f"{block}self_attn.{n}_proj.bias", (number, h), (axis, "head_dim"), into, "flat")
            for n, (number, axis) in heads.items()
        }
    if config.output_bias:
        options["bo"] = ParamSpec(block + "self_attn.o_proj.bias", (d,), ("embed",), into, "as_is")
    if config.qk_norm:
        options |= {
            f"{n}_norm": ParamSpec(f"{block}self_attn.{n}_norm.weight", (h,), ("head_dim",), None, "as_is")
            for n in "qk"
        }
    return {
        "attention_norm": ParamSpec(block + "input_layernorm.weight", (d,), ("embed",), None, "as_is"),
        **{
            f"w{n}": ParamSpec(
                f"{block}self_attn.{n}_proj.weight", (d, number, h), ("embed", axis, "head_dim"), into, num_inputs=d
            )
            for n, (number, axis) in heads.items()
        },
        "wo": ParamSpec(
            block + "self_attn.o_proj.weight",
            (q, h, d),
            ("heads", "head_dim", "embed"),
            (q * h) ** -0.5 * out,
            num_inputs=q * h,
        ),
        "mlp_norm": ParamSpec(block + "post_attention_layernorm.weight", (d,), ("embed",), None, "as_is"),
        **mlp,
        **options,
    }


def _expert_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """The MLP entries of `layer_table` for a mixture of experts; w1, w2 and w3 are gate, down and up."""
    d, f, e = config.d_model, config.d_ff, config.num_experts
    block = "model.layers.{layer}.block_sparse_moe."
    expert, inward, outward = block + "experts.{expert}.", ("experts", "embed", "ffn"), ("experts", "ffn", "embed")
    into, out = d**-0.5, (2 * config.num_layers * f) ** -0.5
    return {
        "w_gate": ParamSpec(expert + "w1.weight", (e, d, f), inward, into, num_inputs=d, num_experts=e),
        "w_up": ParamSpec(expert + "w3.weight", (e, d, f), inward, into, num_inputs=d, num_experts=e),
        "w_down": ParamSpec(expert + "w2.weight", (e, f, d), outward, out, num_inputs=f, num_experts=e),
        "router": ParamSpec(block + "gate.weight", (d, e), ("embed", "router"), into, num_inputs=d),
    }


def top_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Field of `Params` outside the layers -> spec; `lm_head` is absent if the embedding is tied."""
    d, v = config.d_model, config.vocab_size
    table = {
        "embedding": ParamSpec("model.embed_tokens.weight", (v, d), ("vocab", "embed"), d**-0.5, "as_is"),
        "final_norm": ParamSpec("model.norm.weight", (d,), ("embed",), None, "as_is"),
    }
    if not config.tie_embeddings:
        table["lm_head"] = ParamSpec("lm_head.weight", (d, v), ("embed", "vocab"), d**-0.5, num_inputs=d)
    return table


def build_params(config: LlamaConfig, make: Callable[[str, ParamSpec], Any]) -> Params:
    """The parameter tree with each leaf made by `make(hf_name, spec)`, called once per weight in a fixed order.

    The name of stacked experts contains the placeholder `{expert}`.
    """
    top = {name: make(spec.hf_name, spec) for name, spec in top_table(config).items()}
    table = layer_table(config)
    chosen: dict[str, Any] = {"num_chosen": config.num_experts_per_token} if config.num_experts else {}
    layer_type = RoutedLayerParams if config.num_experts else LayerParams
    layers = tuple(
        layer_type(**{n: make(s.hf_name.replace("{layer}", str(layer)), s) for n, s in table.items()}, **chosen)
        for layer in range(config.num_layers)
    )
    return Params(layers=layers, lm_head=top.pop("lm_head", None), **top)


def abstract_params(config: LlamaConfig, dtype: Any = jnp.float32, *, quantization: str | None = None) -> Params:
    """The parameter tree with `jax.ShapeDtypeStruct` leaves: shapes and dtypes without memory.

    Args:
      quantization: key of `WEIGHT_FORMATS`; None for plain weights.
    """

    def make(_: str, spec: ParamSpec) -> Any:
        if quantization is None or spec.scales is None:
            return jax.ShapeDtypeStruct(spec.shape, dtype)
        values = jax.ShapeDtypeStruct(spec.shape, WEIGHT_FORMATS[quantization].dtype)
        return QuantizedWeight(values, jax.ShapeDtypeStruct(spec.scales.shape, jnp.float32))  # pyright: ignore[reportArgumentType]

    return build_params(config, make)


def init_params(
    config: LlamaConfig,
    key: Array,
    dtype: Any = jnp.float32,
    *,
    quantization: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    sharding: Callable[[ParamSpec], jax.sharding.Sharding | None] = lambda _: None,
) -> Params:
    """Random weights: norms are ones, the rest normal with the table's standard deviation.

    Each leaf is generated in place, in `dtype`, before the next one is started; additional memory is needed only for a
    block's random bits or, with `sharding`, for those of a device's part of a leaf. The same key gives the same weights
    for every sharding, and for every `dtype` up to rounding; between kinds of devices the last bit may differ.

    Args:
      quantization: key of `WEIGHT_FORMATS`: affected weights are generated in float32 and then quantised, leaf by leaf.
      progress: called with (scalars generated, scalars of all weights) after each leaf.
      sharding: sharding of each leaf; None for the default device.
    """
    index = iter(range(len(top_table(config)) + config.num_layers * len(layer_table(config))))
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    done = 0

    def make(_: str, spec: ParamSpec) -> Any:
        nonlocal done
        leaf_key = jax.random.fold_in(key, next(index))
        std = None if spec.init_std is None else jnp.float32(spec.init_std)
        place, rows, scales = sharding(spec), _rows_drawn_at_once(spec.shape), spec.scales
        is_plain = quantization is None or scales is None
        draw = jax.jit(_draw, static_argnames=("shape", "dtype", "rows", "at_once"), out_shardings=place)
        kind = jnp.dtype(dtype if is_plain else jnp.float32)
        # With a loop over the rows of a sharded axis, every device would run all of them.
        leaf = draw(leaf_key, std, shape=spec.shape, dtype=kind, rows=rows, at_once=place is not None)
        if not is_plain:
            places = None if place is None else QuantizedWeight(place, sharding(scales))  # pyright: ignore[reportArgumentType]
            leaf = jax.jit(quantize, static_argnums=(1, 2), out_shardings=places)(leaf, spec.input_axes, quantization)
        jax.block_until_ready(leaf)
        done += math.prod(spec.shape)
        if progress is not None:
            progress(done, total)
        return leaf

    return build_params(config, make)


def _draw(key: Array, std: Array | None, *, shape: tuple[int, ...], dtype: Any, rows: int, at_once: bool) -> Array:
    """Generates a leaf in blocks of `rows`; the values do not depend on `at_once`."""
    if std is None:
        return jnp.ones(shape, dtype)

    def block(key: Array) -> Array:
        return (std * jax.random.normal(key, (rows, *shape[1:]), jnp.float32)).astype(dtype)

    if rows == shape[0]:
        return block(key)
    keys = jax.random.split(key, shape[0] // rows)
    return (jax.vmap(block)(keys) if at_once else jax.lax.map(block, keys)).reshape(shape)


def _rows_drawn_at_once(shape: tuple[int, ...]) -> int:
    """Rows per block of a leaf: random bits take 20 bytes per number while they are generated, so large leaves are
    generated in blocks."""
    most = max(1, _DRAWN_AT_ONCE // math.prod(shape[1:]))
    return max(rows for rows in range(1, min(most, shape[0]) + 1) if shape[0] % rows == 0)
