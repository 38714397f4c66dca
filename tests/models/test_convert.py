"""ccjax.models.llama3.convert against directories written by the tests and the NumPy oracle; no transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ccjax.models.llama3 import LlamaConfig, forward, init_params, leaves
from ccjax.models.llama3.convert import (
    CheckpointError,
    fingerprint,
    load_config,
    load_params,
    save_pretrained,
)
from tests.conftest import ROOT
from tests.models.held import Held
from tests.oracles import llama_forward, random_llama, read_llama2c, read_llama2c_pieces

TOKENS = np.random.default_rng(0).integers(0, 97, 40)
WQ = "model.layers.1.self_attn.q_proj.weight"
quick_forward = jax.jit(forward, static_argnums=1)


def write(directory: Path, weights: dict[str, np.ndarray], config: dict, shards: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: w for i, (name, w) in enumerate(weights.items()) if i % shards == number}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def logits_of(directory: Path, dtype=jnp.float32) -> np.ndarray:
    params = load_params(directory, dtype=dtype)
    return np.asarray(quick_forward(params, load_config(directory), jnp.asarray(TOKENS[None], jnp.int32))[0])


def assert_same_params(ours, others):
    assert jax.tree.structure(ours) == jax.tree.structure(others)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def fused(weights: dict[str, np.ndarray], num_experts: int = 4) -> dict[str, np.ndarray]:
    """The same weights in transformers 5's own layout."""
    out = {}
    for name, weight in weights.items():
        if "block_sparse_moe" not in name:
            out[name] = weight
        elif name.endswith("gate.weight"):
            block = name.replace("block_sparse_moe.gate.weight", "")
            out[block + "mlp.gate.weight"] = weight
            w1, w2, w3 = (
                np.stack([weights[f"{block}block_sparse_moe.experts.{e}.w{n}.weight"] for e in range(num_experts)])
                for n in (1, 2, 3)
            )
            out[block + "mlp.experts.gate_up_proj"] = np.concatenate([w1, w3], 1)
            out[block + "mlp.experts.down_proj"] = w2
    return out


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_leaves_are_cast_once_from_the_stored_type(tmp_path, stored, wanted):
    weights, config = random_llama(2)
    weights = {name: w.astype(stored) for name, w in weights.items()}
    params = load_params(write(tmp_path, weights, config), dtype=wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    expected = weights[WQ].astype(wanted).reshape(8, 8, 64).transpose(2, 0, 1)
    np.testing.assert_array_equal(np.asarray(params.layers[1].wq), expected)


def test_saving_over_an_earlier_save_replaces_it(tmp_path):
    config = LlamaConfig.from_hf(random_llama(0)[1])
    first, second = (init_params(config, jax.random.key(seed)) for seed in (1, 2))
    save_pretrained(first, config, tmp_path)
    save_pretrained(second, config, tmp_path, max_shard_bytes=60_000)
    assert_same_params(load_params(tmp_path, dtype=jnp.float32), second)
    assert not (tmp_path / "model.safetensors").exists()
    save_pretrained(first, config, tmp_path, dtype=jnp.bfloat16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), first)
    assert_same_params(load_params(tmp_path, dtype=jnp.bfloat16), rounded)


def test_saving_params_that_do_not_match_the_config_is_rejected(tmp_path):
    config = LlamaConfig.from_hf(random_llama(0)[1])
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match="params: wanted the tree"):
        save_pretrained(params, dataclasses.replace(config, num_layers=2), tmp_path)
    with pytest.raises(ValueError, match=r"gate_proj.*wanted shape \(64, 100\).*got \(64, 112\)"):
        save_pretrained(params, dataclasses.replace(config, d_ff=100), tmp_path)
    mixture = LlamaConfig.from_hf(random_llama(0, **MIXTURE)[1])
    with pytest.raises(ValueError, match=r"w1\.weight: wanted shape \(4, 64, 100\).*got \(4, 64, 112\)"):
        save_pretrained(init_params(mixture, jax.random.key(0)), dataclasses.replace(mixture, d_ff=100), tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save_pretrained(params, config, tmp_path, max_shard_bytes=0)
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob(".*"))


