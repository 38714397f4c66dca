"""ccjax.models.llama3.presets: sizes of the known models, shapes by name, and their random weights."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ccjax.models.llama3.params as params_module
from ccjax.models.llama3 import abstract_params, init_params
from ccjax.models.llama3.params import ParamSpec, build_params
from ccjax.models.llama3.presets import preset


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3.2-1b", 1.236),
        ("llama2-7b", 6.738),
        ("mistral-7b", 7.248),
        ("mixtral-8x7b", 46.703),
    ],
)
def test_preset_parameter_counts_match_the_model_cards(name, billions):
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(preset(name, 0))))
    assert total / 1e9 == pytest.approx(billions, abs=0.006)


def test_preset_parses_shape_names():
    config = preset("16x1024", 1000)
    assert (config.num_layers, config.d_model, config.num_heads, config.num_kv_heads) == (16, 1024, 16, 4)
    assert (config.head_dim, config.d_ff, config.vocab_size, config.tie_embeddings) == (64, 2816, 1000, True)
    assert preset("2x256x4", 1000).num_heads == 4 and preset("2x256x4", 1000).head_dim == 64


@pytest.mark.parametrize("name", ["llama4", "", "LLAMA3-8B", "0x64", "2x", "2x100", "2x64x0", "2x64x4x4", "-1x64"])
def test_unknown_preset_is_rejected_with_the_available_names(name):
    with pytest.raises(ValueError, match="llama3-8b, llama3-70b, llama3.2-1b|a multiple of twice the heads") as error:
        preset(name, 1000)
    assert repr(name) in str(error.value)


def test_weights_are_drawn_with_the_std_in_the_table():
    config = preset("2x512x4", 3000)
    seen = []
    params = init_params(config, jax.random.key(3), progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    specs = jax.tree.leaves(build_params(config, lambda _, spec: spec), is_leaf=lambda x: isinstance(x, ParamSpec))
    leaves = jax.tree.leaves(params)
    for leaf, spec in zip(leaves, specs, strict=True):
        values = np.asarray(leaf, np.float64)
        if spec.init_std is None:
            assert (values == 1).all()
            continue
        assert values.mean() == pytest.approx(0, abs=5 * spec.init_std / math.sqrt(values.size))
        assert values.std() == pytest.approx(spec.init_std, rel=0.01)
    drawn = [leaf for leaf, spec in zip(leaves, specs, strict=True) if spec.init_std is not None]
    same_shape = [np.asarray(leaf) for leaf in drawn if leaf.shape == drawn[1].shape]
    assert len(same_shape) == config.num_layers and all(
        (leaf != same_shape[0]).mean() > 0.99 for leaf in same_shape[1:]
    )


@pytest.mark.parametrize("drawn_at_once", [1 << 23, 1 << 11])
def test_same_weights_are_drawn_for_any_dtype_and_sharding(monkeypatch, drawn_at_once):
    monkeypatch.setattr("ccjax.models.llama3.params._DRAWN_AT_ONCE", drawn_at_once)
    config = dataclasses.replace(preset("tiny", 0), num_layers=1, num_kv_heads=4, d_ff=64)
    key = jax.random.key(5)
    plain = init_params(config, key)
    narrow = init_params(config, key, jnp.bfloat16)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), plain, narrow)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    axis_of = {"heads": "model", "kv_heads": "model", "ffn": "model", "vocab": "model"}

    def sharding(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axis_of.get(axis) for axis in spec.axes)))

    sharded = init_params(config, key, sharding=sharding)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)), plain, sharded)
    assert sharded.layers[0].wq.sharding.shard_shape(sharded.layers[0].wq.shape) == (64, 2, 16)
    other = init_params(config, jax.random.key(6))
    assert not np.array_equal(other.embedding, plain.embedding)


def test_leaves_are_drawn_in_their_own_dtype_block_by_block(monkeypatch):
    drawn = []

    def watched(key, std, *, shape, dtype, rows, at_once):
        drawn.append((jnp.dtype(dtype), rows * math.prod(shape[1:])))
        return jnp.zeros(shape, dtype)

    monkeypatch.setattr(params_module, "_draw", watched)
    monkeypatch.setattr(params_module, "_DRAWN_AT_ONCE", 1 << 11)
    init_params(preset("tiny", 0), jax.random.key(0), jnp.bfloat16)
    assert {dtype for dtype, _ in drawn} == {jnp.dtype(jnp.bfloat16)}
    assert max(numbers for _, numbers in drawn) == 1 << 11


def test_drawing_in_blocks_reduces_temporary_memory():
    """XLA's memory for random bits, besides the result."""
    draw = jax.jit(params_module._draw, static_argnames=("shape", "dtype", "rows", "at_once"))

    def temporary_bytes(rows):
        arguments = dict(shape=(256, 512), dtype=jnp.bfloat16, rows=rows, at_once=False)
        compiled = draw.lower(jax.random.key(0), jnp.float32(1.0), **arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 4 * 256 * 512 <= temporary_bytes(256)
