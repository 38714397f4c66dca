"""Shapes and constants of a Llama-family model, read from and written to Hugging Face's config.json.

Knows no weights, no tokenizer and no serving limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""Supported `model_type`s: Llama 2 / 3 / 3.1 / 3.2 / 3.3 and Yi are `llama`, Mistral-7B v0.2 and later `mistral`."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: low frequencies are divided by `factor`, a band between is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Static, hashable description of the architecture; letters as in the README's axis table."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position_embeddings: int = 8192
    model_type: str = "llama"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: wanted a positive integer, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: wanted a divisor of num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: wanted an even number (RoPE rotates halves), got {self.head_dim}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """The configuration in a Hugging Face `config.json`, in the layout of transformers 4 or 5.

        Raises:
          ValueError: the architecture, or an option of it, is not supported; the message names the key.
        """
        model_type = raw.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"config.json model_type: wanted one of {sorted(ARCHITECTURES)}, got {model_type!r}")
        wanted_values: dict[str, tuple[Any, ...]] = {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "sliding_window": (None,),
            "quantization_config": (None,),
            "partial_rotary_factor": (1.0, None),
        }
        # Where the key is absent, transformers gives Mistral a window of 4096, as its first release had.
        absent = {"sliding_window": 4096} if model_type == "mistral" else {}
        for key, wanted in wanted_values.items():
            got = raw.get(key, absent.get(key, wanted[0]))
            if got not in wanted:
                raise ValueError(f"config.json {key}: wanted {wanted[0]!r}, got {got!r}")
        try:
            num_heads = int(raw["num_attention_heads"])
            d_model = int(raw["hidden_size"])
            theta, scaling = _rope_from_hf(raw)
            return cls(
                vocab_size=int(raw["vocab_size"]),
                d_model=d_model,
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or d_model // num_heads),
                d_ff=int(raw["intermediate_size"]),
                rope_theta=theta,
                rope_scaling=scaling,
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
                max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
                model_type=model_type,
            )
        except KeyError as error:
            raise ValueError(f"config.json: key {error.args[0]!r} is missing") from error
        except TypeError as error:
            raise ValueError(f"config.json: a value has the wrong type: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The same configuration as a `config.json` that transformers 4 and 5 both read."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        window: dict[str, Any] = {"sliding_window": None} if self.model_type == "mistral" else {}
        return window | {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else rope,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
        }


def _rope_from_hf(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling; transformers 4 keeps them in two keys, transformers 5 in `rope_parameters`."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json rope_scaling.rope_type: wanted 'default' or 'llama3', got {kind!r}")
    return theta, RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )


_LLAMA3_1_ROPE = RopeScaling(8.0, 1.0, 4.0, 8192)
LLAMA2_7B = LlamaConfig(32000, 4096, 32, 32, 32, 128, 11008, max_position_embeddings=4096)
LLAMA3_8B = LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336, 500000.0, _LLAMA3_1_ROPE, max_position_embeddings=131072)
LLAMA3_70B = LlamaConfig(128256, 8192, 80, 64, 8, 128, 28672, 500000.0, _LLAMA3_1_ROPE, max_position_embeddings=131072)
LLAMA3_2_1B = LlamaConfig(
    128256, 2048, 16, 32, 8, 64, 8192, 500000.0, RopeScaling(32.0, 1.0, 4.0, 8192), 1e-5, True, 131072
)
