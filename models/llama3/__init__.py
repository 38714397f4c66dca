"""Functional Llama: configuration, parameters, and the jitted per-layer steps that the engine drives."""

from models.llama3.config import LLAMA2_7B, LLAMA3_2_1B, LLAMA3_8B, LLAMA3_70B, LlamaConfig, RopeScaling
from models.llama3.forward import forward
from models.llama3.params import LayerParams, Params, abstract_params, init_params

__all__ = [
    "LLAMA2_7B",
    "LLAMA3_2_1B",
    "LLAMA3_70B",
    "LLAMA3_8B",
    "LayerParams",
    "LlamaConfig",
    "Params",
    "RopeScaling",
    "abstract_params",
    "forward",
    "init_params",
]
