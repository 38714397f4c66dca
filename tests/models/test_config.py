"""ccjax.models.llama3.config: reading config.json, rejecting unsupported options, and lossless round trips."""

from __future__ import annotations

import dataclasses

import pytest

from ccjax.models.llama3 import LLAMA2_7B, LLAMA3_2_1B, LLAMA3_8B, MIXTRAL_8X7B, LlamaConfig, RopeScaling, families
from ccjax.models.llama3.presets import PRESETS

# config.json of meta-llama/Llama-3.1-8B-Instruct, only the keys of the architecture.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B_V03 = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
# config.json of mistralai/Mixtral-8x7B-Instruct-v0.1.
MIXTRAL = MISTRAL_7B_V03 | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 32000,
}


def test_llama_3_1_8b_is_the_named_constant():
    assert LlamaConfig.from_hf(LLAMA_3_1_8B) == LLAMA3_8B


def test_rope_parameters_of_transformers_5():
    raw = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_theta", "rope_scaling")}
    raw["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    assert LlamaConfig.from_hf(raw) == LLAMA3_8B


def test_mistral_without_sliding_window_is_supported():
    config = LlamaConfig.from_hf(MISTRAL_7B_V03)
    assert (config.model_type, config.head_dim, config.rope_theta) == ("mistral", 128, 1e6)
    assert config.to_hf()["sliding_window"] is None  # a missing key would mean 4096


def test_mixtral_8x7b_is_the_named_constant():
    assert LlamaConfig.from_hf(MIXTRAL) == MIXTRAL_8X7B
    absent = ("sliding_window", "num_key_value_heads", "rms_norm_eps", "rope_theta", "num_local_experts")
    assert LlamaConfig.from_hf({key: MIXTRAL[key] for key in MIXTRAL if key not in absent}) == MIXTRAL_8X7B
    assert MIXTRAL_8X7B.to_hf()["sliding_window"] is None
    assert dataclasses.replace(MIXTRAL_8X7B, num_experts_per_token=1) != MIXTRAL_8X7B


def test_kv_identity_is_stable():
    """It is part of the fingerprints of stored KV: a change invalidates every stored cache."""

    def identity(d_ff: int, num_kv_heads: int, rope: str, vocab_size: int) -> str:
        heads = f'"head_dim": 128, "num_heads": 32, "num_kv_heads": {num_kv_heads}, "num_layers": 32'
        return f'{{"d_ff": {d_ff}, "d_model": 4096, {heads}, {rope}"vocab_size": {vocab_size}}}'

    scaling = '"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192'
    rope = f'"rope_scaling": {{{scaling}}}, "rope_theta": 500000.0, '
    assert LLAMA2_7B.kv_identity == identity(11008, 32, "", 32000)
    assert LLAMA3_8B.kv_identity == identity(14336, 8, rope, 128256)


def test_added_fields_with_defaults_leave_the_kv_identity_as_it_is():
    """Also in `rope_scaling`; other values than the default change it."""
    rope = dataclasses.make_dataclass("Rope", [("attention_factor", float, 1.0)], bases=(RopeScaling,), frozen=True)
    added = dataclasses.make_dataclass("Added", [("window", int, 0)], bases=(LlamaConfig,), frozen=True)
    given = {field.name: getattr(LLAMA3_8B, field.name) for field in dataclasses.fields(LLAMA3_8B)}
    longer = rope(**dataclasses.asdict(LLAMA3_8B.rope_scaling))
    config = added(**{**given, "rope_scaling": longer})
    assert config.kv_identity == LLAMA3_8B.kv_identity
    other = dataclasses.replace(config, rope_scaling=dataclasses.replace(longer, attention_factor=2.0))
    changed = {config.kv_identity, other.kv_identity, dataclasses.replace(config, window=64).kv_identity}
    assert len(changed) == 3


OTHER_VALUES = {
    "vocab_size": 99,
    "d_model": 64,
    "num_layers": 3,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 64,
    "d_ff": 128,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_embeddings": True,
    "num_experts": 4,
    "num_experts_per_token": 1,
    "attention_bias": True,
    "output_bias": True,
    "qk_norm": True,
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LlamaConfig)])
def test_every_field_that_changes_kv_or_answers_is_in_the_kv_identity(field, monkeypatch):
    options = dict.fromkeys(("num_experts", "attention_bias", "output_bias", "qk_norm"), "")
    monkeypatch.setitem(families._ALL, "mixtral", families.Family("", keys=options))
    config = dataclasses.replace(
        LLAMA3_8B, model_type="mixtral", num_experts=8, num_experts_per_token=2, max_position_embeddings=4096
    )
    if field in OTHER_VALUES:
        assert dataclasses.replace(config, **{field: OTHER_VALUES[field]}).kv_identity != config.kv_identity
    else:
        mistral = LlamaConfig.from_hf(MISTRAL_7B_V03)
        other = {"model_type": "llama", "max_position_embeddings": 131072}  # both without effect on KV
        assert dataclasses.replace(mistral, **{field: other[field]}).kv_identity == mistral.kv_identity


