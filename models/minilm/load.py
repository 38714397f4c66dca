"""Reads a BERT encoder's weights from a safetensors file with Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from safetensors import SafetensorError, safe_open

from ccjax.models.minilm.config import BertConfig
from ccjax.models.minilm.model import EncoderParams, Layers, Linear, Norm


def load_params(path: Path, config: BertConfig) -> EncoderParams:
    """The weights in `path` as float32.

    Raises:
      ValueError: the file is missing or not safetensors, or a tensor is missing or its shape does not match `config`.
    """
    try:
        with safe_open(path, framework="flax") as tensors:
            names = set(tensors.keys())

            def read(name: str, *shape: int) -> Array:
                if name not in names:
                    raise ValueError(f"{path}: the tensor {name!r} is missing")
                value = tensors.get_tensor(name)
                if value.shape != shape:
                    raise ValueError(f"{path}: wanted {name!r} of shape {shape}, got {value.shape}")
                return value.astype(jnp.float32)

            return _assemble(read, config)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: wanted a readable safetensors file, got: {error}") from None


def _assemble(read: Callable[..., Array], config: BertConfig) -> EncoderParams:
    d_model, d_ff = config.d_model, config.d_ff

    def linear(name: str, inputs: int, outputs: int) -> Linear:
        # Hugging Face stores [out, in].
        return Linear(read(f"{name}.weight", outputs, inputs).T, read(f"{name}.bias", outputs))

    def norm(name: str) -> Norm:
        return Norm(read(f"{name}.weight", d_model), read(f"{name}.bias", d_model))

    def layer(index: int) -> Layers:
        at = f"encoder.layer.{index}"
        return Layers(
            query=linear(f"{at}.attention.self.query", d_model, d_model),
            key=linear(f"{at}.attention.self.key", d_model, d_model),
            value=linear(f"{at}.attention.self.value", d_model, d_model),
            attention_out=linear(f"{at}.attention.output.dense", d_model, d_model),
            attention_norm=norm(f"{at}.attention.output.LayerNorm"),
            ff_in=linear(f"{at}.intermediate.dense", d_model, d_ff),
            ff_out=linear(f"{at}.output.dense", d_ff, d_model),
            ff_norm=norm(f"{at}.output.LayerNorm"),
        )

    positions_name, segments_name = "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"
    return EncoderParams(
        tokens=read("embeddings.word_embeddings.weight", config.vocab_size, d_model),
        positions=read(positions_name, config.num_positions, d_model)[: config.max_seq_length],
        segment=read(segments_name, config.num_segments, d_model)[0],
        norm=norm("embeddings.LayerNorm"),
        layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(layer, range(config.num_layers))),
    )
