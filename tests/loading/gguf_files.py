"""Small GGUF files of Llamas, written with the `gguf` package's writer, and the weights that are in them.

Imports nothing of ours: whoever records what llama.cpp makes of such a file has none of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

QUANTISED = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
"""Types that the package can write; the others it can only read."""
SCALES_AT = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
"""Where the float16 scales of a block are."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a small Llama; a row is one block of K types, the longest there are."""

    num_layers: int = 2
    d_model: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    d_ff: int = 256
    context: int = 512
    num_experts: int = 0

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


@dataclasses.dataclass(frozen=True)
class Words:
    """A vocabulary: `model` and `pre` are GGUF's names; merges for gpt2, scores for llama."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    model: str = "gpt2"
    pre: str | None = "smollm"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def byte_level_words(*, pre: str | None = "smollm", **extra: Any) -> Words:
    """Three control tokens and GPT-2's characters for bytes, with three merges."""
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    letters = tuple(byte_characters())
    merges = ("Ġ t", "h e", "Ġt he")
    tokens = control + letters + tuple(merge.replace(" ", "") for merge in merges)
    types = (3,) * len(control) + (1,) * (len(tokens) - len(control))
    return Words(tokens, types, merges, pre=pre, extra={"bos_token_id": 1, "eos_token_id": 2, **extra})


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def hugging_face_shapes(shape: Shape, vocab_size: int, *, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names of the weights, and their shapes there."""
    d, f, q, k = shape.d_model, shape.d_ff, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, d), "model.norm.weight": (d,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, d)
    for layer in range(shape.num_layers):
        block = f"model.layers.{layer}."
        shapes |= {block + f"{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            block + f"self_attn.{name}_proj.weight": (out, d) for name, out in zip("qkv", (q, k, k), strict=True)
        }
        shapes[block + "self_attn.o_proj.weight"] = (d, q)
        if shape.num_experts:
            moe = block + "block_sparse_moe."
            shapes[moe + "gate.weight"] = (shape.num_experts, d)
            for expert in range(shape.num_experts):
                shapes |= {f"{moe}experts.{expert}.w{n}.weight": (d, f) if n == 2 else (f, d) for n in (1, 2, 3)}
        else:
            shapes |= {block + f"mlp.{name}_proj.weight": (f, d) for name in ("gate", "up")}
            shapes[block + "mlp.down_proj.weight"] = (d, f)
    return shapes


def hugging_face_tensors(shape: Shape, vocab_size: int, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face's names and in its layout; norms are about one."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, size in hugging_face_shapes(shape, vocab_size, tied=tied).items():
        values = draw.standard_normal(size)
        tensors[name] = (1 + 0.1 * values if len(size) == 1 else values * size[-1] ** -0.5).astype(np.float32)
    return tensors


def gguf_tensors(shape: Shape, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights as llama.cpp's converter writes them: names, rows of heads in pairs, experts stacked."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"}
    names |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    names |= {"block_sparse_moe.gate": "ffn_gate_inp"}
    made: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        name = name.removesuffix(".weight")
        block, inner = "", name
        if name.startswith("model.layers."):
            _, _, layer, inner = name.split(".", 3)
            block = f"blk.{layer}."
        heads = {"self_attn.q_proj": shape.num_heads, "self_attn.k_proj": shape.num_kv_heads}.get(inner)
        if heads is not None:
            values = values.reshape(heads, 2, shape.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if ".experts." in inner:
            continue
        made[f"{block}{names[inner]}.weight"] = values
        if inner == "block_sparse_moe.gate":
            for number, part in enumerate(("gate", "down", "up"), 1):
                experts = [f"{name.removesuffix('gate')}experts.{n}.w{number}.weight" for n in range(shape.num_experts)]
                made[f"{block}ffn_{part}_exps.weight"] = np.stack([tensors[expert] for expert in experts])
    return made


def quantised(values: np.ndarray, kind: Kind, seed: int = 0) -> np.ndarray:
    """`values` in that type; random blocks of those that the package cannot write."""
    if kind not in SCALES_AT:
        return gguf.quantize(values, kind)
    draw = np.random.default_rng(seed)
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (values.size // per_block, num_bytes), dtype=np.uint8)
    for start in SCALES_AT[kind]:
        scales = draw.uniform(1e-4, 1e-3, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    shape: Shape,
    tensors: Mapping[str, np.ndarray],
    words: Words | None,
    *,
    kind: Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    rope_factors: np.ndarray | None = None,
    split_max_tensors: int = 0,
) -> dict[str, tuple[np.ndarray, Kind]]:
    """Writes a file; matrices are in `kind`, norms in F32, as llama.cpp has them.

    Args:
      tensors: of `hugging_face_tensors`.
      metadata: further keys of the architecture, without its name; None takes one away.
      split_max_tensors: for parts of so many tensors, beside `path`; 0 for one file.

    Returns:
      What was written under which name.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    keys: dict[str, Any] = {
        "block_count": shape.num_layers,
        "context_length": shape.context,
        "embedding_length": shape.d_model,
        "feed_forward_length": shape.d_ff,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
    }
    if shape.num_experts:
        keys |= {"expert_count": shape.num_experts, "expert_used_count": 2}
    for key, value in {**keys, **(metadata or {})}.items():
        if value is not None:
            add_value(writer, f"{architecture}.{key}", value)
    if words is not None:
        add_words(writer, words)
    made = gguf_tensors(shape, tensors)
    written: dict[str, tuple[np.ndarray, Kind]] = {}
    for seed, (name, values) in enumerate(made.items()):
        of = Kind.F32 if values.ndim == 1 or "_inp." in name else kind
        written[name] = (quantised(values, of, seed), of)
    if rope_factors is not None:
        written["rope_freqs.weight"] = (rope_factors.astype(np.float32), Kind.F32)
    for name, (data, of) in written.items():
        writer.add_tensor(name, data, raw_dtype=None if of in (Kind.F32, Kind.F16) else of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def as_read(
    shape: Shape, vocab_size: int, written: Mapping[str, tuple[np.ndarray, Kind]], *, tied: bool = False
) -> dict[str, np.ndarray]:
    """What is in a file, in Hugging Face's layout: each tensor dequantised as a whole, then put back."""
    shapes = hugging_face_shapes(shape, vocab_size, tied=tied)
    back: dict[str, np.ndarray] = {}
    for names in _groups(shapes):
        ends = np.cumsum([math.prod(shapes[name]) for name in names])
        places = {
            name: np.arange(end - math.prod(shapes[name]), end).reshape(shapes[name])
            for name, end in zip(names, ends, strict=True)
        }
        flat = np.full(ends[-1], np.nan, np.float32)
        for name, place in gguf_tensors(shape, places).items():
            data, kind = written[name]
            flat[place.reshape(-1)] = gguf.dequantize(data, kind).reshape(-1)
        back |= {name: flat[place] for name, place in places.items()}
    return back


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Those of a layer together, because experts are; the others alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:3]), []).append(name)
    return list(groups.values())


def add_words(writer: gguf.GGUFWriter, words: Words) -> None:
    """Writes a vocabulary under `tokenizer.ggml`."""
    writer.add_tokenizer_model(words.model)
    if words.pre is not None and words.model == "gpt2":
        writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.types))
    if words.merges:
        writer.add_token_merges(list(words.merges))
    if words.scores:
        writer.add_token_scores(list(words.scores))
    for key, value in words.extra.items():
        add_value(writer, "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}", value)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a key in the type that llama.cpp reads it in."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
