"""ccjax.models.llama3.experts: every form of the routed MLP against a per-token oracle; padding, skew, sharding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ccjax.models.llama3 import LlamaConfig, RoutedLayerParams, experts, forward, init_params
from ccjax.models.llama3.params import layer_table
from ccjax.models.llama3.quantized import QuantizedWeight, quantize
from tests.engine.helpers import params_from_hf
from tests.oracles import mixture, random_llama

ATOL = 2e-5
"""For outputs of order 1; the largest measured error is 3e-6, that of every mutant below more than 1e-2."""


def make(num_experts: int, num_chosen: int, seed: int = 0) -> tuple[RoutedLayerParams, dict[str, np.ndarray]]:
    """The weights of one layer, in our form and in the oracle's."""
    weights, raw = random_llama(
        seed,
        model_type="mixtral",
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        num_local_experts=num_experts,
        num_experts_per_tok=num_chosen,
    )
    layer = params_from_hf(weights, LlamaConfig.from_hf(raw)).layers[0]
    assert isinstance(layer, RoutedLayerParams)
    return layer, weights


def wanted(x: np.ndarray, layer: RoutedLayerParams, weights: dict[str, np.ndarray]) -> np.ndarray:
    block = "model.layers.0.block_sparse_moe."
    return mixture(x.astype(np.float64), lambda name: weights[name].astype(np.float64), block, layer.num_chosen)


def tokens(number: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(number, 32)).astype(np.float32)


def run(form, x, layer: RoutedLayerParams) -> np.ndarray:
    x = jnp.asarray(x)
    return np.asarray(compiled(form)(x, layer))


@functools.cache
def compiled(form):
    if form == "chosen":
        return jax.jit(experts.routed_mlp)
    return jax.jit(lambda x, layer: FORMS[form](x, experts.route(x, layer.router, layer.num_chosen), layer))


FORMS = {
    "dense": experts.dense_experts,
    "ragged": experts.ragged_experts,
    "blocks of 8": functools.partial(experts.blocked_experts, block_size=8),
    "blocks of 64": functools.partial(experts.blocked_experts, block_size=64),
    "batched, 2 rows": functools.partial(experts.batched_experts, capacity=2),  # nearly always too small
    "batched, 64 rows": functools.partial(experts.batched_experts, capacity=64),
    "batched, any rows": functools.partial(experts.batched_experts, capacity=200),
}
NARROW = ["chosen", "dense", "ragged", "blocks of 8", "batched, 2 rows", "batched, 64 rows"]
"""Each kind of product once; block sizes are tested in float32."""


