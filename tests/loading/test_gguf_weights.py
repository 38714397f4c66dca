"""Weights of small GGUF files are those that were written, in every type, as a Hugging Face directory has them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from ccjax.loading.gguf import config_of, load_gguf, open_gguf
from ccjax.loading.model import load_model
from ccjax.models.llama3.config import LlamaConfig, RopeScaling
from ccjax.models.llama3.convert import load_params
from ccjax.models.llama3.fused import unfuse
from ccjax.models.llama3.layers import rope_frequencies
from ccjax.models.llama3.sharding import make_mesh, param_sharding
from tests.loading.gguf_files import (
    QUANTISED,
    SCALES_AT,
    Shape,
    as_read,
    byte_level_words,
    hugging_face_tensors,
    write_gguf,
)

SHAPE = Shape()
MIXTURE = Shape(num_layers=1, num_experts=3)
WORDS = byte_level_words()
VOCAB = len(WORDS.tokens)


def written_pair(folder, *, kind=Kind.F32, shape=SHAPE, tied=False, **settings):
    """A GGUF file, and a Hugging Face directory with the weights that are in it."""
    tensors = hugging_face_tensors(shape, VOCAB, tied=tied)
    path, directory = folder / "model.gguf", folder / "hf"
    written = write_gguf(path, shape, tensors, WORDS, kind=kind, **settings)
    directory.mkdir()
    save_file(as_read(shape, VOCAB, written, tied=tied), directory / "model.safetensors")
    config = config_of(open_gguf(path))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return path, directory, config


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("kind", [*QUANTISED, *SCALES_AT], ids=lambda kind: kind.name)
def test_weights_of_every_tensor_type_match_the_reference(tmp_path, kind):
    path, directory, config = written_pair(tmp_path, kind=kind)
    file = open_gguf(path)
    assert file.tensors["blk.0.attn_q.weight"][1].tensor_type == kind
    params = load_gguf(file, config, dtype=jnp.float32)
    assert_same(params, load_params(directory, config, dtype=jnp.float32))
    assert np.asarray(params.layers[1].wq).std() > 0


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_8_bit_and_bfloat16_weights_match_the_reference(tmp_path, quantization):
    path, directory, config = written_pair(tmp_path, kind=Kind.Q8_0)
    settings = {"dtype": jnp.bfloat16, "quantization": quantization}
    assert_same(load_gguf(open_gguf(path), config, **settings), load_params(directory, config, **settings))


def test_expert_weights_match_the_reference(tmp_path):
    path, directory, config = written_pair(tmp_path, kind=Kind.Q4_0, shape=MIXTURE)
    assert (config.model_type, config.num_experts, config.num_experts_per_token) == ("mixtral", 3, 2)
    params = load_gguf(open_gguf(path), config, dtype=jnp.float32)
    assert_same(params, load_params(directory, config, dtype=jnp.float32))


@pytest.mark.skipif(jax.device_count() < 2, reason="wants two devices")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_sharded_over_two_devices_match_the_reference(tmp_path, quantization):
    path, directory, config = written_pair(tmp_path, kind=Kind.Q4_K)
    mesh = make_mesh(config, jax.devices()[:2])
    params = load_gguf(
        open_gguf(path),
        config,
        dtype=jnp.float32,
        quantization=quantization,
        sharding=lambda spec: param_sharding(mesh, spec),
    )
    assert len(jax.tree.leaves(params)[0].sharding.device_set) == 2
    assert_same(params, load_params(directory, config, dtype=jnp.float32, quantization=quantization))


def test_tied_output_weights_have_no_lm_head(tmp_path):
    path, directory, config = written_pair(tmp_path, tied=True)
    assert config.tie_embeddings
    params = load_gguf(open_gguf(path), config, dtype=jnp.float32)
    assert params.lm_head is None
    assert_same(params, load_params(directory, config, dtype=jnp.float32))


def test_split_file_loads_the_same_weights_as_a_whole_file(tmp_path):
    whole, _, config = written_pair(tmp_path)
    tensors = hugging_face_tensors(SHAPE, VOCAB)
    write_gguf(tmp_path / "split.gguf", SHAPE, tensors, WORDS, split_max_tensors=8)
    first = min(tmp_path.glob("split-*.gguf"))
    file = open_gguf(first)
    assert len(file.paths) == 3 and file.name == "split"
    assert config_of(file) == config
    assert_same(load_gguf(file, config, dtype=jnp.float32), load_gguf(open_gguf(whole), config, dtype=jnp.float32))


def test_progress_increases_to_its_total(tmp_path):
    path, _, config = written_pair(tmp_path, kind=Kind.Q4_0, shape=MIXTURE)
    seen = []
    load_gguf(open_gguf(path), config, dtype=jnp.float32, progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] == seen[-2][0] and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_loaded_weights_do_not_share_memory_with_the_file(tmp_path):
    """An array of JAX may share NumPy's memory; the file's would change with the file."""
    path, _, config = written_pair(tmp_path, tied=True)
    params = load_gguf(open_gguf(path), config, dtype=jnp.float32)
    before = [np.array(leaf) for leaf in jax.tree.leaves(params)]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    for leaf, kept in zip(jax.tree.leaves(params), before, strict=True):
        np.testing.assert_array_equal(leaf, kept)


def test_config_is_read_from_the_metadata(tmp_path):
    _, _, config = written_pair(tmp_path, metadata={"rope.freq_base": 500000.0, "rope.scaling.type": "none"})
    assert config == LlamaConfig(VOCAB, 256, 2, 4, 2, 64, 256, 500000.0, rms_norm_eps=1e-5, max_position_embeddings=512)


def test_missing_vocab_size_is_taken_from_the_vocabulary(tmp_path):
    assert written_pair(tmp_path, metadata={"vocab_size": None})[2].vocab_size == VOCAB


@pytest.mark.parametrize(
    "scaling",
    [RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32.0, 1.0, 4.0, 8192), RopeScaling(8.0, 1.0, 4.0, 4096)]
    + [RopeScaling(16.0, 1.0, 3.0, 2048)],
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_factors_are_read_as_llama_3_scaling(tmp_path, scaling, theta):
    """The divisors that a converter writes give Llama 3.1's scaling again."""
    plain = LlamaConfig(VOCAB, 256, 2, 4, 2, 64, 256, theta)
    scaled = LlamaConfig(VOCAB, 256, 2, 4, 2, 64, 256, theta, scaling)
    factors = rope_frequencies(plain) / rope_frequencies(scaled)
    config = written_pair(tmp_path, metadata={"rope.freq_base": theta}, rope_factors=factors)[2]
    assert config.rope_scaling == scaling
    np.testing.assert_allclose(rope_frequencies(config), rope_frequencies(scaled), rtol=1e-6)


def test_rope_factors_of_one_mean_no_scaling(tmp_path):
    assert written_pair(tmp_path, rope_factors=np.ones(32))[2].rope_scaling is None


@pytest.mark.parametrize(("kind", "is_told"), [(Kind.BF16, True), (Kind.F16, False)])
def test_cpus_say_what_they_compute_bfloat16_in(tmp_path, caplog, kind, is_told):
    load_model(written_pair(tmp_path, kind=kind)[0], dtype="float32")
    assert ("stored in bfloat16, runs in float32" in caplog.text) == is_told


def test_load_model_reads_weights_config_tokenizer_and_fingerprint(tmp_path):
    path, directory, config = written_pair(tmp_path, kind=Kind.Q5_1)
    model = load_model(path, dtype="float32")
    assert (model.name, model.config, model.directory) == ("model", config, None)
    assert model.eos_ids == {0, 2} and model.tokenizer is not None and model.template is not None
    assert_same(unfuse(model.params), load_params(directory, config, dtype=jnp.float32))
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    assert load_model(tmp_path / "other.gguf", dtype="float32").fingerprint == model.fingerprint
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    assert load_model(path, dtype="float32").fingerprint != model.fingerprint
