"""Weights in 8 bits: errors within float64 bounds that broken variants exceed, memory, and placement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ccjax.loading.model import DEMO_MODEL
from ccjax.models.llama3 import LLAMA3_70B, abstract_params, forward, init_params, leaves
from ccjax.models.llama3.convert import CheckpointError, load_config, load_params, save_pretrained
from ccjax.models.llama3.params import ParamSpec, layer_table, top_table
from ccjax.models.llama3.presets import PRESETS, preset
from ccjax.models.llama3.quantized import WEIGHT_FORMATS, QuantizedWeight, project, quantize, quantize_on_host

FORMATS = tuple(WEIGHT_FORMATS)
# num_heads equals head_dim, and inputs equal outputs, so that scales of a wrong axis have the right shape.
SQUARE = dataclasses.replace(preset("tiny", 0), d_model=64, num_heads=8, num_kv_heads=8, head_dim=8, d_ff=64)
PRODUCTS = {
    "wq": "nd,dqh->nqh",
    "wk": "nd,dkh->nkh",
    "wv": "nd,dkh->nkh",
    "wo": "nqh,qhd->nd",
    "w_gate": "nd,df->nf",
    "w_up": "nd,df->nf",
    "w_down": "nf,fd->nd",
}


def spread(spec: ParamSpec, seed: int) -> np.ndarray:
    """Weights whose channels differ by a factor of a thousand, so that scales matter."""
    random = np.random.default_rng(seed)
    scales = spec.scales
    assert scales is not None
    sizes = np.exp(random.uniform(-7, 0, scales.shape))
    wide = np.expand_dims(sizes, spec.input_axes)
    return (random.standard_normal(spec.shape) * wide).astype(np.float32)


def half_step(weight: np.ndarray, spec: ParamSpec, name: str) -> np.ndarray:
    """Largest error of each weight, float64, from the definition of the format: half the distance between values."""
    wide = np.abs(weight.astype(np.float64))
    unit = wide.max(spec.input_axes, keepdims=True) / WEIGHT_FORMATS[name].largest
    if name == "int8":
        return np.broadcast_to(0.5 * unit, weight.shape)
    # e4m3: 3 bits of mantissa, the smallest normal number is 2^-6.
    exponent = np.floor(np.log2(np.maximum(wide / unit, 2.0**-6)))
    return 0.5 * 2.0 ** (exponent - 3) * unit


def on_host(weight: np.ndarray, spec: ParamSpec, name: str) -> QuantizedWeight:
    values, scales = quantize_on_host(weight, spec.input_axes, name)
    return QuantizedWeight(jnp.asarray(values), jnp.asarray(scales))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("field", PRODUCTS)
def test_each_weight_is_rounded_to_nearest(field, name):
    spec = layer_table(SQUARE)[field]
    weight = spread(spec, 0)
    found = on_host(weight, spec, name)
    assert found.shape == spec.shape and found.values.dtype == WEIGHT_FORMATS[name].dtype
    assert spec.scales is not None and found.scales.shape == spec.scales.shape and found.scales.dtype == jnp.float32
    back = np.asarray(found.values, np.float64) * np.expand_dims(np.asarray(found.scales, np.float64), spec.input_axes)
    assert (np.abs(back - weight) <= half_step(weight, spec, name) * (1 + 1e-5)).all()
    assert (np.abs(np.asarray(found.values, np.float64)).max(spec.input_axes) == WEIGHT_FORMATS[name].largest).all()


def _without_scales(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight.values, jnp.ones_like(weight.scales))


def _transposed(weight: QuantizedWeight) -> QuantizedWeight:
    scales = weight.scales.T if weight.scales.ndim > 1 else weight.scales[::-1]
    return QuantizedWeight(weight.values, scales)


def _one_scale(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight.values, jnp.full_like(weight.scales, weight.scales.mean()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("field", PRODUCTS)
def test_quantized_product_error_is_within_its_bound_and_mutants_exceed_it(field, name):
    """|sum x w - sum x w'| <= sum |x| half_step(w), plus the float32 rounding of the sum."""
    spec = layer_table(SQUARE)[field]
    weight = spread(spec, 1)
    inputs = [spec.shape[axis] for axis in spec.input_axes]
    x = np.random.default_rng(2).standard_normal((9, *inputs)).astype(np.float32)
    true = np.einsum(PRODUCTS[field], x.astype(np.float64), weight.astype(np.float64))
    num_summed = math.prod(inputs)
    magnitude = np.einsum(PRODUCTS[field], np.abs(x.astype(np.float64)), np.abs(weight.astype(np.float64)))
    bound = np.einsum(PRODUCTS[field], np.abs(x.astype(np.float64)), half_step(weight, spec, name))
    bound = bound + 2 * num_summed * 2.0**-24 * magnitude
    good = on_host(weight, spec, name)

    def error(broken: Callable[[QuantizedWeight], QuantizedWeight]) -> np.ndarray:
        subscripts = "..." + PRODUCTS[field].replace("->", "->...")
        return np.abs(np.asarray(project(subscripts, jnp.asarray(x), broken(good)), np.float64) - true)

    assert (error(lambda weight: weight) <= bound).all()
    for broken in (_without_scales, _transposed, _one_scale):
        assert (error(broken) > 2 * bound).mean() > 0.3, broken
    # Scales per input channel, applied as if per output channel: right shape, wrong axis.
    wrong = tuple(axis for axis in range(len(spec.shape)) if axis not in spec.input_axes)
    values, scales = np.asarray(good.values), np.abs(weight).max(wrong).reshape(-1)[: good.scales.size]
    per_input = QuantizedWeight(jnp.asarray(values), jnp.asarray(np.resize(scales, good.scales.shape) / 127))
    assert (error(lambda _: per_input) > 2 * bound).mean() > 0.3


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_activations_beside_int8_lose_nothing_that_float32_shows(monkeypatch, num_rows):
    """Against the float64 product with the rounded weight; rows differ by a factor of a million. Without the second
    int8 the error is larger."""
    spec = layer_table(SQUARE)["w_down"]
    weight = on_host(spread(spec, 7), spec, "int8")
    random = np.random.default_rng(8)
    x = (random.standard_normal((num_rows, 64)) * np.exp(random.uniform(-14, 0, (num_rows, 1)))).astype(np.float32)
    back = np.asarray(weight.values, np.float64) * np.asarray(weight.scales, np.float64)
    most = np.abs(x).max(1, keepdims=True) * np.abs(back).sum(0) / (2 * 127 * 254) + 1e-6 * np.abs(x) @ np.abs(back)

    def error() -> np.ndarray:
        return np.abs(np.asarray(project("...nf,fd->...nd", jnp.asarray(x), weight), np.float64) - x @ back)

    assert (error() <= most).all()
    monkeypatch.setattr("ccjax.models.llama3.quantized._FINE", 1e9)
    assert (error() > most).mean() > 0.3


