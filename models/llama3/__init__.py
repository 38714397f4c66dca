"""Functional Llama: configuration, parameters, and the jitted per-layer steps that the engine drives."""

from ccjax.models.llama3.config import (
    LLAMA2_7B,
    LLAMA3_2_1B,
    LLAMA3_8B,
    LLAMA3_70B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    LlamaConfig,
    RopeScaling,
)
from ccjax.models.llama3.forward import forward
from ccjax.models.llama3.params import LayerParams, Params, RoutedLayerParams, abstract_params, init_params

__all__ = [
    "LLAMA2_7B",
    "LLAMA3_2_1B",
    "LLAMA3_70B",
    "LLAMA3_8B",
    "MIXTRAL_8X7B",
    "LayerParams",
    "MISTRAL_7B",
    "LlamaConfig",
    "Params",
    "RopeScaling",
    "RoutedLayerParams",
    "abstract_params",
    "forward",
    "init_params",
]
