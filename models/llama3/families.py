"""What sets model families apart: names and defaults of keys in config.json, and options of the layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}
"""Keys whose effect is not implemented, and the values without effect; the first is the default."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one `model_type`; CONTRIBUTING.md adds one.

    Attributes:
      architecture: the class in transformers.
      keys: fields of `LlamaConfig` that are options of this family -> their keys in config.json. Other families have
        their defaults, or `options`.
      options: fields of `LlamaConfig` with a value that all models of the family have.
      absent: values of keys that are missing in config.json, if they differ from Llama's.
      written: keys to write into config.json in addition.
      fused: tensor of a layer -> the tensors of other families whose rows it has, one above the next.
    """

    architecture: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def check(self, raw: Mapping[str, Any]) -> None:
        """Rejects a config.json with options that are not implemented.

        Raises:
          ValueError: names the key.
        """
        for key, wanted in _UNSUPPORTED.items():
            got = raw.get(key, wanted[0])
            if got not in wanted and key not in self.keys.values():
                raise ValueError(f"config.json {key}: wanted {wanted[0]!r}, got {got!r}")


_ALL = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM",
        absent={"sliding_window": 4096},  # that of its first release
        written={"sliding_window": None},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        keys={"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"},
        absent={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        written={"sliding_window": None},
    ),
}

FAMILIES: Mapping[str, Family] = MappingProxyType(_ALL)
"""`model_type` -> family: Llama 2 / 3 / 3.1 / 3.2 / 3.3 and Yi are `llama`, Mistral-7B v0.2 and later `mistral`,
Mixtral-8x7B and -8x22B `mixtral`."""