@pytest.mark.parametrize("name", FORMATS)
def test_gradient_is_that_of_activations_without_rounding(name):
    random = np.random.default_rng(8)
    x, sums = random.standard_normal((3, 40), np.float32), random.standard_normal((3, 24), np.float32)
    weight = quantize(jnp.asarray(random.standard_normal((40, 24), np.float32)), (0,), name)

    got = jax.jit(jax.grad(lambda x: (sums * project("nd,df->nf", x, weight)).sum()))(x)
    values, scales = (np.asarray(part, np.float64) for part in (weight.values, weight.scales))
    np.testing.assert_allclose(got, sums * scales @ values.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_activations_keep_their_dtype_within_bfloat16_rounding(name):
    spec = layer_table(SQUARE)["w_up"]
    weight = on_host(spread(spec, 3), spec, name)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((5, 64)), jnp.bfloat16)
    narrow = project("...nd,df->...nf", x, weight)
    wide = np.asarray(project("...nd,df->...nf", x.astype(jnp.float32), weight))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(narrow, np.float32), wide, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_host_and_device_quantization_agree_for_any_block_size(monkeypatch, name, kind):
    spec = layer_table(SQUARE)["wo"]
    weight = spread(spec, 5).astype(kind)
    values, scales = quantize_on_host(weight, spec.input_axes, name)
    monkeypatch.setattr("ccjax.models.llama3.quantized._BLOCK", 130)
    again = quantize_on_host(weight, spec.input_axes, name)
    np.testing.assert_array_equal(values, again[0])
    np.testing.assert_array_equal(scales, again[1])
    device = quantize(jnp.asarray(weight), spec.input_axes, name)
    np.testing.assert_array_equal(values, device.values)
    np.testing.assert_array_equal(scales, device.scales)


