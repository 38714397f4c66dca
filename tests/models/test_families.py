"""A family that is added as data, with biases and normed queries and keys: files, layouts, and the engine's identities.
CONTRIBUTING.md compares it with transformers."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.kernels.rope import apply_rope
from ccjax.models.llama3 import LayerParams, LlamaConfig, families, forward, init_params, leaves
from ccjax.models.llama3.convert import load_config, load_params, save_pretrained
from ccjax.models.llama3.fused import fuse
from ccjax.models.llama3.layers import project_qkv, rope_frequencies
from ccjax.models.llama3.sharding import make_mesh, param_sharding
from ccjax.models.llama3.steps import received_step
from ccjax.requests import Request
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer, assert_same

FAMILY = families.Family(
    "NormedForCausalLM",
    keys={"attention_bias": "attention_bias", "output_bias": "attention_bias"},
    options={"qk_norm": True},
    absent={"head_dim": 16},
)


@pytest.fixture(autouse=True)
def _is_known(monkeypatch):
    monkeypatch.setitem(families._ALL, "normed", FAMILY)


@pytest.fixture
def model() -> TinyModel:
    """Of that family, with random norms and biases."""
    tiny = TinyModel(3)
    config = LlamaConfig.from_hf({**tiny.raw, "model_type": "normed", "attention_bias": True})
    draw = np.random.default_rng(1)

    def moved(leaf: jax.Array) -> jax.Array:
        return leaf + (0.3 * draw.standard_normal(leaf.shape) if leaf.ndim < 3 else 0.0).astype(leaf.dtype)

    tiny.config, params = config, init_params(config, jax.random.key(0))
    each = tuple(
        dataclasses.replace(
            layer,
            **{name: moved(getattr(layer, name)) for name in ("bq", "bk", "bv", "bo", "q_norm", "k_norm")},
        )
        for layer in params.layers
    )
    params = dataclasses.replace(params, layers=each)
    tiny.loaded = dataclasses.replace(tiny.loaded, config=config, params=params, fingerprint="tiny-normed")
    return tiny


def test_joined_matrices_keep_biases_and_norms(model):
    tokens = jnp.arange(30)[None]
    wanted = forward(model.loaded.params, model.config, tokens)
    joined = fuse(jax.tree.map(jnp.copy, model.loaded.params))  # deletes what it is given
    assert joined.layers[0].wk is None and joined.layers[0].bk is not None
    np.testing.assert_allclose(forward(joined, model.config, tokens), wanted, atol=2e-5)


def test_config_has_the_options_of_its_family():
    raw = {key: value for key, value in TinyModel().raw.items() if key != "head_dim"} | {"model_type": "normed"}
    config = LlamaConfig.from_hf(raw)
    assert (config.head_dim, config.qk_norm, config.attention_bias, config.output_bias) == (16, True, False, False)
    biased = LlamaConfig.from_hf(raw | {"attention_bias": True})
    assert biased == dataclasses.replace(config, attention_bias=True, output_bias=True)
    assert biased.to_hf()["architectures"] == ["NormedForCausalLM"]
    assert LlamaConfig.from_hf(biased.to_hf()) == biased
    with pytest.raises(ValueError, match="qk_norm: wanted True for normed, got False"):
        dataclasses.replace(config, qk_norm=False)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_saved_weights_are_loaded_unchanged(tmp_path, model, max_shard_bytes):
    params = model.loaded.params
    save_pretrained(params, model.config, tmp_path, max_shard_bytes=max_shard_bytes)
    assert load_config(tmp_path) == model.config
    loaded = load_params(tmp_path, dtype=jnp.float32)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(other))
    packed = load_params(tmp_path, dtype=jnp.float32, quantization="int8").layers[0]
    assert packed.bk is not None
    np.testing.assert_array_equal(np.asarray(packed.bk), np.asarray(params.layers[0].bk))


@pytest.mark.parametrize("size", [2, 8])
def test_each_device_reads_its_own_heads(tmp_path, monkeypatch, model, size):
    save_pretrained(model.loaded.params, model.config, tmp_path)
    mesh, read, whole = make_mesh(model.config, jax.devices()[:size]), [], leaves.read_part

    def read_part(tensors, sources, spec, index, dtype):
        part = whole(tensors, sources, spec, index, dtype)
        read.append((part.shape, spec))
        return part

    monkeypatch.setattr(leaves, "read_part", read_part)
    loaded = load_params(tmp_path, dtype=jnp.float32, sharding=lambda spec: param_sharding(mesh, spec))
    assert all(shape == param_sharding(mesh, spec).shard_shape(spec.shape) for shape, spec in read)
    for ours, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(model.loaded.params), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(other))


def _float64_layer(x: np.ndarray, layer: LayerParams, config: LlamaConfig) -> np.ndarray:
    """The attention half of a layer, from the formulas."""
    eps, each = config.rms_norm_eps, {f.name: np.asarray(v, np.float64) for f, v in _values(layer)}

    def norm(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return value / np.sqrt((value**2).mean(-1, keepdims=True) + eps) * weight

    normed = norm(x, each["attention_norm"])
    q, k, v = (np.einsum("nd,dqh->nqh", normed, each["w" + n]) + each["b" + n] for n in "qkv")
    at, frequencies = jnp.arange(len(x)), rope_frequencies(config)
    q, k = (
        np.asarray(apply_rope(jnp.asarray(norm(value, each[name])), at, frequencies), np.float64)
        for value, name in ((q, "q_norm"), (k, "k_norm"))
    )
    k, v = (np.repeat(value, config.num_heads // config.num_kv_heads, 1) for value in (k, v))
    scores = np.einsum("nqh,sqh->qns", q, k) / math.sqrt(config.head_dim)
    weights = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return x + np.einsum("qns,sqh,qhd->nd", weights, v, each["wo"]) + each["bo"]


def _values(layer: LayerParams):
    return [(field, getattr(layer, field.name)) for field in dataclasses.fields(layer)]


def test_attention_matches_float64_formulas(model):
    layer = model.loaded.params.layers[0]
    layer = dataclasses.replace(layer, w_down=jnp.zeros_like(layer.w_down))  # the MLP adds nothing
    x = np.random.default_rng(2).standard_normal((20, model.config.d_model))
    ours, _ = received_step(layer, jnp.asarray(x, jnp.float32), jnp.int32(20), config=model.config)
    wanted = _float64_layer(x, layer, model.config)
    np.testing.assert_allclose(ours, wanted, atol=3e-5)
    for name in ("bq", "bk", "bv", "bo", "q_norm", "k_norm"):
        other = dataclasses.replace(layer, **{name: 1.1 * getattr(layer, name)})
        ours, _ = received_step(other, jnp.asarray(x, jnp.float32), jnp.int32(20), config=model.config)
        assert np.abs(ours - wanted).max() > 1e-3 or name == "bk", name  # softmax cancels most of a common key


def test_engine_reuses_kv_of_the_family(model):
    """The same tokens after exact reuse as without, and after approximate reuse with everything recomputed."""
    segments = draw_segments(np.random.default_rng(0), [24, 40])
    with model.engine() as engine:
        wanted = answer(engine, segments, "off")
        answer(engine, segments, "exact")
        got = answer(engine, segments, "exact")
        assert got[2].reused_tokens > 60
        assert_same(got, wanted)
    with model.engine(recompute_ratio=1.0) as engine:
        engine.run(Request(segments=segments))
        other = permuted(segments, [1, 0])
        assert_same(answer(engine, other, "bounded"), answer(engine, other, "off"))


def test_keys_are_normed_before_they_are_stored(model):
    """Each stored key has the root mean square that its norm gives it."""
    layer = model.loaded.params.layers[0]
    layer = dataclasses.replace(layer, k_norm=jnp.full_like(layer.k_norm, 2.0))
    x = jax.random.normal(jax.random.key(2), (5, model.config.d_model))
    _, k, v = project_qkv(x, layer, model.config.rms_norm_eps)
    np.testing.assert_allclose(np.sqrt((np.asarray(k) ** 2).mean(-1)), 2.0, rtol=1e-3)
    assert np.sqrt((np.asarray(v) ** 2).mean(-1)).std() > 0.05


FUSED = families.Family(
    "Phi3ForCausalLM",
    absent={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    written={"pad_token_id": 0},
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)


def test_fused_tensors_of_a_family_match_transformers(tmp_path, monkeypatch):
    """Phi-3 keeps queries, keys and values in one tensor; the halves of another are gate and up."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    monkeypatch.setitem(families._ALL, "phi3", FUSED)
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.125}
    config = transformers.Phi3Config(**shape, **heads, attn_implementation="eager")
    model = transformers.Phi3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    params, ours = load_params(tmp_path / "theirs", dtype=jnp.float32), load_config(tmp_path / "theirs")
    save_pretrained(params, ours, tmp_path / "ours")
    again = transformers.Phi3ForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    tokens = torch.randint(97, (1, 48))
    with torch.no_grad():
        expected, written = (one(tokens).logits.float().numpy() for one in (model, again))
    ids = jnp.asarray(tokens.numpy(), jnp.int32)
    np.testing.assert_allclose(forward(params, ours, ids), expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(written, expected)
    swapped = FUSED.fused | {"mlp.gate_up_proj": ("mlp.up_proj", "mlp.gate_proj")}
    monkeypatch.setitem(families._ALL, "phi3", dataclasses.replace(FUSED, fused=swapped))
    other = load_params(tmp_path / "theirs", dtype=jnp.float32)
    assert np.abs(forward(other, ours, ids) - expected).max() > 1e-2
    mesh = make_mesh(ours, jax.devices()[:2])
    monkeypatch.setitem(families._ALL, "phi3", FUSED)
    split = load_params(tmp_path / "ours", dtype=jnp.float32, sharding=lambda spec: param_sharding(mesh, spec))
    for half, whole in zip(jax.tree.leaves(split), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(half), np.asarray(whole))