def test_absent_keys_use_transformers_defaults():
    raw = {key: MISTRAL_7B_V03[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    config = LlamaConfig.from_hf({**raw, "model_type": "llama", "num_attention_heads": 32})
    assert (config.num_kv_heads, config.rope_theta, config.rms_norm_eps) == (32, 10000.0, 1e-6)
    assert (config.tie_embeddings, config.max_position_embeddings, config.rope_scaling) == (False, 2048, None)


@pytest.mark.parametrize("config", [*PRESETS.values(), LlamaConfig.from_hf(MISTRAL_7B_V03)])
def test_config_round_trips_through_hf_format(config: LlamaConfig):
    assert LlamaConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window.*None.*4096"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_token.*1 to num_experts=8.*9"),
        (MIXTRAL | {"num_experts_per_tok": 0}, "num_experts_per_token.*1 to num_experts=8.*0"),
        (MIXTRAL | {"num_local_experts": 0}, "num_experts: wanted a positive integer for mixtral, got 0"),
        ({"model_type": "gpt2"}, "model_type.*'llama'.*got 'gpt2'"),
        ({"model_type": None}, "model_type.*got None"),
        ({"hidden_act": "gelu"}, "hidden_act.*'silu'.*'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window.*4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type.*'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type.*'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor.*missing"),
        ({"num_key_value_heads": 5}, "num_kv_heads.*divisor of num_heads=32.*5"),
        ({"head_dim": 33}, "head_dim.*even.*33"),
        ({"num_hidden_layers": 0}, "num_layers.*positive.*0"),
        ({"vocab_size": None}, "wrong type"),
    ],
)
def test_error_names_the_unsupported_option(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(LLAMA_3_1_8B | change)
    with pytest.raises(ValueError, match="'hidden_size' is missing"):
        LlamaConfig.from_hf({key: value for key, value in LLAMA_3_1_8B.items() if key != "hidden_size"})
    with pytest.raises(ValueError, match="num_experts: wanted 0 for llama, got 8"):
        dataclasses.replace(LLAMA3_8B, num_experts=8, num_experts_per_token=2)
    with pytest.raises(ValueError, match="qk_norm: wanted False for llama, got True"):
        dataclasses.replace(LLAMA3_8B, qk_norm=True)
    with pytest.raises(ValueError, match="model_type: wanted one of .*'llama'.*got 'gpt2'"):
        dataclasses.replace(LLAMA3_8B, model_type="gpt2")


def test_mistral_without_sliding_window_key_is_rejected():
    with pytest.raises(ValueError, match="sliding_window.*None.*4096"):
        LlamaConfig.from_hf({key: value for key, value in MISTRAL_7B_V03.items() if key != "sliding_window"})


@pytest.mark.peers
@pytest.mark.parametrize(
    "config",
    [
        LLAMA2_7B,
        LLAMA3_8B,
        LLAMA3_2_1B,
        MIXTRAL_8X7B,
        dataclasses.replace(LLAMA2_7B, model_type="mistral", rope_theta=1e6, head_dim=96),
        dataclasses.replace(LLAMA2_7B, rope_theta=2e6, rope_scaling=RopeScaling(4.0, 1.5, 6.0, 1024)),
    ],
)
def test_transformers_reads_what_we_write(config: LlamaConfig, tmp_path):
    import json

    import transformers

    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    # transformers 5 keeps RoPE in one dict, transformers 4 in two attributes.
    rope = getattr(theirs, "rope_parameters", None) or {**(theirs.rope_scaling or {}), "rope_theta": theirs.rope_theta}
    assert rope["rope_theta"] == config.rope_theta
    assert rope.get("rope_type", "default") == ("default" if config.rope_scaling is None else "llama3")
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        assert {key: rope[key] for key in scaling} == scaling
    assert getattr(theirs, "sliding_window", None) is None
    assert (theirs.head_dim, theirs.num_key_value_heads) == (config.head_dim, config.num_kv_heads)
    theirs.save_pretrained(tmp_path / "again")
    assert LlamaConfig.from_hf(json.loads((tmp_path / "again/config.json").read_text())) == config
