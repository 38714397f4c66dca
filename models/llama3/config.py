"""Shapes and constants of a Llama-family model, read from and written to Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from ccjax.models.llama3.families import FAMILIES

_NOT_IN_KV = ("model_type", "max_position_embeddings")
"""Fields without effect on KV and answers: of a family only its options have one."""
_OPTIONS = ("num_experts", "attention_bias", "output_bias", "qk_norm")
"""Fields that only some families have, as `Family.keys` or `Family.options` say."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Static, hashable description of the architecture; letters as in the axis table of docs/architecture.md."""

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
    num_experts: int = 0
    num_experts_per_token: int = 0
    attention_bias: bool = False
    """Queries, keys and values are projected with a bias."""
    output_bias: bool = False
    """The output of attention is projected with a bias."""
    qk_norm: bool = False
    """Queries and keys are normed in each head, before RoPE; keys are stored normed."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: wanted a positive integer, got {getattr(self, field)}")
        for field in ("rope_theta", "rms_norm_eps"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field}: wanted a positive number, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: wanted a divisor of num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: wanted an even number (RoPE rotates halves), got {self.head_dim}")
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type: wanted one of {sorted(FAMILIES)}, got {self.model_type!r}")
        family = FAMILIES[self.model_type]
        if self.num_experts < 1 and "num_experts" in family.keys:
            raise ValueError(f"num_experts: wanted a positive integer for {self.model_type}, got {self.num_experts}")
        for field in _OPTIONS:
            wanted = family.options.get(field, getattr(LlamaConfig, field))
            if field not in family.keys and getattr(self, field) != wanted:
                raise ValueError(f"{field}: wanted {wanted} for {self.model_type}, got {getattr(self, field)}")
        if not min(1, self.num_experts) <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_token: wanted 1 to num_experts={self.num_experts}, got {self.num_experts_per_token}"
            )

    @property
    def kv_identity(self) -> str:
        """Canonical JSON of the values that change the model's KV or answers, without those that are a default.

        Part of the fingerprints of stored KV: a new option with a default leaves them as they are, a changed default or
        name does not. All fields count but those that are named here.
        """
        values = _without_defaults(self)
        for name in _NOT_IN_KV:
            values.pop(name, None)
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """The configuration of a Hugging Face `config.json`, in the layout of transformers 4 or 5.

        Raises:
          ValueError: the architecture or one of its options is not supported; the message names the key.
        """
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ValueError(f"config.json model_type: wanted one of {sorted(FAMILIES)}, got {model_type!r}")
        family = FAMILIES[model_type]
        raw = {**family.absent, **raw}
        family.check(raw)
        try:
            num_heads = int(raw["num_attention_heads"])
            d_model = int(raw["hidden_size"])
            theta, scaling = _rope_from_hf(raw)
            given = [(name, key, getattr(cls, name)) for name, key in family.keys.items()]
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
                **family.options,
                **{name: type(default)(raw.get(key, default)) for name, key, default in given},
            )
        except KeyError as error:
            raise ValueError(f"config.json: key {error.args[0]!r} is missing") from error
        except (TypeError, AttributeError, OverflowError, ZeroDivisionError) as error:
            raise ValueError(f"config.json: a value has the wrong type or is out of range: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The configuration as a `config.json` that transformers 4 and 5 can read."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        family = FAMILIES[self.model_type]
        return {
            **family.written,
            **{key: getattr(self, field) for field, key in family.keys.items()},
            "architectures": [family.architecture],
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


def _without_defaults(value: Any) -> Any:
    """Fields of a dataclass, and of dataclasses in it, whose values differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        return value
    given = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: _without_defaults(found) for field, found in given if found != field.default}


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
MISTRAL_7B = LlamaConfig(
    32768, 4096, 32, 32, 8, 128, 14336, 1000000.0, max_position_embeddings=32768, model_type="mistral"
)
MIXTRAL_8X7B = LlamaConfig(
    *(32000, 4096, 32, 32, 8, 128, 14336, 1e6),
    max_position_embeddings=32768,
    model_type="mixtral",
    num_experts=8,
    num_experts_per_token=2,
)