def test_each_expert_has_its_own_scales():
    """In stacked experts, the expert axis is neither summed over nor shared."""
    spec = ParamSpec("e", (3, 16, 8), ("experts", "embed", "ffn"), 1.0, num_inputs=16)
    assert spec.input_axes == (1,)
    assert spec.scales is not None and (spec.scales.shape, spec.scales.axes) == ((3, 8), ("experts", "ffn"))
    weight = spread(spec, 6)
    values, scales = quantize_on_host(weight, spec.input_axes, "int8")
    for number in range(3):
        alone = quantize_on_host(weight[number], (0,), "int8")
        np.testing.assert_array_equal(values[number], alone[0])
        np.testing.assert_array_equal(scales[number], alone[1])


def test_zero_channel_is_exact_and_nonfinite_weights_are_rejected():
    weight = np.zeros((4, 3), np.float32)
    weight[:, 1] = 2.0
    for name in FORMATS:
        values, scales = quantize_on_host(weight, (0,), name)
        np.testing.assert_array_equal(values.astype(np.float32) * scales, weight)
        for bad in (np.nan, np.inf, -np.inf):
            with pytest.raises(ValueError, match="wanted finite weights"):
                quantize_on_host(np.where(weight > 0, np.float32(bad), weight), (0,), name)


def test_embeddings_norms_and_head_are_not_quantized():
    config = preset("llama3-8b", 0)
    kept = {name for name, spec in {**top_table(config), **layer_table(config)}.items() if spec.scales is None}
    assert kept == {"embedding", "final_norm", "lm_head", "attention_norm", "mlp_norm"}
    wo = layer_table(config)["wo"].scales
    wq = layer_table(config)["wq"].scales
    assert wo is not None and (wo.shape, wo.axes) == ((4096,), ("embed",))
    assert wq is not None and (wq.shape, wq.axes) == ((32, 128), ("heads", "head_dim"))
    assert ParamSpec("router", (8, 4), ("embed", "router"), 1.0, num_inputs=8).scales is None


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_tree_takes_about_one_byte_per_weight(name):
    """Llama-3-70B: 1 byte per weight except embedding and head, and little else."""
    plain, packed = (abstract_params(LLAMA3_70B, jnp.bfloat16, quantization=kind) for kind in (None, name))
    sizes = [
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in (plain, packed)
    ]
    assert sizes[0] == pytest.approx(141.1e9, rel=1e-3) and sizes[1] == pytest.approx(72.7e9, rel=1e-3)
    config = preset("tiny", 0)
    made = init_params(config, jax.random.key(0), jnp.bfloat16, quantization=name)
    wanted = abstract_params(config, jnp.bfloat16, quantization=name)
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for leaf, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_random_weights_match_the_plain_model_and_can_be_sharded(name):
    config = PRESETS["tiny"]
    plain = init_params(config, jax.random.key(1))
    packed = init_params(config, jax.random.key(1), quantization=name)
    spec = layer_table(config)["w_down"]
    values, scales = quantize_on_host(np.asarray(plain.layers[1].w_down), spec.input_axes, name)
    np.testing.assert_array_equal(packed.layers[1].w_down.values, values)
    np.testing.assert_allclose(packed.layers[1].w_down.scales, scales, rtol=1e-6)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    shard = lambda spec: NamedSharding(mesh, PartitionSpec(*("model" if a in SHARDED else None for a in spec.axes)))  # noqa: E731
    sharded = init_params(config, jax.random.key(1), quantization=name, sharding=shard)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), packed, sharded)
    wq = sharded.layers[0].wq
    assert wq.values.sharding.shard_shape(wq.values.shape) == (64, 2, 16)
    assert wq.scales.sharding.shard_shape(wq.scales.shape) == (2, 16)


SHARDED = ("heads", "kv_heads", "ffn", "vocab")


