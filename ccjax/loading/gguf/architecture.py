"""The architecture that a GGUF file's metadata describes. Of the tensors it reads only the RoPE frequency divisors."""

from __future__ import annotations

import math

import numpy as np

from ccjax.loading.gguf.reader import GgufFile
from ccjax.models.llama3.config import LlamaConfig, RopeScaling
from ccjax.models.llama3.gguf_names import EXPERTS, OUTPUT, ROPE_FACTORS
from ccjax.models.llama3.leaves import CheckpointError

_LLAMA3_1 = (1.0, 4.0, 8192)
"""Low and high frequency factor and original length of Llama 3.1 to 3.3; the divisors alone do not determine all
three."""
_TOLERANCE = 1e-4


def config_of(file: GgufFile) -> LlamaConfig:
    """The architecture of a model.

    Raises:
      CheckpointError: a key is missing or its value is not supported; the message names file and key.
    """
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise CheckpointError(f"{file.path}: general.architecture: wanted 'llama', got {architecture!r}")
    d_model, num_heads = _count(file, "embedding_length"), _count(file, "attention.head_count")
    if d_model % num_heads and file.find("llama.attention.key_length", int) is None:
        raise CheckpointError(
            f"{file.path}: llama.attention.head_count: wanted a divisor of {d_model}, got {num_heads}"
        )
    head_dim = _count(file, "attention.key_length", d_model // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        _require(file, f"llama.{key}", _count(file, key, head_dim), head_dim)
    num_layers, num_experts = _count(file, "block_count"), file.get("llama.expert_count", int, 0)
    _check_counts(file, num_layers, num_experts)
    rope_theta = file.get("llama.rope.freq_base", float, 10000.0)
    try:
        return LlamaConfig(
            vocab_size=_vocab_size(file),
            d_model=d_model,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(file, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            d_ff=_count(file, "feed_forward_length"),
            rope_theta=rope_theta,
            rope_scaling=_rope_scaling(file, head_dim, rope_theta),
            rms_norm_eps=_plain(file.get("llama.attention.layer_norm_rms_epsilon", float)),
            tie_embeddings=OUTPUT not in file.tensors,
            max_position_embeddings=_count(file, "context_length"),
            model_type="mixtral" if num_experts else "llama",
            num_experts=num_experts,
            num_experts_per_token=file.get("llama.expert_used_count", int) if num_experts else 0,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    key = f"llama.{key}"
    value = file.get(key, int, default)
    if value < 1:
        raise CheckpointError(f"{file.path}: {key}: wanted a positive integer, got {value}")
    return value


def _check_counts(file: GgufFile, num_layers: int, num_experts: int) -> None:
    """Rejects counts of layers and experts beyond the file's tensors, so that nothing is allocated for 2^32 of them."""
    if num_layers > len(file.tensors):
        wanted = f"no more than the file's {len(file.tensors)} tensors"
        raise CheckpointError(f"{file.path}: llama.block_count: wanted {wanted}, got {num_layers}")
    stacked = file.tensors.get(EXPERTS)
    held = 0 if stacked is None else int(stacked[1].shape[-1])
    if num_experts > held:
        raise CheckpointError(f"{file.path}: llama.expert_count: wanted {held}, as in {EXPERTS}, got {num_experts}")


def _require(file: GgufFile, key: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise CheckpointError(f"{file.path}: {key}: wanted {wanted!r}, got {got!r}")


def _plain(value: float) -> float:
    """The decimal number that was rounded to float32: 1e-5 for 9.999999747378752e-06, as in a config.json."""
    return float(str(np.float32(value)))


def _vocab_size(file: GgufFile) -> int:
    size = file.find("llama.vocab_size", int)
    if size is None:
        size = len(file.find_all("tokenizer.ggml.tokens", str) or ())
    if size < 1:
        raise CheckpointError(f"{file.path}: llama.vocab_size: wanted a positive integer, or tokens, got {size}")
    return size


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    kind = file.get("llama.rope.scaling.type", str, "none")
    if kind != "none" and not (kind == "linear" and file.get("llama.rope.scaling.factor", float, 1.0) == 1):
        raise CheckpointError(
            f"{file.path}: llama.rope.scaling.type: wanted 'none' (Llama 3.1's scaling is {ROPE_FACTORS}), got {kind!r}"
        )
    _require(file, "llama.rope.scale_linear", file.get("llama.rope.scale_linear", float, 1.0), 1.0)
    if ROPE_FACTORS not in file.tensors:
        return None
    path, tensor = file.tensors[ROPE_FACTORS]
    name = f"{path}: tensor {ROPE_FACTORS!r}"
    shape = list(reversed(tensor.shape.tolist()))
    if shape != [head_dim // 2] or tensor.data.dtype != np.float32:
        raise CheckpointError(f"{name}: wanted {head_dim // 2} values of F32, got {shape} of {tensor.tensor_type.name}")
    try:
        return _scaling_of(np.asarray(tensor.data, np.float64), head_dim, theta)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _scaling_of(divisors: np.ndarray, head_dim: int, theta: float) -> RopeScaling | None:
    """The Llama 3.1 frequency scaling with these divisors; None if all are one.

    With wavelength w, smooth = (original / w - low) / (high - low): a frequency is unchanged if smooth > 1, divided by
    `factor` if smooth < 0, and multiplied by (1 - smooth) / factor + smooth in between.

    Raises:
      ValueError: no such scaling has these divisors.
    """
    if not (np.isfinite(divisors).all() and (divisors >= 1 - _TOLERANCE).all()):
        raise ValueError(f"wanted divisors of 1 and more, got {divisors.min()} to {divisors.max()}")
    factor = float(divisors.max())
    if factor <= 1 + _TOLERANCE:
        return None
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    candidates = [_LLAMA3_1]
    between = (divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE))
    if between.sum() >= 2:
        # smooth is linear in 1 / w, which determines the scaling up to a common factor; we set low = 1.
        smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(1 / waves[between], smooth, 1)
        if slope > 0 > start:
            candidates.append((1.0, round(float(1 - 1 / start), 4), round(-slope / start)))
    for low, high, original in candidates:
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=_TOLERANCE):
            return RopeScaling(factor, low, high, original)
    raise ValueError(f"wanted Llama 3.1's frequency scaling, got other divisors, up to {factor}")
