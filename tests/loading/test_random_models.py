"""Models with random weights through the public engine: names, tokenizers, fingerprints, errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.errors import ConfigError
from ccjax.loading.model import DEMO_MODEL, load_model, load_prompt_builder, read_model_files
from ccjax.text import ByteTokenizer


def test_random_model_answers_and_reuses_stored_chunks(tmp_path):
    store = tmp_path.as_uri()
    with Engine.from_pretrained("random:tiny", store=store) as engine:
        assert engine.model_name == "random:tiny" and isinstance(engine.tokenizer, ByteTokenizer)
        documents = [{"title": "Ash", "text": "A tree."}]
        first = engine.generate("Who?", documents=documents, max_new_tokens=5, reuse="exact")
        assert 1 <= len(first.token_ids) <= 5
    with Engine.from_pretrained("random:tiny", store=store) as engine:  # the same weights in another process's place
        second = engine.generate("Who?", documents=documents, max_new_tokens=5, reuse="exact")
        assert second.token_ids == first.token_ids and second.reuse.reused_tokens > 0


def test_same_name_gives_same_weights_and_another_seed_differs():
    first, again, other = (
        load_model(name, dtype="float32") for name in ("random:tiny", "random:tiny:0", "random:tiny:7")
    )
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert not np.array_equal(first.params.layers[0].wq.rows, other.params.layers[0].wq.rows)


def test_fingerprint_depends_on_preset_seed_dtype_and_tokenizer():
    def of(name: str, dtype: str = "float32", tokenizer: Path | None = None) -> str:
        return read_model_files(name, tokenizer=tokenizer).fingerprint(dtype)

    different = {
        of("random:tiny"),
        of("random:tiny", "bfloat16"),
        of("random:tiny:1"),
        of("random:2x64"),
        of("random:2x64x4"),
        of("random:llama3-8b"),
        of("random:llama3-8b", tokenizer=DEMO_MODEL),
    }
    assert len(different) == 7
    assert of("random:tiny") == of("random:tiny:0")
    assert load_model("random:tiny", dtype="bfloat16").fingerprint == of("random:tiny", "bfloat16")


def test_byte_tokenizer_is_announced_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        read_model_files("random:tiny")
    assert "random:tiny has no tokenizer: its tokens are bytes" in caplog.text and "--tokenizer" in caplog.text


def test_tokenizer_option_brings_its_template_and_stop_tokens(caplog):
    with caplog.at_level(logging.WARNING):
        model = load_model("random:2x64x4", dtype="float32", tokenizer=DEMO_MODEL)
    own = load_model("demo", dtype="float32")
    assert not caplog.records
    assert model.tokenizer is not None and own.tokenizer is not None
    assert model.tokenizer.fingerprint == own.tokenizer.fingerprint
    assert model.template == own.template and model.eos_ids == own.eos_ids
    assert model.config.vocab_size == own.tokenizer.vocab_size
    builder = load_prompt_builder("random:2x64x4", tokenizer=DEMO_MODEL)
    theirs = load_prompt_builder("demo")
    assert builder is not None and theirs is not None
    assert builder.build_completion("Who?").token_ids == theirs.build_completion("Who?").token_ids


def test_model_directory_can_use_a_tokenizer_from_elsewhere(tmp_path):
    (tmp_path / "config.json").write_bytes((DEMO_MODEL / "config.json").read_bytes())
    (tmp_path / "model.safetensors").symlink_to(DEMO_MODEL / "model.safetensors")
    assert load_model(tmp_path, dtype="float32").tokenizer is None
    model = load_model(tmp_path, dtype="float32", tokenizer=DEMO_MODEL)
    assert model.tokenizer is not None and model.fingerprint == load_model("demo", dtype="float32").fingerprint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: load_model("random:llama9", dtype="float32"),
            "model: after random: wanted one of llama3-8b, llama3-70b",
        ),
        (lambda: load_model("random:", dtype="float32"), "wanted one of llama3-8b"),
        (lambda: load_model("random:2x100", dtype="float32"), "a multiple of twice the heads"),
        (lambda: load_model("random:tiny:x", dtype="float32"), "random:tiny:SEED with a seed from 0"),
        (lambda: load_model("random:tiny:4294967296", dtype="float32"), "2\\^32 - 1, got 'random:tiny:4294967296'"),
        (lambda: load_model("random:tiny", dtype="float32", tokenizer="/absent"), "tokenizer: wanted a directory"),
        (
            lambda: load_model("random:tiny", dtype="float32", tokenizer=DEMO_MODEL),
            "the tokenizer of .*demo_model has .* tokens, the model only 512",
        ),
        (lambda: load_model("/absent", dtype="float32"), "or random:NAME, got '/absent'"),
    ],
)
def test_errors_say_what_was_wanted(call: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        call()
