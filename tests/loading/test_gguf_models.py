"""Engines of GGUF models: small ones, and SmolLM2 where its package is installed."""

from __future__ import annotations

import pytest
from gguf import GGMLQuantizationType as Kind

from ccjax.engine import Engine
from ccjax.loading.model import load_model, load_prompt_builder, model_config, model_tokenizer, read_model_files
from tests.loading.gguf_files import Shape, byte_level_words, hugging_face_tensors, write_gguf

DOCUMENTS = [{"title": "Letter", "text": "The letter was written by Ann Lee in 1912."}]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    shape, words = Shape(num_layers=1, d_model=64, num_heads=4, num_kv_heads=2, d_ff=64), byte_level_words()
    write_gguf(path, shape, hugging_face_tensors(shape, len(words.tokens)), words, kind=Kind.Q4_0)
    return path


def test_config_tokenizer_and_fingerprint_need_no_weights(small):
    tokenizer = model_tokenizer(small)
    assert tokenizer is not None and tokenizer.vocab_size == model_config(small).vocab_size
    assert load_prompt_builder(small) is not None
    files = read_model_files(small)
    assert files.fingerprint("float32") == load_model(small, dtype="float32").fingerprint
    assert files.fingerprint("float32", "int8") != files.fingerprint("float32")


def test_gguf_engine_reuses_stored_chunks(tmp_path, small):
    with Engine.from_pretrained(str(small), store=(tmp_path / "store").as_uri()) as engine:
        assert engine.model_name == "small"
        first = engine.generate("Who?", documents=DOCUMENTS, reuse="exact", max_new_tokens=4)
        second = engine.generate("Who?", documents=DOCUMENTS, reuse="exact", max_new_tokens=4)
    assert second.token_ids == first.token_ids and second.reuse.reused_tokens > 0


def test_gguf_engine_answers_the_same_on_two_devices(small):
    with Engine.from_pretrained(small) as engine:
        wanted = engine.generate("Who?", documents=DOCUMENTS, max_new_tokens=8).token_ids
    with Engine.from_pretrained(small, tensor_parallel_size=2) as engine:
        assert engine.generate("Who?", documents=DOCUMENTS, max_new_tokens=8).token_ids == wanted


@pytest.mark.usefixtures("smollm2")
def test_smollm2_config_and_tokenizer_are_read():
    config = model_config("smollm2")
    assert (config.num_layers, config.d_model, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_embeddings) == (100000.0, 1e-5, True)
    tokenizer = model_tokenizer("smollm2")
    assert tokenizer is not None and tokenizer.eos_ids == {0, 2} and tokenizer.bos_id is None


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_smollm2_completes_a_name_from_its_prompt():
    with Engine.from_pretrained("smollm2") as engine:
        assert engine.model_name == "smollm2"
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.encode("The letter was written by Ann Lee. Yes, by Ann", allow_special=False)
        answer = engine.generate_from_tokens([[], prompt], max_new_tokens=2, reuse="off")
    assert answer.text == " Lee."