@pytest.mark.parametrize(
    ("form", "num_experts", "num_chosen", "number"),
    [
        *((form, *sizes) for form in ["chosen", *FORMS] for sizes in [(8, 2, 130), (5, 3, 1)]),
        *((form, 2, 1, 130) for form in ("chosen", "ragged", "blocks of 8", "batched, 2 rows")),
    ],
)
def test_every_form_matches_the_oracle(form, num_experts, num_chosen, number):
    layer, weights = make(num_experts, num_chosen)
    x = tokens(number)
    expected = wanted(x, layer, weights)
    assert number == 1 or 0.5 < np.abs(expected).max() < 20  # the scale fits the tolerance
    np.testing.assert_allclose(run(form, x, layer), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("form", ["chosen", *FORMS])
def test_all_tokens_to_the_same_experts(form):
    """The most rows that an expert can get, and experts that no token chooses."""
    layer, weights = make(8, 2)
    x = np.repeat(tokens(1), 130, 0) + 1e-3 * tokens(130, seed=2)
    chosen = np.asarray(experts.route(jnp.asarray(x), layer.router, 2).experts)
    assert len(np.unique(chosen)) == 2
    np.testing.assert_allclose(run(form, x, layer), wanted(x, layer, weights), atol=ATOL, rtol=0)


@pytest.mark.parametrize("form", ["chosen", *FORMS])
@pytest.mark.parametrize("padding", [np.nan, 1e30])
def test_padding_rows_do_not_affect_other_rows(form, padding):
    layer, weights = make(8, 2)
    x = tokens(80)
    padded = np.full((130, 32), padding, np.float32)
    rows = np.random.default_rng(3).permutation(130)[:80]
    padded[rows] = x
    np.testing.assert_allclose(run(form, padded, layer)[rows], wanted(x, layer, weights), atol=ATOL, rtol=0)


def _softmax_over_all(x, layer):
    return jax.nn.softmax(jnp.einsum("nd,de->ne", x, layer.router), -1)


MUTANTS = {
    "shares not divided by their sum": lambda x, layer, routing: routing._replace(
        weights=jnp.take_along_axis(_softmax_over_all(x, layer), routing.experts, 1)
    ),
    "shares in another order": lambda x, layer, routing: routing._replace(weights=routing.weights[:, ::-1]),
    "the next expert": lambda x, layer, routing: routing._replace(experts=(routing.experts + 1) % 8),
    "only the first choice": lambda x, layer, routing: routing._replace(weights=routing.weights.at[:, 1].set(0.0)),
}


routed_in_blocks = jax.jit(FORMS["blocks of 8"])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_routing_exceeds_the_tolerance(mutant):
    layer, weights = make(8, 2)
    x = tokens(130)
    routing = MUTANTS[mutant](jnp.asarray(x), layer, experts.route(jnp.asarray(x), layer.router, 2))
    got = routed_in_blocks(jnp.asarray(x), routing, layer)
    assert np.abs(np.asarray(got) - wanted(x, layer, weights)).max() > 1e-2


@pytest.mark.parametrize("swap", [("w_gate", "w_up"), ("w_gate", "w_gate")])
def test_wrong_expert_weights_exceed_the_tolerance(swap):
    layer, weights = make(8, 2)
    x = tokens(130)
    field, other = swap
    changed = {field: getattr(layer, other)[::-1] if field == other else getattr(layer, other)}
    got = run("chosen", x, dataclasses.replace(layer, **changed))
    assert np.abs(got - wanted(x, layer, weights)).max() > 1e-2


def test_overflow_without_the_fallback_exceeds_the_tolerance(monkeypatch):
    layer, weights = make(8, 2)
    x = tokens(130)
    monkeypatch.setattr(jax.lax, "cond", lambda is_enough, at_once, otherwise: at_once())
    got = experts.batched_experts(jnp.asarray(x), experts.route(jnp.asarray(x), layer.router, 2), layer, 2)
    assert np.abs(np.asarray(got) - wanted(x, layer, weights)).max() > 1e-2


@pytest.mark.parametrize("form", NARROW)
def test_bfloat16_error_is_within_rounding(form):
    layer, weights = make(8, 2)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer)
    x = tokens(130).astype(jnp.bfloat16)
    wide = {name: np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32) for name, w in weights.items()}
    expected = wanted(np.asarray(x, np.float32), layer, wide)
    got = run(form, x, narrow)
    assert got.dtype == jnp.bfloat16
    error = np.sqrt(np.mean((got.astype(np.float64) - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 1e-2


def test_gradients_of_the_plain_form_are_finite_and_nonzero():
    config = LlamaConfig(*(97, 32, 1, 4, 2, 8, 48), model_type="mixtral", num_experts=4, num_experts_per_token=2)
    params = init_params(config, jax.random.key(0))
    ids = jnp.arange(24)[None]
    gradients = jax.jit(jax.grad(lambda params: forward(params, config, ids).astype(jnp.float32).std()))(params)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(np.asarray(leaf)).all() and np.abs(np.asarray(leaf)).max() > 0


@pytest.mark.parametrize(("platform", "is_grouped"), [("tpu", True), ("cuda", False), ("cpu", False)])
def test_ragged_dot_is_used_only_on_tpus(platform, is_grouped):
    """Elsewhere jax would expand it to a product over all experts, with a copy of the rows for each."""
    layer, _ = make(8, 2)
    lowered = jax.jit(experts.routed_mlp).trace(jnp.asarray(tokens(256)), layer).lower(lowering_platforms=(platform,))
    assert ("ragged_dot" in lowered.as_text()) == is_grouped


@pytest.mark.parametrize(
    ("form", "name"), [*((form, "int8") for form in NARROW), ("chosen", "fp8"), ("blocks of 8", "fp8")]
)
def test_8_bit_experts_match_their_dequantized_weights(form, name):
    layer, _ = make(5, 2)
    table = layer_table(
        LlamaConfig(*(97, 32, 1, 4, 2, 8, 48), 1e4, model_type="mixtral", num_experts=5, num_experts_per_token=2)
    )
    in_8_bits, plain, unscaled = {}, {}, {}
    for field in ("w_gate", "w_up", "w_down"):
        weight = in_8_bits[field] = quantize(getattr(layer, field), table[field].input_axes, name)
        plain[field] = weight.values.astype(jnp.float32) * weight.scales[:, None]
        unscaled[field] = QuantizedWeight(weight.values, jnp.roll(weight.scales, 1, axis=0))  # another expert's
    x = tokens(130)
    expected = run("dense", x, dataclasses.replace(layer, **plain))
    found = run(form, x, dataclasses.replace(layer, **in_8_bits))
    atol = 5e-4 if name == "int8" else ATOL  # CPUs round activations beside int8, to a 65,000th of the largest in a row
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)
    assert np.abs(run(form, x, dataclasses.replace(layer, **unscaled)) - expected).max() > 1e-2
    assert np.abs(expected - run("dense", x, layer)).max() > 1e-3  # otherwise nothing was rounded


@pytest.mark.parametrize("form", ["chosen", "batched, 64 rows"])
@pytest.mark.parametrize("split", ["ffn", "experts"])
@pytest.mark.parametrize("number", [130])
def test_weights_sharded_by_logical_axes_match_the_oracle(form, split, number):
    layer, weights = make(8, 2)
    mesh = Mesh(np.asarray(jax.devices()[:4], object), ("all",))
    table = layer_table(
        LlamaConfig(*(97, 32, 1, 4, 2, 8, 48), 1e4, model_type="mixtral", num_experts=8, num_experts_per_token=2)
    )
    names = ("w_gate", "w_up", "w_down", "router")
    specs = {name: P(*("all" if axis == split else None for axis in table[name].axes)) for name in names}
    assert sum("all" in spec for spec in specs.values()) == 3
    put = {name: jax.device_put(getattr(layer, name), NamedSharding(mesh, specs[name])) for name in names}
    x = tokens(number)
    expected = wanted(x, layer, weights)
    everywhere = jax.device_put(jnp.asarray(x), NamedSharding(mesh, P()))
    np.testing.assert_allclose(run(form, everywhere, dataclasses.replace(layer, **put)), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("number", [1, 130])
def test_tensor_parallel_partial_results_sum_to_the_oracle(number):
    """As in tensor parallelism with `jax.shard_map`: one sum over the devices per layer, at the end."""
    layer, weights = make(8, 2)
    mesh = Mesh(np.asarray(jax.devices()[:4], object), ("all",))
    inner = {"w_gate": P(None, None, "all"), "w_up": P(None, None, "all"), "w_down": P(None, "all", None)}
    specs = dataclasses.replace(jax.tree.map(lambda _: P(), layer), **inner)
    shared = jax.shard_map(
        lambda x, layer: jax.lax.psum(experts.routed_mlp(x, layer), "all"),
        mesh=mesh,
        in_specs=(P(), specs),
        out_specs=P(),
        check_vma=False,
    )
    x = tokens(number)
    got = np.asarray(jax.jit(shared)(jnp.asarray(x), layer))
    np.testing.assert_allclose(got, wanted(x, layer, weights), atol=ATOL, rtol=0)
