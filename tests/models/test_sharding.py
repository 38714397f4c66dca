"""The parts of a model on each device, and that loading reads no more of the files than these."""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.models.llama3 import LlamaConfig, leaves
from ccjax.models.llama3.config import LLAMA3_8B, LLAMA3_70B
from ccjax.models.llama3.convert import load_params
from ccjax.models.llama3.paged_steps import paged_decode_step, paged_layer_step
from ccjax.models.llama3.params import abstract_params, build_params
from ccjax.models.llama3.sharding import make_mesh, mesh_of, param_sharding, shard_params
from tests.models.test_convert import write
from tests.oracles import random_llama
from tests.pallas_kernels.aot_cases import StepCase


def devices(size):
    return jax.devices()[:size]


def config_of(**changes):
    return LlamaConfig.from_hf(random_llama(0, **changes)[1])


@pytest.mark.parametrize(
    ("size", "num_heads", "num_kv_heads", "wanted"),
    [(1, 8, 2, (1, 1)), (2, 8, 2, (2, 1)), (4, 8, 2, (2, 2)), (8, 8, 2, (2, 4)), (8, 8, 1, (1, 8)), (4, 8, 8, (4, 1))],
)
def test_kv_heads_are_repeated_where_devices_outnumber_them(size, num_heads, num_kv_heads, wanted):
    config = config_of(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    assert make_mesh(config, devices(size)).devices.shape == wanted


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "a divisor of the model's 8 attention heads, got 3"),
        (0, {}, "a divisor of the model's 8 attention heads, got 0"),
        (4, {"intermediate_size": 90}, "a divisor of the model's 90 MLP columns, got 4"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "a divisor or a multiple of the model's 6 kv heads"),
    ],
)
def test_a_model_that_cannot_be_split_evenly_is_refused(size, changes, message):
    with pytest.raises(ValueError, match=f"tensor_parallel_size: wanted {message}"):
        make_mesh(config_of(**changes), devices(size))


@pytest.mark.parametrize(("config", "size"), [(LLAMA3_8B, 4), (LLAMA3_70B, 8), (LLAMA3_70B, 16)])
def test_large_models_are_split_evenly(config, size):
    """Only norms are complete on every device, and kv projections are replicated if devices outnumber kv heads."""
    kind = {"process_index": 0, "platform": "cpu", "device_kind": "cpu"}
    devices = [type("Device", (), {"id": number, **kind})() for number in range(size)]
    mesh = make_mesh(config, devices)
    held = Counter()

    def count(name, spec):
        shape = param_sharding(mesh, spec).shard_shape(spec.shape)
        kind = "norm" if "norm" in name else "kv" if "k_proj" in name or "v_proj" in name else "other"
        held[kind] += math.prod(shape)
        held[kind, "all"] += math.prod(spec.shape)

    build_params(config, count)
    assert held["norm"] == held["norm", "all"]
    assert held["other"] * size == held["other", "all"]
    assert held["kv"] * min(size, config.num_kv_heads) == held["kv", "all"]
    total = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))
    assert sum(held[kind] for kind in ("norm", "kv", "other")) < 1.02 * total / size


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 2, "vocab_size": 96},
        {"num_key_value_heads": 8, "head_dim": 24, "tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    ],
)
@pytest.mark.parametrize("size", [2, 8])
def test_loading_reads_only_each_devices_own_part(tmp_path, monkeypatch, size, changes):
    weights, raw = random_llama(1, **changes)
    directory, config = write(tmp_path, weights, raw, 2), LlamaConfig.from_hf(raw)
    mesh = make_mesh(config, devices(size))
    read, whole = [], leaves.read_part

    def read_part(tensors, sources, spec, index, dtype):
        part = whole(tensors, sources, spec, index, dtype)
        read.append((part.size, spec))
        return part

    monkeypatch.setattr(leaves, "read_part", read_part)
    params = load_params(directory, dtype=jnp.float32, sharding=lambda spec: param_sharding(mesh, spec))
    for num_values, spec in read:
        assert num_values == math.prod(param_sharding(mesh, spec).shard_shape(spec.shape))
    assert mesh_of(params) == mesh
    plain = load_params(directory, dtype=jnp.float32)
    assert mesh_of(plain) is None
    moved = shard_params(plain, config, mesh)
    for ours, others, wanted in zip(*map(jax.tree.leaves, (params, moved, plain)), strict=True):
        assert ours.sharding == others.sharding
        for shard, other in zip(ours.addressable_shards, others.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(wanted)[shard.index])
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(other.data))


def test_unsupported_sharding_axis_is_rejected(tmp_path):
    weights, raw = random_llama(1)
    mesh = make_mesh(LlamaConfig.from_hf(raw), devices(2))

    def within_heads(spec):
        if spec.axes != ("embed", "heads", "head_dim"):
            return param_sharding(mesh, spec)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "kv"))

    with pytest.raises(ValueError, match="sharding: wanted the first of the axes"):
        load_params(write(tmp_path, weights, raw), dtype=jnp.float32, sharding=within_heads)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("step", [paged_layer_step, paged_decode_step], ids=lambda step: step.__name__)
def test_layer_uses_only_all_reduces_after_attention_and_mlp(size, step):
    """Collectives inserted by the compiler: the two sums, one more for the masses, and for the embeddings of a decode
    step."""
    config = config_of(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    case = StepCase(step, 8, 64, num_segments=8, num_devices=size, config=config, dtype="float32")
    text = case.trace("cpu").lower().compile().as_text()
    moved = Counter(
        re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    )
    assert set(moved) == {"all-reduce"}
    if step is paged_layer_step:
        assert 2 <= moved["all-reduce"] <= 4
    else:
        assert moved["all-reduce"] == 2 * config.num_layers + (config.vocab_size % size == 0)
