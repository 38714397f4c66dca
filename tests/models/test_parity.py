"""Our forward, loader and writer against Hugging Face transformers on the same random weights, float32 on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ccjax.models.llama3 import LlamaConfig, Params, forward, init_params
from ccjax.models.llama3.config import RopeScaling
from ccjax.models.llama3.convert import load_config, load_params, save_pretrained
from ccjax.models.llama3.fused import fuse

pytestmark = pytest.mark.peers

ATOL = 1e-4
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# `tokens`: long enough that angles in every band of the scaling get large.
CASES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 8},
    "gqa 2": {"num_key_value_heads": 4},
    "gqa 4": {"num_key_value_heads": 2},
    "gqa 8": {"num_key_value_heads": 1},
    "llama3 rope": {"rope_scaling": SCALING, "rope_theta": 500000.0, "tokens": 700},
    "llama3.2 rope": {"rope_scaling": SCALING | {"factor": 32.0}, "rope_theta": 500000.0, "tokens": 300},
    "large theta": {"rope_theta": 5e6, "tokens": 300},
    "tied": {"tie_word_embeddings": True},
    "head_dim 24": {"head_dim": 24},
    "head_dim 40": {"head_dim": 40, "num_key_value_heads": 4},
    "narrow heads": {"head_dim": 4},
    "eps": {"rms_norm_eps": 1e-2},
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "tokens": 200},
    "mixtral 3 of 4": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3, "rope_theta": 1e4},
}


def make_peer(case: str, seed: int = 0) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    changes = {key: value for key, value in CASES[case].items() if key != "tokens"}
    fields = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 112,
        "max_position_embeddings": 2048,
        "initializer_range": 0.125,
        "attn_implementation": "eager",
        **changes,
    }
    model_type = fields.pop("model_type", "llama")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
    return model


def peer_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()


def our_logits(params: Params, config: LlamaConfig, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(forward(params, config, jnp.asarray(tokens[None], jnp.int32))[0])


def tokens_of(case: str) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 97, CASES[case].get("tokens", 48))


def save_peer(model: Any, directory: Path, **options: Any) -> tuple[Params, LlamaConfig]:
    model.save_pretrained(directory, **options)
    return load_params(directory, dtype=jnp.float32), load_config(directory)


def load_peer(directory: Path, dtype: str) -> Any:
    """Loads the model from files, because `.to(dtype)` would also round its RoPE frequencies."""
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(tmp_path, case):
    model, tokens = make_peer(case), tokens_of(case)
    params, config = save_peer(model, tmp_path)
    expected = peer_logits(model, tokens)
    assert np.abs(expected).max() > 1  # the scale fits the tolerance
    np.testing.assert_allclose(our_logits(params, config, tokens), expected, atol=ATOL, rtol=0)
    np.testing.assert_allclose(our_logits(fuse(params), config, tokens), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("is_original", [True, False])
def test_experts_in_both_transformers_layouts_match(tmp_path, is_original, max_shard_size):
    model, tokens = make_peer("mixtral"), tokens_of("mixtral")
    options = {} if is_original else {"save_original_format": False}  # only transformers 5
    params, config = save_peer(model, tmp_path, max_shard_size=max_shard_size, **options)
    names = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) != is_original
    assert ("model.layers.0.block_sparse_moe.experts.7.w2.weight" in names) == is_original
    np.testing.assert_allclose(our_logits(params, config, tokens), peer_logits(model, tokens), atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", ["gqa 4", "tied", "mixtral"])
def test_logits_of_a_sharded_checkpoint_match_transformers(tmp_path, case):
    model, tokens = make_peer(case), tokens_of(case)
    params, config = save_peer(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    np.testing.assert_allclose(our_logits(params, config, tokens), peer_logits(model, tokens), atol=ATOL, rtol=0)


def test_bfloat16_weights_computed_in_float32_match_transformers(tmp_path):
    tokens = tokens_of("gqa 4")
    params, config = save_peer(make_peer("gqa 4").bfloat16(), tmp_path)
    expected = peer_logits(load_peer(tmp_path, "float32"), tokens)
    np.testing.assert_allclose(our_logits(params, config, tokens), expected, atol=ATOL, rtol=0)


def test_bfloat16_logits_are_about_as_accurate_as_those_of_transformers(tmp_path):
    tokens = tokens_of("gqa 4")
    make_peer("gqa 4").bfloat16().save_pretrained(tmp_path)
    params, config = load_params(tmp_path, dtype=jnp.bfloat16), load_config(tmp_path)
    theirs = peer_logits(load_peer(tmp_path, "bfloat16"), tokens)
    exact = peer_logits(load_peer(tmp_path, "float32"), tokens)
    ours = our_logits(params, config, tokens)
    their_error, our_error = (float(np.sqrt(np.mean((logits - exact) ** 2))) for logits in (theirs, ours))
    assert 0 < our_error < 1.5 * their_error


@pytest.mark.parametrize("case", ["gqa 4", "llama3 rope", "tied", "head_dim 24", "mistral", "mixtral"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
def test_transformers_loads_what_we_save(tmp_path, case, dtype, max_shard_bytes):
    raw = make_peer(case).config.to_dict()
    config, tokens = LlamaConfig.from_hf(raw), tokens_of(case)
    params = init_params(config, jax.random.key(3), dtype)
    save_pretrained(params, config, tmp_path, max_shard_bytes=max_shard_bytes)
    model = load_peer(tmp_path, "float32")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    np.testing.assert_allclose(our_logits(wide, config, tokens), peer_logits(model, tokens), atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", ["gqa 4", "llama3 rope", "tied", "mixtral"])
def test_32_greedy_tokens_match_transformers(tmp_path, case):
    import torch

    model = make_peer(case)
    params, config = save_peer(model, tmp_path)
    prompt = np.random.default_rng(2).integers(0, 97, 16)
    model.generation_config.eos_token_id = None
    expected = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, 16, dtype=torch.long),
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=0,
    )[0].tolist()
    step = jax.jit(lambda params, ids: forward(params, config, ids))
    tokens = prompt.tolist()
    while len(tokens) < 48:
        padded = jnp.asarray([tokens + [0] * (48 - len(tokens))], jnp.int32)
        tokens.append(int(step(params, padded)[0, len(tokens) - 1].argmax()))
    assert tokens == expected
    assert len(set(tokens[16:])) > 4  # not one repeated token


def _swap_gate_and_up(params: Params, config: LlamaConfig) -> tuple[Params, LlamaConfig]:
    layers = tuple(dataclasses.replace(layer, w_gate=layer.w_up, w_up=layer.w_gate) for layer in params.layers)
    return dataclasses.replace(params, layers=layers), config


MUTANTS = {
    "theta off by 1 %": lambda params, config: (params, dataclasses.replace(config, rope_theta=505000.0)),
    "scaling dropped": lambda params, config: (params, dataclasses.replace(config, rope_scaling=None)),
    "scaling factor off by 1 %": lambda params, config: (
        params,
        dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, factor=8.08)),
    ),
    "gate and up swapped": _swap_gate_and_up,
    "eps 1e-5 for 1e-6": lambda params, config: (params, dataclasses.replace(config, rms_norm_eps=1e-5)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_model_exceeds_the_tolerance(tmp_path, mutant):
    model, tokens = make_peer("llama3 rope"), tokens_of("llama3 rope")
    params, config = save_peer(model, tmp_path)
    assert isinstance(config.rope_scaling, RopeScaling)
    params, config = MUTANTS[mutant](params, config)
    assert np.abs(our_logits(params, config, tokens) - peer_logits(model, tokens)).max() > 5 * ATOL


def _other_experts(params: Params) -> Params:
    layers = tuple(dataclasses.replace(layer, w_up=layer.w_up[::-1]) for layer in params.layers)
    return dataclasses.replace(params, layers=layers)


EXPERT_MUTANTS = {
    "up matrices of other experts": _other_experts,
    "one expert fewer": lambda params: dataclasses.replace(
        params, layers=tuple(dataclasses.replace(layer, num_chosen=1) for layer in params.layers)
    ),
    "one expert more": lambda params: dataclasses.replace(
        params, layers=tuple(dataclasses.replace(layer, num_chosen=3) for layer in params.layers)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", EXPERT_MUTANTS)
def test_wrong_experts_exceed_the_tolerance(tmp_path, mutant):
    model, tokens = make_peer("mixtral"), tokens_of("mixtral")
    params, config = save_peer(model, tmp_path)
    wrong = our_logits(EXPERT_MUTANTS[mutant](params), config, tokens)
    assert np.abs(wrong - peer_logits(model, tokens)).max() > 100 * ATOL