def test_redundant_tensors_are_ignored(tmp_path):
    weights, config = random_llama(5, tie_word_embeddings=True)
    plain = load_params(write(tmp_path / "a", weights, config), dtype=jnp.float32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    assert_same_params(load_params(write(tmp_path / "b", weights, config), dtype=jnp.float32), plain)


@pytest.mark.parametrize(
    ("layout", "shards", "stored", "shape"),
    [
        (dict, 1, np.float32, {}),
        (dict, 3, np.float32, {"head_dim": 24, "tie_word_embeddings": True}),
        (dict, 3, np.float32, {"num_key_value_heads": 8}),
        (dict, 1, np.float32, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        (dict, 1, np.float32, MIXTURE),
        (dict, 3, ml_dtypes.bfloat16, MIXTURE),
        (fused, 1, ml_dtypes.bfloat16, MIXTURE),
        (fused, 3, np.float32, MIXTURE),
    ],
)
def test_loaded_model_matches_the_oracle(tmp_path, layout, shards, stored, shape):
    weights, config = random_llama(9, **shape)
    weights = {name: w.astype(stored) for name, w in weights.items()}
    directory, steps = write(tmp_path, layout(weights), config, shards), []
    expected, _ = llama_forward(weights, config, TOKENS)
    np.testing.assert_allclose(logits_of(directory), expected, atol=1e-4)
    params = load_params(directory, dtype=np.float32, progress=lambda *at: steps.append(at))
    assert len(steps) == len(jax.tree.leaves(params)) + 1 and steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] >= steps[-2][0]
    assert steps[-2][0] == sum(w.nbytes for w in weights.values())


@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [(dict, {"head_dim": 24}), (dict, {"head_dim": 24, "tie_word_embeddings": True}), (fused, MIXTURE)],
    ids=["dense", "tied", "mixture of experts"],
)
def test_save_and_load_round_trips_and_saving_again_is_byte_equal(tmp_path, layout, shape, max_shard_bytes):
    weights, raw = random_llama(4, **shape)
    config = LlamaConfig.from_hf(raw)
    first = params = load_params(write(tmp_path / "a", layout(weights), raw), dtype=jnp.float32)
    for name in ("b", "c"):
        save_pretrained(params, config, tmp_path / name, max_shard_bytes=max_shard_bytes)
        assert load_config(tmp_path / name) == config
        params = load_params(tmp_path / name, dtype=jnp.float32)
        assert_same_params(params, first)
    files = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "c").iterdir())
    assert all((tmp_path / "b" / file).read_bytes() == (tmp_path / "c" / file).read_bytes() for file in files)
    assert ("model.safetensors" in files) == (max_shard_bytes == 10**9)
    stored = {}
    for path in (tmp_path / "b").glob("*.safetensors"):
        stored |= load_file(path)
        assert max_shard_bytes == 10**9 or path.stat().st_size < 60_000 + (8192 if shape is MIXTURE else 4096)
    assert stored.keys() == weights.keys()
    for name, w in weights.items():
        np.testing.assert_array_equal(stored[name], w)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (dict, lambda w: w.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"), r"tensor '.*1\.block.*3\.w2"),
        (dict, lambda w: w.pop("model.layers.1.block_sparse_moe.gate.weight"), "block_sparse_moe.gate.weight"),
        (
            dict,
            lambda w: w.update({"model.layers.0.block_sparse_moe.experts.4.w1.weight": np.zeros((1, 1), np.float32)}),
            "3 mixtral layers, got tensor .*experts.4.w1",
        ),
        (fused, lambda w: w.pop("model.layers.2.mlp.experts.down_proj"), "mlp.experts.down_proj"),
        (
            fused,
            lambda w: w.update({"model.layers.2.mlp.experts.down_proj": np.zeros((4, 112, 64), np.float32)}),
            r"down_proj': wanted shape \[4, 64, 112\], got \[4, 112, 64\]",
        ),
    ],
)
def test_error_names_the_invalid_expert_tensor(tmp_path, layout, change, message):
    weights, config = random_llama(4, **MIXTURE)
    weights = layout(weights)
    change(weights)
    with pytest.raises(CheckpointError, match=message):
        load_params(write(tmp_path, weights, config), dtype=jnp.float32)


def test_demo_model_fingerprint_is_stable():
    """A change invalidates every stored cache."""
    directory = ROOT / "ccjax/assets/demo_model"
    assert fingerprint(directory) == "93b15efd38539b315cf97e3bf4bd04af990ae498d89885b962d0cb433b3888cf"


