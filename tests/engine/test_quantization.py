"""Weights in 8 bits in the engine: the identities of exact weights hold, and KV of different weights is never mixed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig
from ccjax.errors import ConfigError
from ccjax.loading.model import DEMO_MODEL, load_model, read_model_files
from ccjax.models.llama3.params import build_params
from ccjax.models.llama3.quantized import WEIGHT_FORMATS, QuantizedWeight, quantize_on_host
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer, assert_same
from tests.oracles import llama_forward

FORMATS = tuple(WEIGHT_FORMATS)


class PackedModel(TinyModel):
    """The tiny model in 8 bits; the oracle uses the dequantised weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        specs = {}
        build_params(self.config, specs.__setitem__)

        def pack(name_of_weight: str, leaf: jax.Array):
            spec = specs[name_of_weight]
            if spec.scales is None:
                return leaf
            values, scales = quantize_on_host(np.asarray(leaf), spec.input_axes, name)
            whole = values.astype(np.float32) * np.expand_dims(scales, spec.input_axes)
            self.weights[name_of_weight] = whole.reshape(spec.num_inputs, -1).T
            return QuantizedWeight(jnp.asarray(values), jnp.asarray(scales))

        leaves = iter(jax.tree.leaves(self.loaded.params))
        names = build_params(self.config, lambda name_of_weight, _: name_of_weight)
        in_order = [pack(key, leaf) for key, leaf in zip(jax.tree.leaves(names), leaves, strict=True)]
        params = jax.tree.unflatten(jax.tree.structure(names), in_order)
        self.loaded = dataclasses.replace(self.loaded, params=params, fingerprint=f"tiny-{name}")


@pytest.fixture(scope="module", params=FORMATS)
def model(request) -> PackedModel:
    return PackedModel(request.param)


def test_full_prefill_matches_the_oracle_with_rounded_weights(model):
    """The error is that of float32: only the rounding of the weights is lost."""
    segments = draw_segments(np.random.default_rng(0), [40, 90, 3])
    tokens = [token for segment in segments for token in segment]
    with model.engine() as engine:
        logits = engine.prefill_logits(tokens)
    np.testing.assert_allclose(logits, llama_forward(model.weights, model.raw, tokens)[0], atol=3e-5)
    plain = llama_forward(TinyModel().weights, model.raw, tokens)[0]
    assert np.abs(logits - plain).max() > 100 * 3e-5, "the bound tells these weights from those that were not rounded"


def test_cold_run_equals_full_prefill_and_warm_run_recomputes_nothing(model):
    segments = draw_segments(np.random.default_rng(1), [5, 130, 40])
    total = sum(map(len, segments))
    with model.engine() as engine:
        plain = answer(engine, segments, "off")
        for reuse in ("exact", "bounded"):
            assert_same(answer(engine, segments, reuse), plain)
        warm = answer(engine, segments, "exact")
        assert_same(warm, plain)
        assert warm[2].exact and warm[2].reused_tokens == total - len(segments[-1])


def test_full_recompute_and_exact_reuse_equal_full_prefill_in_any_order(model):
    random = np.random.default_rng(2)
    segments = draw_segments(random, [60, 17, 88, 30])
    with model.engine(recompute_ratio=1.0) as everything, model.engine() as engine:
        for _ in range(3):
            shuffled = permuted(segments, random.permutation(4))
            plain = answer(engine, shuffled, "off")
            assert_same(answer(everything, shuffled, "bounded"), plain)
            assert_same(answer(engine, shuffled, "exact"), plain)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_demo_model_gives_the_same_answer(name):
    documents = [{"title": "", "text": "Notes on Ada Lunt: Tool of Ada Lunt: chisel. The bells ring at noon."}]
    with Engine.from_pretrained("demo", quantization=name) as packed, Engine.from_pretrained("demo") as plain:
        asked = "Which tool does Ada Lunt own?"
        assert packed.generate(asked, documents=documents).text == plain.generate(asked, documents=documents).text
    assert isinstance(load_model("demo", dtype="float32", quantization=name).params.layers[0].wq, QuantizedWeight)


def test_kv_is_never_shared_between_weight_formats(tmp_path):
    files = read_model_files("demo")
    formats = (None, *FORMATS)
    assert len({files.fingerprint(dtype, name) for name in formats for dtype in ("float32", "bfloat16")}) == 6
    documents = [{"title": "Ash", "text": "A tree."}]
    url = tmp_path.as_uri()
    reused = []
    for name in ("int8", "int8", None, "fp8"):
        with Engine.from_pretrained("demo", store=url, quantization=name) as engine:
            reused.append(
                engine.generate("Who?", documents=documents, reuse="exact", max_new_tokens=1).reuse.reused_tokens > 0
            )
    assert reused == [False, True, False, False]


def test_fingerprints_of_unquantized_weights_match_earlier_releases():
    """Stored KV survives an upgrade; golden values of the embedded model from release 0.1.0."""
    files = read_model_files(DEMO_MODEL)
    assert files.fingerprint("float32") == GOLDEN["float32"] and files.fingerprint("bfloat16") == GOLDEN["bfloat16"]


GOLDEN = {
    "float32": "6699599aca887d4fa6862ab4ad9c6cf40d67acfeea3c21561f21ec6a12fbc109",
    "bfloat16": "dbbd9652a4ca9462cc3213a477c738836d502afe2f6f8c6261758baf79155503",
}


def test_unknown_quantization_format_is_rejected():
    with pytest.raises(ConfigError, match=r"quantization: wanted one of \('int8', 'fp8'\) or None, got 'int4'"):
        EngineConfig(quantization="int4")
