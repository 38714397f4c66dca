"""The identities of reuse on several devices, and equality with the answers of one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig, Request, SamplingParams
from ccjax.errors import ConfigError
from ccjax.loading.model import load_model
from ccjax.models.llama3.fused import unfuse
from ccjax.models.llama3.sharding import mesh_of
from ccjax.runner.compilations import compilations
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.engine.test_identities import INT8_TOLERANCE, answer, assert_same
from tests.models.test_convert import write
from tests.oracles import llama_forward

MODEL = TinyModel(num_attention_heads=8, num_key_value_heads=2, head_dim=16, vocab_size=96)
WIDE = TinyModel(num_attention_heads=8, num_key_value_heads=2, head_dim=32, vocab_size=96)
MIXTURE = TinyModel(
    num_attention_heads=8, num_key_value_heads=2, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2
)
"""On 2 devices each has one kv head; on 4 each head is on two devices; on 8 on four."""

slow = pytest.mark.slow

SEGMENTS = draw_segments(np.random.default_rng(1), [40, 33, 61], vocab=96)


def engine_of(size, **settings):
    return MODEL.engine(tensor_parallel_size=size, max_model_len=512, **settings)


@pytest.mark.parametrize(
    ("model", "size", "attention"),
    [pytest.param(WIDE, 2, None, marks=slow), (WIDE, 4, "triton_interpret"), (MODEL, 8, None)],
    ids=["2", "4-triton_interpret", "8"],
)
def test_prefill_and_decode_match_the_oracle(model, size, attention):
    tokens = [token for segment in SEGMENTS for token in segment]
    with model.engine(tensor_parallel_size=size, max_model_len=512, attention=attention) as engine:
        logits = engine.prefill_logits(tokens)
        answered = engine.generate_from_tokens(SEGMENTS, max_new_tokens=3, reuse="off").token_ids
    wanted = llama_forward(model.weights, model.raw, [*tokens, *answered])[0]
    np.testing.assert_allclose(logits, wanted[: len(tokens)], atol=TOLERANCE)
    assert list(answered) == list(wanted[-4:-1].argmax(-1))


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=slow) for size in (2, 4)), 8])
def test_each_expert_is_split_over_the_devices(size):
    """Uses prompts long enough for every form of the routed MLP, and decode."""
    segments = draw_segments(np.random.default_rng(3), [150, 33])
    with (
        MIXTURE.engine(max_model_len=512) as single,
        MIXTURE.engine(max_model_len=512, tensor_parallel_size=size) as engine,
    ):
        for reuse in ("off", "bounded", "bounded"):
            assert_same(answer(engine, segments, reuse), answer(single, segments, reuse))
        assert (
            engine._device.model.params.layers[0].w_gate.addressable_shards[0].data.shape[2] * size
            == MIXTURE.config.d_ff
        )


def test_weights_in_8_bits_are_split_with_their_scales():
    name, settings = "random:tiny:1", {"quantization": "int8", "max_model_len": 512}
    segments = draw_segments(np.random.default_rng(3), [90], vocab=250)
    with (
        Engine.from_pretrained(name, **settings) as single,
        Engine.from_pretrained(name, tensor_parallel_size=4, **settings) as engine,
    ):
        assert_same(answer(engine, segments, "bounded"), answer(single, segments, "bounded"), INT8_TOLERANCE)
        scales = engine._device.model.params.layers[0].wq.scales
        assert scales.shape[0] == 4 and scales.addressable_shards[0].data.shape[0] == 1


def test_weights_read_whole_are_split_without_changes(tmp_path):
    source = write(tmp_path / "files", MODEL.weights, MODEL.raw)
    settings = {"dtype": "float32", "quantization": "int8"}
    wanted = unfuse(load_model(source, **settings).params)
    params = load_model(source, **settings, tensor_parallel_size=4).params
    assert mesh_of(params) is not None and mesh_of(wanted) is None
    for got, one in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == one.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(one))


@pytest.mark.parametrize(("size", "device_cache_bytes"), [pytest.param(2, 2 << 20, marks=slow), (4, 2 << 20), (8, 0)])
def test_reuse_identities_hold_on_several_devices(size, device_cache_bytes):
    """Empty store, same prefix, everything recomputed, exact in any order; and equality with one device."""
    settings = {"device_cache_bytes": device_cache_bytes}
    total = sum(map(len, SEGMENTS))
    with MODEL.engine() as single:
        wanted = answer(single, SEGMENTS, "off")
    with engine_of(size, **settings) as engine, engine_of(size, recompute_ratio=1.0, **settings) as everything:
        plain = answer(engine, SEGMENTS, "off")
        assert_same(plain, wanted)
        cold, warm = answer(engine, SEGMENTS, "bounded"), answer(engine, SEGMENTS, "bounded")
        assert_same(cold, plain)
        assert_same(warm, plain)
        assert (cold[2].reused_tokens, warm[2].reused_tokens) == (0, total - len(SEGMENTS[-1]))
        assert warm[2].exact and warm[2].recomputed_tokens == 0
        for order in ((2, 0, 1), (1, 2, 0)):
            shuffled = permuted(SEGMENTS, order)
            plain = answer(engine, shuffled, "off")
            assert_same(answer(everything, shuffled, "bounded"), plain)
            assert_same(answer(engine, shuffled, "exact"), plain)


@pytest.mark.parametrize(
    "strategy",
    ["auto", "cacheblend", "h2o", "reuse", *(pytest.param(name, marks=slow) for name in ("legolink", "set"))],
)
def test_approximate_reuse_equals_that_of_one_device(strategy):
    """Includes naive reuse, which differs much from a full prefill, so that equality means equal reuse."""
    settings = {"strategy": strategy, "max_model_len": 512, "device_cache_bytes": 2 << 20}
    found = []
    for size in (1, 4):
        with MODEL.engine(tensor_parallel_size=size, **settings) as engine:
            answer(engine, SEGMENTS, "bounded")
            found.append(answer(engine, permuted(SEGMENTS, (2, 1, 0)), "bounded"))
            full = answer(engine, permuted(SEGMENTS, (2, 1, 0)), "off")
    assert_same(found[1], found[0])
    assert found[1][2].reused_tokens == found[0][2].reused_tokens
    assert found[1][2].recomputed_tokens == found[0][2].recomputed_tokens
    assert found[1][2].computed_share == found[0][2].computed_share
    if strategy == "auto":
        report = found[1][2]
        assert report.computed_share * report.prompt_tokens > report.computed_tokens + report.recomputed_tokens, (
            "the question runs twice, and chooses"
        )
    if strategy == "reuse":
        assert max(abs(a - b) for a, b in zip(found[0][1], full[1], strict=True)) > 100 * TOLERANCE


@pytest.mark.parametrize(("writer", "reader"), [pytest.param(1, 4, marks=slow), (2, 8)])
def test_kv_stored_by_one_mesh_can_be_loaded_by_another(tmp_path, writer, reader):
    store = f"file://{tmp_path}/store"
    with engine_of(writer, store=store) as engine:
        wanted = answer(engine, SEGMENTS, "bounded")
    with engine_of(reader, store=store) as engine:
        got = answer(engine, SEGMENTS, "exact")
    assert_same(got, wanted)
    assert got[2].exact and got[2].computed_tokens == len(SEGMENTS[-1])


@pytest.mark.parametrize("device_cache_bytes", [pytest.param(0, marks=slow), 2 << 20])
def test_after_warm_up_a_batch_compiles_nothing(device_cache_bytes):
    """A value with another placement than at warm-up would be a new size for the compiler."""
    requests = [
        Request(segments=permuted(SEGMENTS, order), sampling=SamplingParams(6), reuse=reuse)
        for order in ((0, 1), (2, 0), (1,), (2, 1, 0))
        for reuse in ("off", "bounded")
    ]
    with MODEL.engine() as single:
        wanted = [single.run(request).token_ids for request in requests[::2]]
    with engine_of(4, max_num_batched_tokens=64, max_num_seqs=8, device_cache_bytes=device_cache_bytes) as engine:
        engine.warmup(only_first=True)  # several devices cannot compile beside requests, so this compiles before
        assert engine.num_sizes_left == 0
        with ThreadPoolExecutor(8) as pool:
            before = compilations().count
            answers = [response.token_ids for response in pool.map(engine.run, requests)]
            assert compilations().count == before
    assert answers[::2] == wanted


def test_each_device_holds_its_shard_of_weights_and_pages():
    with engine_of(4, device_cache_bytes=2 << 20) as engine:
        wq, k_pages = engine._device.model.params.layers[0].wq, engine._device.pool._layers[0].k
        assert [shard.data.shape for shard in wq.addressable_shards] == [(64, 2, wq.shape[2])] * 4
        assert [shard.data.shape[0] for shard in k_pages.addressable_shards] == [1] * 4  # of two kv heads in total
        assert len({shard.device for shard in k_pages.addressable_shards}) == 4
        assert len(engine._device.model.put(np.zeros(3)).sharding.device_set) == 4  # or each layer would copy it
        answer(engine, SEGMENTS, "bounded")
        assert engine._device.pool._layers[0].k.sharding == k_pages.sharding


def test_model_is_loaded_sharded_over_its_devices():
    """The embedded model has 4 kv heads, one per device."""
    model = load_model("demo", dtype="float32", tensor_parallel_size=2)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(model.params)} == {2}
    with pytest.raises(ConfigError, match="tensor_parallel_size: wanted 2, as the model was loaded, got 4"):
        type(MODEL).engine(type("Loaded", (), {"loaded": model}), tensor_parallel_size=4, max_model_len=128)
    assert EngineConfig().tensor_parallel_size == 1
