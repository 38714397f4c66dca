"""GGUF files of a few kilobytes, with either kind of vocabulary, as seeds for the fuzzer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

_D = 32
_COUNTS = {"block_count": 1, "embedding_length": _D, "feed_forward_length": _D, "context_length": 64}
_HEADS = {"attention.head_count": 2, "attention.head_count_kv": 1}
_TOKENS = {
    "gpt2": (["<|end|>", "a", "b", "ab"], [3, 1, 1, 1], {"merges": ["a b"]}),
    "llama": (["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "▁a"], [2, 3, 3, 6, 1, 1, 1], {"scores": [0.0] * 7}),
}


def gguf_seeds(folder: Path) -> Iterator[bytes]:
    """The bytes of two models, written to a folder first."""
    folder.mkdir(exist_ok=True)
    for model, (tokens, types, extra) in _TOKENS.items():
        writer = gguf.GGUFWriter(folder / model, "llama")
        for key, value in (_COUNTS | _HEADS).items():
            writer.add_uint32(f"llama.{key}", value)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for key, values in extra.items():
            writer.add_array(f"tokenizer.ggml.{key}", values)
        writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
        writer.add_string("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}")
        for name, values, kind in _tensors(len(tokens)):
            writer.add_tensor(name, values, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield (folder / model).read_bytes()


def _tensors(vocab_size: int) -> Iterator[tuple[str, np.ndarray, Any]]:
    kinds = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_0", "BF16"]
    rows = {"attn_q": _D, "attn_k": _D // 2, "attn_v": _D // 2, "attn_output": _D}
    rows |= {"ffn_gate": _D, "ffn_up": _D, "ffn_down": _D}
    for (name, num_rows), kind in zip(rows.items(), kinds, strict=True):
        of = GGMLQuantizationType[kind]
        yield f"blk.0.{name}.weight", gguf.quantize(np.ones((num_rows, _D), np.float32), of), of
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        yield f"{name}.weight", np.ones(_D, np.float32), None
    yield "rope_freqs.weight", np.ones(_D // 4, np.float32), None
    of = GGMLQuantizationType.Q4_0
    yield "token_embd.weight", gguf.quantize(np.ones((vocab_size, _D), np.float32), of), of
