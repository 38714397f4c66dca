"""Every weight of the model, declared once: shape, logical axes, initialiser and Hugging Face name.

The abstract tree, random initialisation and checkpoint loading all derive from the two tables. Knows no file format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from models.llama3.config import LlamaConfig

Layout = Literal["as_is", "linear"]
"""How Hugging Face stores the tensor: `as_is`, or `linear` = [out, in], which is `ours.reshape(in, out).T`."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One weight: our shape, the logical axis names, the standard deviation of its init (None = ones)."""

    hf_name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float | None
    layout: Layout = "linear"
    num_inputs: int = 0

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a Hugging Face checkpoint."""
        if self.layout == "as_is":
            return self.shape
        return (math.prod(self.shape) // self.num_inputs, self.num_inputs)


def _register(cls: type) -> type:
    fields = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])


@_register
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """Weights of one transformer layer."""

    attention_norm: Float[Array, "D"]
    wq: Float[Array, "D Q H"]
    wk: Float[Array, "D K H"]
    wv: Float[Array, "D K H"]
    wo: Float[Array, "Q H D"]
    mlp_norm: Float[Array, "D"]
    w_gate: Float[Array, "D F"]
    w_up: Float[Array, "D F"]
    w_down: Float[Array, "F D"]


@_register
@dataclasses.dataclass(frozen=True)
class Params:
    """All weights; `lm_head` is None where the embedding is tied."""

    embedding: Float[Array, "V D"]
    layers: tuple[LayerParams, ...]
    final_norm: Float[Array, "D"]
    lm_head: Float[Array, "D V"] | None


def layer_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Field of `LayerParams` -> spec; `{layer}` in `hf_name` is the layer number."""
    d, f, q, k, h = config.d_model, config.d_ff, config.num_heads, config.num_kv_heads, config.head_dim
    block = "model.layers.{layer}."
    into, out = d**-0.5, (2 * config.num_layers) ** -0.5
    return {
        "attention_norm": ParamSpec(block + "input_layernorm.weight", (d,), ("embed",), None, "as_is"),
        "wq": ParamSpec(
            block + "self_attn.q_proj.weight", (d, q, h), ("embed", "heads", "head_dim"), into, num_inputs=d
        ),
        "wk": ParamSpec(
            block + "self_attn.k_proj.weight", (d, k, h), ("embed", "kv_heads", "head_dim"), into, num_inputs=d
        ),
        "wv": ParamSpec(
            block + "self_attn.v_proj.weight", (d, k, h), ("embed", "kv_heads", "head_dim"), into, num_inputs=d
        ),
        "wo": ParamSpec(
            block + "self_attn.o_proj.weight",
            (q, h, d),
            ("heads", "head_dim", "embed"),
            (q * h) ** -0.5 * out,
            num_inputs=q * h,
        ),
        "mlp_norm": ParamSpec(block + "post_attention_layernorm.weight", (d,), ("embed",), None, "as_is"),
        "w_gate": ParamSpec(block + "mlp.gate_proj.weight", (d, f), ("embed", "ffn"), into, num_inputs=d),
        "w_up": ParamSpec(block + "mlp.up_proj.weight", (d, f), ("embed", "ffn"), into, num_inputs=d),
        "w_down": ParamSpec(block + "mlp.down_proj.weight", (f, d), ("ffn", "embed"), f**-0.5 * out, num_inputs=f),
    }


def top_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Field of `Params` outside the layers -> spec; `lm_head` is absent where the embedding is tied."""
    d, v = config.d_model, config.vocab_size
    table = {
        "embedding": ParamSpec("model.embed_tokens.weight", (v, d), ("vocab", "embed"), d**-0.5, "as_is"),
        "final_norm": ParamSpec("model.norm.weight", (d,), ("embed",), None, "as_is"),
    }
    if not config.tie_embeddings:
        table["lm_head"] = ParamSpec("lm_head.weight", (d, v), ("embed", "vocab"), d**-0.5, num_inputs=d)
    return table


def build_params(config: LlamaConfig, make: Callable[[str, ParamSpec], Any]) -> Params:
    """The parameter tree with each leaf made by `make(hf_name, spec)`, called once per weight in a fixed order."""
    top = {name: make(spec.hf_name, spec) for name, spec in top_table(config).items()}
    table = layer_table(config)
    layers = tuple(
        LayerParams(**{name: make(spec.hf_name.format(layer=layer), spec) for name, spec in table.items()})
        for layer in range(config.num_layers)
    )
    return Params(layers=layers, lm_head=top.pop("lm_head", None), **top)


def abstract_params(config: LlamaConfig, dtype: Any = jnp.float32) -> Params:
    """`jax.ShapeDtypeStruct` leaves: sizes and shapes without memory."""
    return build_params(config, lambda _, spec: jax.ShapeDtypeStruct(spec.shape, dtype))


def init_params(config: LlamaConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random weights: norms are ones, the rest normal with the table's standard deviation."""
    index = iter(range(len(top_table(config)) + config.num_layers * len(layer_table(config))))

    def make(_: str, spec: ParamSpec) -> Array:
        leaf_key = jax.random.fold_in(key, next(index))
        if spec.init_std is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.init_std * jax.random.normal(leaf_key, spec.shape, jnp.float32)).astype(dtype)

    return build_params(config, make)