def _break_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _rewrite(change):
    def run(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return run


def _shard(change):
    def run(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        (directory / "model.safetensors").unlink()
        write(directory, weights, config, 2)
        change(directory)

    return run


def _map_to(name: str, file: object):
    def change(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        held = index["weight_map"][name]
        other = next(shard for shard in sorted(set(index["weight_map"].values())) if shard != held)
        index["weight_map"][name] = other if file == "other" else file
        path.write_text(json.dumps(index))

    return _shard(change)


ERRORS = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json: wanted a JSON file, got no such file"),
    "broken config": (_break_json, r"config\.json: wanted a JSON object"),
    "list config": (lambda d: (d / "config.json").write_text("[1]"), r"config\.json: wanted a JSON object, got list"),
    "architecture": (
        lambda d: (d / "config.json").write_text('{"model_type": "gpt2"}'),
        r"config\.json: .*model_type: wanted one of .*'llama'.*got 'gpt2'",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"wanted model\.safetensors or .* got neither"),
    "bin": (_only_bin, r"got pytorch_model\.bin; convert PyTorch \.bin weights to safetensors"),
    "truncated": (_truncate, r"model\.safetensors: wanted a whole safetensors file"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), r"model\.safetensors: wanted a whole safetensors"),
    "missing": (_rewrite(lambda w: w.pop(WQ)), rf"wanted tensor '{WQ}', got no such tensor"),
    "unknown": (
        _rewrite(lambda w: w.update({f"extra.{i}": np.zeros(2, np.float32) for i in range(10)})),
        r"model\.safetensors: .*3 llama layers, got tensor 'extra\.0', .* and 2 more",
    ),
    "too many layers": (
        _rewrite(lambda w: w.update({WQ.replace(".1.", ".3."): w[WQ]})),
        r"3 llama layers, got tensor 'model\.layers\.3\.self_attn",
    ),
    "shape": (
        _rewrite(lambda w: w.update({WQ: np.zeros((64, 32), np.float32)})),
        rf"model\.safetensors: tensor '{WQ}': wanted shape \[64, 64\], got \[64, 32\]",
    ),
    "quantised": (
        _rewrite(lambda w: w.update({WQ: np.zeros((64, 64), np.int8)})),
        rf"tensor '{WQ}': wanted one of F64, F32, F16, BF16, got I8",
    ),
    "missing shard": (
        _shard(lambda d: (d / "model-00002-of-00002.safetensors").unlink()),
        r"model-00002-of-00002\.safetensors: wanted a shard named in model\.safetensors\.index\.json, got no such file",
    ),
    "tensor not in its shard": (
        _map_to(WQ, "other"),
        rf"model-0000.-of-00002\.safetensors: tensor '{WQ}': wanted here by model\.safetensors\.index\.json, got no",
    ),
    "shard outside": (_map_to(WQ, "../x.safetensors"), r"index\.json: tensor .*same directory, got '\.\./x"),
    "shard number": (_map_to(WQ, 7), r"index\.json: tensor .*wanted a file name .*got 7"),
    "empty index": (
        _shard(lambda d: (d / "model.safetensors.index.json").write_text("{}")),
        r"index\.json: wanted an object under 'weight_map', got None",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_file_tensor_expected_and_actual(tmp_path, case):
    weights, config = random_llama(6)
    write(tmp_path, weights, config)
    damage, message = ERRORS[case]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_params(tmp_path, dtype=jnp.float32)


def test_fingerprint_depends_only_on_content(tmp_path):
    weights, config = random_llama(7)
    original = fingerprint(write(tmp_path / "a", weights, config))
    assert len(original) == 64
    unused = {"use_cache": True, "max_position_embeddings": 64}
    assert fingerprint(write(tmp_path / "copy", weights, {**config, **unused})) == original
    seen = {original}
    for name, w in weights.items():  # the last bit of the last element of each tensor
        changed = w.copy()
        changed.reshape(-1).view(np.uint32)[-1] ^= 1
        seen.add(fingerprint(write(tmp_path / "b", {**weights, name: changed}, config)))
    seen.add(fingerprint(write(tmp_path / "b", weights, {**config, "rope_theta": 10001.0})))
    seen.add(fingerprint(write(tmp_path / "b", weights, {**config, "rms_norm_eps": 1e-6})))
    assert len(seen) == len(weights) + 3


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_loading_holds_one_tensor_at_a_time(tmp_path, monkeypatch, quantization):
    weights, config = random_llama(8)
    held, read = Held(), leaves.read_part
    monkeypatch.setattr(leaves, "read_part", lambda *arguments: held.show(read(*arguments)))
    monkeypatch.setattr(leaves, "_placed", lambda spec, host, sharding: spec.shape)
    load_params(write(tmp_path, weights, config), dtype=jnp.float32, quantization=quantization)
    assert held.most == 1


def test_real_trained_weights_generate_the_known_story(tmp_path, test_data):
    """Greedy text of llama2.c's own test (test_all.py, temperature 0) through the oracle and through our forward."""
    folder = test_data("weights_stories260K")
    weights, config = read_llama2c(folder / "stories260K.bin")
    pieces = read_llama2c_pieces(folder / "tok512.bin", config["vocab_size"])
    params = load_params(write(tmp_path, weights, config | {"hidden_act": "silu"}), dtype=jnp.float32)
    ours_config = load_config(tmp_path)
    step = jax.jit(lambda params, ids: forward(params, ours_config, ids))
    num_tokens = 100
    ours = [1]
    for length in range(1, num_tokens):
        padded = jnp.asarray([ours + [0] * (num_tokens - length)], jnp.int32)
        ours.append(int(step(params, padded)[0, length - 1].argmax()))
    oracle = llama_forward(weights, config, ours)[0]  # no row sees later tokens
    assert ours[1:] == oracle[:-1].argmax(-1).tolist()
    text = b"".join(pieces[token] for token in ours[1:]).decode().strip()
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
        "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
    )
    logits = np.asarray(step(params, jnp.asarray([ours], jnp.int32))[0])
    np.testing.assert_allclose(logits, oracle, atol=2e-4)