@pytest.mark.parametrize("name", FORMATS)
def test_loading_quantizes_stored_weights_and_places_values_and_scales(tmp_path, monkeypatch, name):
    config = PRESETS["tiny"]
    params = init_params(config, jax.random.key(2))
    save_pretrained(params, config, tmp_path)
    seen = []

    def placed(spec: ParamSpec, host: np.ndarray, _: object) -> jax.Array:
        seen.append((spec.hf_name, spec.axes, host.dtype.name))
        assert host.shape == spec.shape
        return jnp.asarray(host)

    monkeypatch.setattr(leaves, "_placed", placed)
    loaded = load_params(tmp_path, dtype=jnp.bfloat16, quantization=name)
    spec = layer_table(config)["wq"]
    values, scales = quantize_on_host(np.asarray(params.layers[0].wq), spec.input_axes, name)
    np.testing.assert_array_equal(loaded.layers[0].wq.values, values)  # not from weights rounded to bfloat16 first
    np.testing.assert_array_equal(loaded.layers[0].wq.scales, scales)
    assert loaded.embedding.dtype == jnp.bfloat16 and loaded.lm_head is not None
    block = "model.layers.{layer}.self_attn.q_proj.weight"
    wanted = WEIGHT_FORMATS[name].dtype.name
    assert (block, ("embed", "heads", "head_dim"), wanted) in seen
    assert (block + "_scale", ("heads", "head_dim"), "float32") in seen


def test_error_names_the_tensor_with_a_nonfinite_weight(tmp_path):
    config = PRESETS["tiny"]
    params = init_params(config, jax.random.key(2))
    layer = dataclasses.replace(params.layers[1], wk=params.layers[1].wk.at[3, 1, 2].set(jnp.nan))
    save_pretrained(dataclasses.replace(params, layers=(params.layers[0], layer)), config, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"safetensors: tensor 'model.layers.1.self_attn.k_proj.weight': wanted finite"
    ):
        load_params(tmp_path, dtype=jnp.float32, quantization="int8")


@pytest.fixture(scope="module")
def demo_tokens() -> np.ndarray:
    from ccjax.loading.model import DEMO_CORPUS, load_model

    tokenizer = load_model("demo", dtype="float32").tokenizer
    assert tokenizer is not None
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(DEMO_CORPUS.glob("*.md")))
    ids = tokenizer.encode(text, allow_special=False)
    return np.asarray(ids[: len(ids) // 96 * 96]).reshape(-1, 96)[:24]


@pytest.mark.parametrize(("name", "least_same", "most_kl"), [("int8", 0.985, 1e-3), ("fp8", 0.94, 1e-2)])
def test_quantized_demo_model_logits_are_close_to_float32(demo_tokens, name, least_same, most_kl):
    """Top-1 agreement and mean KL (nats) of next-token distributions, against float32; scales of a neighbouring channel
    exceed both bounds."""
    config = load_config(DEMO_MODEL)
    run = jax.jit(forward, static_argnums=1)
    plain = np.asarray(run(load_params(DEMO_MODEL, dtype=jnp.float32), config, demo_tokens), np.float64)
    packed = load_params(DEMO_MODEL, dtype=jnp.float32, quantization=name)

    def agreement(params) -> tuple[float, float]:
        logits = np.asarray(run(params, config, demo_tokens), np.float64)
        logs = [
            raw - np.log(np.exp(raw - raw.max(-1, keepdims=True)).sum(-1, keepdims=True)) - raw.max(-1, keepdims=True)
            for raw in (plain, logits)
        ]
        kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean()
        return float((plain.argmax(-1) == logits.argmax(-1)).mean()), float(kl)

    same, kl = agreement(packed)
    print(f"{name}: the same token {same:.2%}, KL {kl:.2g}")
    assert same >= least_same and kl <= most_kl
    rolled = lambda leaf: dataclasses.replace(leaf, scales=jnp.roll(leaf.scales, 1, -1))  # noqa: E731
    is_packed = lambda leaf: isinstance(leaf, QuantizedWeight)  # noqa: E731
    broken = jax.tree.map(lambda leaf: rolled(leaf) if is_packed(leaf) else leaf, packed, is_leaf=is_packed)
    same, kl = agreement(broken)
    assert same < least_same and kl > most_kl
