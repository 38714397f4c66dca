"""scripts/convert.py and what loads its checkpoints: the same answers, the same fingerprints, clear errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.errors import ConfigError
from ccjax.loading.model import DEMO_MODEL, load_model, read_model_files
from scripts.convert import main
from tests.loading.conftest import assert_same_model


def convert(*arguments) -> None:
    assert main([*map(str, arguments)]) == 0


@pytest.mark.parametrize(
    ("quantization", "dtype"), [(None, "float32"), (None, "bfloat16"), ("int8", "bfloat16"), ("fp8", "float32")]
)
def test_converted_checkpoint_loads_as_the_same_model(tmp_path, quantization, dtype):
    flags = [] if quantization is None else ["--quantization", quantization]
    convert("demo", tmp_path / "there", *flags)
    wanted = load_model("demo", dtype=dtype, quantization=quantization)
    assert_same_model(load_model(tmp_path / "there", dtype=dtype), wanted)


def test_converted_checkpoint_shares_stored_kv_with_the_original(tmp_path):
    convert("demo", tmp_path / "there", "--quantization", "int8")
    url, documents = (tmp_path / "store").as_uri(), [{"title": "Ash", "text": "A tree."}]
    with Engine.from_pretrained("demo", store=url, quantization="int8") as engine:
        first = engine.generate("Who?", documents=documents, reuse="exact", max_new_tokens=2)
    with Engine.from_pretrained(tmp_path / "there", store=url) as engine:
        second = engine.generate("Who?", documents=documents, reuse="exact", max_new_tokens=2)
    assert second.token_ids == first.token_ids and second.reuse.reused_tokens > 0


def test_round_trip_conversion_keeps_the_fingerprint_until_files_change(tmp_path):
    convert("demo", tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", "--to", "huggingface")
    assert_same_model(load_model(tmp_path / "back", dtype="float32"), load_model("demo", dtype="float32"))
    weights = tmp_path / "back" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    changed = read_model_files(tmp_path / "back").fingerprint("float32")
    assert changed != read_model_files("demo").fingerprint("float32")


def test_converted_random_weights_are_unchanged(tmp_path):
    convert("random:tiny:3", tmp_path / "there")
    convert("random:tiny:3", tmp_path / "hf", "--to", "huggingface")
    drawn = load_model("random:tiny:3", dtype="float32")
    for directory in ("there", "hf"):
        read = load_model(tmp_path / directory, dtype="float32")
        jax.tree.map(np.testing.assert_array_equal, read.params, drawn.params)
        assert read_model_files(tmp_path / directory).weights.fingerprint("float32", None) == read_model_files(
            "random:tiny:3"
        ).weights.fingerprint("float32", None)


def test_rounded_weights_share_a_fingerprint_only_if_identical(tmp_path):
    """The demo model is float32. Loaded as bfloat16 it is what a bfloat16 checkpoint holds; as float32 it is not, and
    8 bits are rounded from other digits."""
    convert("demo", tmp_path / "narrow", "--dtype", "bfloat16")
    narrow, plain = read_model_files(tmp_path / "narrow"), read_model_files("demo")
    assert_same_model(load_model(tmp_path / "narrow", dtype="bfloat16"), load_model("demo", dtype="bfloat16"))
    assert narrow.fingerprint("float32") != plain.fingerprint("float32")
    assert narrow.fingerprint("bfloat16", "int8") != plain.fingerprint("bfloat16", "int8")
    convert("demo", tmp_path / "packed", "--dtype", "bfloat16", "--quantization", "int8")
    packed = load_model(tmp_path / "packed", dtype="bfloat16")
    assert_same_model(packed, load_model("demo", dtype="bfloat16", quantization="int8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/absent", "{}"], 'model: wanted "demo", "smollm2", a directory'),
        (["demo", str(DEMO_MODEL)], "directory: wanted another one than the model's"),
        (["random:llama9", "{}"], "wanted one of llama3-8b"),
        (["{made}", "{}"], "wanted a Hugging Face directory, a GGUF file or random weights, got a checkpoint"),
        (["{made}", "{}", "--to", "huggingface"], "wanted one that is not quantised"),
        (["demo", "{}", "--to", "huggingface", "--quantization", "int8"], "--quantization: wanted none"),
        (["demo", "{}", "--tokenizer", "/absent"], "tokenizer: wanted a directory with tokenizer files"),
    ],
)
def test_errors_name_what_was_wanted(tmp_path, capsys, arguments, message):
    made = tmp_path / "made"
    if "{made}" in arguments:
        convert("random:tiny", made, "--quantization", "int8")
    given = [text.replace("{made}", str(made)).replace("{}", str(tmp_path / "new")) for text in arguments]
    assert main(given) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_loading_a_checkpoint_in_another_quantization_is_rejected(tmp_path):
    convert("random:tiny", tmp_path, "--quantization", "int8")
    with pytest.raises(ConfigError, match=r"quantization: wanted int8, which .* is in, got 'fp8'"):
        load_model(tmp_path, dtype="float32", quantization="fp8")
    assert (
        load_model(tmp_path, dtype="float32", quantization="int8").fingerprint
        == load_model(tmp_path, dtype="float32").fingerprint
    )
