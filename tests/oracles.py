"""Llama in plain NumPy, float64, after the papers and Meta's published code. Imports nothing of the product.

Rotation is complex multiplication and attention is one loop over heads, on purpose unlike the code under test.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class OracleLayer:
    """What one layer computed: keys before RoPE [T, K, H], values [T, K, H], attention weights [Q, T, T]."""

    key: np.ndarray
    value: np.ndarray
    attention: np.ndarray


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`x` [T, A, H] with each pair (x[i], x[i + H/2]) turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.multiply.outer(positions, frequencies))[:, None, :]
    return np.concatenate([turned.real, turned.imag], -1)


def rope_frequencies(config: Mapping[str, Any]) -> np.ndarray:
    """Radians per position [H / 2], float64, with Llama 3.1's scaling as the three branches of Meta's code."""
    head_dim = head_size(config)
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta", 10000.0)
    frequencies = []
    for i in range(head_dim // 2):
        frequency = 1.0 / theta ** (2 * i / head_dim)
        if parameters.get("rope_type", "default") == "llama3":
            original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
            low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
            wavelength = 2 * math.pi / frequency
            if wavelength > original / low:
                frequency /= factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def llama_forward(
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    positions: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, list[OracleLayer]]:
    """Logits [T, V] and what each layer computed, of one sequence.

    Args:
      weights: Hugging Face names and shapes; `lm_head.weight` is absent where the embedding is tied.
      config: a Hugging Face config.json.
      positions: absolute positions, 0 .. T-1 where None; a token sees those at its own position or before.
    """
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, eps = head_size(config), config["rms_norm_eps"]
    at = np.arange(len(token_ids)) if positions is None else np.asarray(positions)
    frequencies = rope_frequencies(config)
    visible = at[None, :] <= at[:, None]

    def weight(name: str) -> np.ndarray:
        return np.asarray(weights[name]).astype(dtype)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight(name)

    x = weight("model.embed_tokens.weight")[np.asarray(token_ids)]
    layers = []
    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}."
        normed = norm(x, block + "input_layernorm.weight")
        query, key, value = (
            (normed @ weight(f"{block}self_attn.{name}_proj.weight").T).reshape(len(at), -1, head_dim) for name in "qkv"
        )
        turned_query = rotate(query, at, frequencies).astype(dtype)
        turned_key = rotate(key, at, frequencies).astype(dtype)
        attention = np.zeros((num_heads, len(at), len(at)), dtype)
        attended = np.zeros((len(at), num_heads, head_dim), dtype)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv)
            scores = turned_query[:, head] @ turned_key[:, kv_head].T / math.sqrt(head_dim)
            scores = np.where(visible, scores, -np.inf)
            exponentials = np.exp(scores - scores.max(-1, keepdims=True))
            attention[head] = exponentials / exponentials.sum(-1, keepdims=True)
            attended[:, head] = attention[head] @ value[:, kv_head]
        x = x + attended.reshape(len(at), -1) @ weight(block + "self_attn.o_proj.weight").T
        normed = norm(x, block + "post_attention_layernorm.weight")
        if config["model_type"] == "mixtral":
            x = x + mixture(normed, weight, block + "block_sparse_moe.", config["num_experts_per_tok"])
        else:
            x = x + gated(normed, *(weight(f"{block}mlp.{name}_proj.weight") for name in ("gate", "up", "down")))
        layers.append(OracleLayer(key, value, attention))
    head_name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    return norm(x, "model.norm.weight") @ weight(head_name).T, layers


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """The gated MLP of rows `x`."""
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def mixture(x: np.ndarray, weight: Callable[[str], np.ndarray], block: str, num_chosen: int) -> np.ndarray:
    """Mixtral's MLP, token by token: sum of softmax(top-k(x W_g))_i SwiGLU_i(x) (Jiang et al. 2024, sec. 2.1)."""
    router = weight(block + "gate.weight")
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = router @ row
        chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[:num_chosen]
        shares = np.exp(logits[chosen] - logits[chosen].max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            parts = (weight(f"{block}experts.{expert}.{name}.weight") for name in ("w1", "w3", "w2"))
            out[token] += share * gated(row, *parts)
    return out


def random_llama(seed: int, **changes: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights (float32, Hugging Face names) and config.json of a small model; `changes` go over the config.

    Norm weights are random too, and deviations such that logits are of order one: no error hides in small numbers.
    """
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 112,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        **changes,
    }
    random = np.random.default_rng(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, k = (config[f"num_{name}_heads"] * head_size(config) for name in ("attention", "key_value"))

    def linear(out: int, into: int) -> np.ndarray:
        return (random.standard_normal((out, into)) / math.sqrt(into)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.3 * random.standard_normal(d)).astype(np.float32)

    weights = {"model.embed_tokens.weight": linear(v, d), "model.norm.weight": norm()}
    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}."
        weights |= {block + f"{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        shapes = {"q": (q, d), "k": (k, d), "v": (k, d), "o": (d, q)}
        weights |= {block + f"self_attn.{name}_proj.weight": linear(*shape) for name, shape in shapes.items()}
        if config["model_type"] == "mixtral":
            block += "block_sparse_moe."
            weights[block + "gate.weight"] = linear(config["num_local_experts"], d)
            for expert in range(config["num_local_experts"]):
                shapes = {"w1": (f, d), "w2": (d, f), "w3": (f, d)}
                weights |= {f"{block}experts.{expert}.{name}.weight": linear(*shape) for name, shape in shapes.items()}
            continue
        shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        weights |= {block + f"mlp.{name}_proj.weight": linear(*shape) for name, shape in shapes.items()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(v, d)
    return weights, config


def read_llama2c(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights and config, in Hugging Face's names, of a llama2.c version 0 checkpoint (karpathy/llama2.c, export.py).

    llama2.c rotates neighbours (x[2i], x[2i+1]); rows of q and k are reordered to the half-split layout.
    """
    raw = path.read_bytes()
    d, f, num_layers, q, k, vocab, context = struct.unpack_from("<7i", raw)
    values, offset = np.frombuffer(raw, "<f4", offset=28), 0
    h = d // q

    def take(*shape: int) -> np.ndarray:
        nonlocal offset
        size = math.prod(shape)
        offset += size
        return values[offset - size : offset].reshape(shape)

    def half_split(w: np.ndarray, heads: int) -> np.ndarray:
        return w.reshape(heads, h // 2, 2, d).transpose(0, 2, 1, 3).reshape(heads * h, d)

    weights = {"model.embed_tokens.weight": take(abs(vocab), d)}
    stacks = {
        "input_layernorm": take(num_layers, d),
        "self_attn.q_proj": take(num_layers, d, d),
        "self_attn.k_proj": take(num_layers, k * h, d),
        "self_attn.v_proj": take(num_layers, k * h, d),
        "self_attn.o_proj": take(num_layers, d, d),
        "post_attention_layernorm": take(num_layers, d),
        "mlp.gate_proj": take(num_layers, f, d),
        "mlp.down_proj": take(num_layers, d, f),
        "mlp.up_proj": take(num_layers, f, d),
    }
    weights["model.norm.weight"] = take(d)
    take(2, context, h // 2)  # cosines and sines
    if vocab < 0:
        weights["lm_head.weight"] = take(-vocab, d)
    for name, stack in stacks.items():
        heads = {"self_attn.q_proj": q, "self_attn.k_proj": k}.get(name)
        for number in range(num_layers):
            w = stack[number] if heads is None else half_split(stack[number], heads)
            weights[f"model.layers.{number}.{name}.weight"] = w
    assert offset == len(values), f"{path}: read {offset} floats of {len(values)}"
    return weights, {
        "model_type": "llama",
        "vocab_size": abs(vocab),
        "hidden_size": d,
        "num_hidden_layers": num_layers,
        "num_attention_heads": q,
        "num_key_value_heads": k,
        "intermediate_size": f,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": vocab > 0,
        "max_position_embeddings": context,
    }


def read_llama2c_pieces(path: Path, vocab_size: int) -> list[bytes]:
    """The text of each token of a llama2.c tokenizer file."""
    raw, offset, pieces = path.read_bytes(), 4, []
    for _ in range(vocab_size):
        _, length = struct.unpack_from("<fi", raw, offset)
        pieces.append(raw[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return pieces
