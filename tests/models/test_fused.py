"""Joined matrices: the same weights, the same logits, fewer products; a loaded model on one device has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.loading.model import load_model
from ccjax.models.llama3 import Params, forward, init_params
from ccjax.models.llama3.fused import fuse, unfuse
from ccjax.models.llama3.presets import preset

TINY = preset("tiny", 97)
CONFIGS = {
    "plain": TINY,
    "tied": dataclasses.replace(TINY, tie_embeddings=not TINY.tie_embeddings),
    "as many kv heads": dataclasses.replace(TINY, num_kv_heads=TINY.num_heads),
    "experts": dataclasses.replace(TINY, model_type="mixtral", num_experts=4, num_experts_per_token=2),
}
TOLERANCE = 2e-5
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (1, 40)))


def weights(name: str, quantization: str | None = None) -> Params:
    return init_params(CONFIGS[name], jax.random.key(1), quantization=quantization)


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_joined_and_separated_again_they_are_the_same(name: str, quantization: str | None) -> None:
    given, wanted = weights(name, quantization), weights(name, quantization)
    joined = fuse(given)
    assert all(layer.wk is None and layer.wv is None for layer in joined.layers)
    assert all((layer.w_up is None) == (name != "experts") for layer in joined.layers)
    assert jax.tree.leaves(given.layers[0].wq)[0].is_deleted() and not given.embedding.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, unfuse(fuse(joined)), wanted)
    assert jax.tree.structure(unfuse(joined)) == jax.tree.structure(wanted)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_separate_matrices(name: str, quantization: str | None) -> None:
    config, wanted = CONFIGS[name], forward(weights(name, quantization), CONFIGS[name], TOKENS)
    joined = fuse(weights(name, quantization))
    np.testing.assert_allclose(forward(joined, config, TOKENS), wanted, atol=TOLERANCE, rtol=0)

    def turned(layer: Any) -> Any:
        return dataclasses.replace(layer, wq=jax.tree.map(lambda leaf: jnp.flip(leaf, 0), layer.wq))

    wrong = dataclasses.replace(joined, layers=tuple(turned(layer) for layer in joined.layers))
    assert np.abs(forward(wrong, config, TOKENS) - wanted).max() > 100 * TOLERANCE


def test_a_layer_takes_four_products_besides_attention() -> None:
    program = jax.make_jaxpr(lambda params: forward(params, TINY, TOKENS))(fuse(weights("plain")))
    assert str(program).count("dot_general[") == (4 + 2) * TINY.num_layers + 1


def test_a_model_is_loaded_with_joined_matrices_on_one_device_only() -> None:
    one = load_model("random:tiny", dtype="float32").params.layers
    two = load_model("random:tiny", dtype="float32", tensor_parallel_size=2).params.layers
    assert all(layer.wk is None and layer.w_up is None for layer in one)
    assert all(layer.wk is not None and layer.w_up is not None for layer in two)
