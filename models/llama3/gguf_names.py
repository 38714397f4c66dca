"""Names of a Llama's weights in GGUF, and the row order where it differs from Hugging Face's. Reads no files."""

from __future__ import annotations

import re

import numpy as np

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import ParamSpec
from ccjax.models.llama3.sources import Source

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the RoPE frequencies, one per pair of a head's dimensions; part of the config, not a weight."""
OUTPUT = "output.weight"
EXPERTS = "blk.0.ffn_gate_exps.weight"
"""Tensor of all experts of the first layer; present only in models with a mixture of experts."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": OUTPUT,
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
    "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(hf_name: str) -> str:
    """The GGUF tensor of the weight with this Hugging Face name; all experts of a layer are stacked in one tensor."""
    layer = _IN_LAYER.fullmatch(hf_name)
    return f"blk.{layer[1]}.{_BLOCK[layer[2]]}.{layer[3]}" if layer else _TOP[hf_name]


def gguf_sources(hf_name: str, spec: ParamSpec) -> list[Source]:
    """The sources of a weight: its tensor, or for experts the part of each."""
    name = gguf_name(hf_name)
    if not spec.num_experts:
        return [Source(name, spec.hf_shape)]
    out, into = spec.hf_shape
    whole = (spec.num_experts, out, into)
    return [Source(name, whole, expert=expert) for expert in range(spec.num_experts)]


def row_order(name: str, config: LlamaConfig) -> np.ndarray | None:
    """For each row of Hugging Face's tensor, its row in the GGUF tensor; None if the order is the same.

    In query and key heads, the two dimensions that RoPE rotates together are adjacent in GGUF (2i and 2i + 1), and half
    a head apart in Hugging Face's layout (i and i + H/2).
    """
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if num_heads is None:
        return None
    rows = np.arange(num_heads * config.head_dim).reshape(num_heads, config.head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
