"""Identities on every path, for dense models, mixtures of experts and 8-bit weights: exact reuse changes nothing."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.models.llama3.params import build_params
from ccjax.models.llama3.quantized import WEIGHT_FORMATS, QuantizedWeight, quantize_on_host
from ccjax.types import ChunkId, PlannedSegment, PrefillPlan, VariantId
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted, run_reusing
from tests.engine.test_batch_loop import Client, ask
from tests.oracles import llama_forward


class PackedModel(TinyModel):
    """The tiny model in 8 bits; the oracle uses the dequantised weights, for int8 also of the head."""

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
        if name == "int8":
            values, scales = quantize_on_host(self.weights["lm_head.weight"].T, (0,), name)
            self.weights["lm_head.weight"] = (values * scales).T


MODEL = TinyModel()
EXPERTS = TinyModel(5, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
INT8, FP8 = (PackedModel(name) for name in WEIGHT_FORMATS)
INT8_TOLERANCE = 2e-3
"""With weights in int8, CPUs also round activations, to a 65,000th of a row's largest value, and not always alike: sums
in another order move a value to the next step. Measured 8.1e-4 at most to the oracle, which does not round them; a
254th, and reuse without recompute, exceed the tolerance."""
CASES = [
    [1],
    [300],
    [5, 1],
    [40, 40, 41],
    [16, 128, 3, 77],
    [90, 1, 1, 200, 33],
    [10, 20, 30, 40, 50, 60, 70],
    [150, 1, 120, 2, 80, 48, 31, 30],
]
LONG = [300, 1, 250, 2, 180, 96, 31, 64]


def answer(engine, segments, reuse, *, tokens=6):
    """(greedy tokens, their log-probabilities, report)."""
    sampling = SamplingParams(max_new_tokens=tokens, logprobs=0)
    response = engine.run(Request(segments=segments, sampling=sampling, reuse=reuse))
    return response.token_ids, [token.logprob for token in response.logprobs], response.reuse


def tolerance_of(model):
    return INT8_TOLERANCE if model is INT8 else TOLERANCE


def assert_same(got, wanted, tolerance=TOLERANCE):
    assert got[0] == wanted[0]
    np.testing.assert_allclose(got[1], wanted[1], atol=tolerance)


def of_models(names, *cases):
    """Runs a test with each model in the cases listed for it."""
    every = [(model, *case) for model, some in cases for case in some]
    return pytest.mark.parametrize(("model", *names), every, ids=str)


@of_models(
    ["lengths"],
    (MODEL, zip([*CASES[::3], LONG])),
    (EXPERTS, zip([CASES[0], CASES[5]])),
    (INT8, [([40, 90, 3],)]),
    (FP8, [([40, 90, 3],)]),
)
def test_full_prefill_matches_the_oracle(model, lengths):
    segments = draw_segments(np.random.default_rng(len(lengths)), lengths)
    tokens = [token for segment in segments for token in segment]
    with model.engine() as engine:
        logits = engine.prefill_logits(tokens)
    np.testing.assert_allclose(logits, llama_forward(model.weights, model.raw, tokens)[0], atol=tolerance_of(model))
    if isinstance(model, PackedModel):
        plain = llama_forward(MODEL.weights, model.raw, tokens)[0]
        assert np.abs(logits - plain).max() > 100 * TOLERANCE, "these weights and not those that were not rounded"


def test_activations_of_one_int8_exceed_the_tolerance(monkeypatch):
    """Mutant: without the second int8, whose step is a 254th of the first one's."""
    tokens = [token for segment in draw_segments(np.random.default_rng(3), [40, 90, 3]) for token in segment]
    monkeypatch.setattr("ccjax.models.llama3.quantized._FINE", 1e9)
    jax.clear_caches()
    with INT8.engine() as engine:
        logits = engine.prefill_logits(tokens)
    jax.clear_caches()
    assert np.abs(logits - llama_forward(INT8.weights, INT8.raw, tokens)[0]).max() > 5 * INT8_TOLERANCE


@of_models(
    ["lengths", "reuse"],
    (MODEL, zip(CASES, itertools.cycle(["exact", "bounded", "fast"]), strict=False)),
    (EXPERTS, [(CASES[1], "fast"), (CASES[3], "bounded"), (CASES[6], "exact")]),
    *((model, [([5, 130, 40], "exact"), ([5, 130, 40], "bounded")]) for model in (INT8, FP8)),
)
def test_cold_run_equals_full_prefill_and_warm_run_recomputes_nothing(model, lengths, reuse):
    segments = draw_segments(np.random.default_rng(sum(lengths)), lengths)
    total = sum(map(len, segments))
    with model.engine() as engine:
        plain = answer(engine, segments, "off")
        assert (plain[2].computed_tokens, plain[2].reused_tokens, plain[2].exact) == (total, 0, True)
        cold = answer(engine, segments, reuse)
        assert_same(cold, plain, tolerance_of(model))
        assert (cold[2].computed_tokens, cold[2].reused_tokens) == (total, 0)
        warm = answer(engine, segments, reuse)
        assert_same(warm, plain, tolerance_of(model))
        assert warm[2].exact and warm[2].recomputed_tokens == 0
        assert warm[2].computed_tokens == len(segments[-1])
        assert warm[2].reused_tokens == total - len(segments[-1])


@of_models(["seed"], (MODEL, zip(range(2))), (EXPERTS, [(0,)]), (INT8, [(2,)]), (FP8, [(2,)]))
def test_full_recompute_and_exact_reuse_equal_full_prefill_in_any_order(model, seed):
    random = np.random.default_rng(seed)
    lengths = [int(length) for length in random.integers(1, 120, random.integers(2, 8))]
    segments = draw_segments(random, lengths)
    with model.engine(recompute_ratio=1.0) as everything, model.engine() as engine:
        for _ in range(3):
            shuffled = permuted(segments, random.permutation(len(lengths)))
            plain = answer(engine, shuffled, "off")
            assert_same(answer(everything, shuffled, "bounded"), plain, tolerance_of(model))
            exact = answer(engine, shuffled, "exact")
            assert_same(exact, plain, tolerance_of(model))
            assert exact[2].exact and exact[2].recomputed_tokens == 0


@pytest.mark.parametrize("model", [MODEL, EXPERTS, INT8], ids=str)
def test_naive_reuse_behind_other_chunks_differs_from_full_prefill(model):
    """Mutant for the identities above: without recompute the error far exceeds the tolerance."""
    segments = draw_segments(np.random.default_rng(0), [60, 50, 40])
    shuffled = permuted(segments, [2, 1, 0])
    with model.engine(strategy="reuse") as engine:
        answer(engine, segments, "bounded")
        naive = answer(engine, shuffled, "bounded")
        plain = answer(engine, shuffled, "off")
    assert not naive[2].exact and naive[2].reused_tokens > 100
    assert max(abs(a - b) for a, b in zip(naive[1], plain[1], strict=True)) > max(100 * TOLERANCE, tolerance_of(model))


def test_exact_answers_of_experts_in_a_batch_equal_those_of_each_request_alone():
    random = np.random.default_rng(8)
    segments = draw_segments(random, [40, 33, 64, 17])
    orders = [random.permutation(4) for _ in range(4)]
    with EXPERTS.engine() as engine:
        wanted = [answer(engine, permuted(segments, order), "off", tokens=20)[0] for order in orders]
    with EXPERTS.engine(max_num_batched_tokens=64, device_cache_bytes=3 << 20) as engine:
        for _ in range(2):
            clients = [Client(engine, ask(permuted(segments, order), "exact", 20)) for order in orders]
            assert [client.response().token_ids for client in clients] == wanted


def test_prompt_with_the_same_chunk_twice_equals_full_prefill():
    segments = draw_segments(np.random.default_rng(3), [30, 20])
    twice = permuted(segments, [0, 1, 0])
    with MODEL.engine() as engine:
        for _ in range(2):
            assert_same(answer(engine, twice, "bounded"), answer(engine, twice, "off"))


def test_empty_system_prompt_or_no_passages_equals_full_prefill():
    random = np.random.default_rng(4)
    with MODEL.engine() as engine:
        for segments in ([[], *draw_segments(random, [12, 30])[1:]], draw_segments(random, [])):
            for _ in range(2):
                assert_same(answer(engine, segments, "bounded"), answer(engine, segments, "off"))


def _plan(lengths, actions):
    """A plan for passages without a system prompt; `actions`: recompute offsets of a reused one, None to compute it."""
    segments, start = [], 0
    for number, (length, offsets) in enumerate(zip(lengths, actions, strict=True)):
        kind = {"action": "compute"}
        if offsets is not None:
            kind = {"action": "reuse", "variant_id": VariantId(f"v{number}"), "recompute_offsets": tuple(offsets)}
        role = "question" if number == len(lengths) - 1 else "passage"
        segments.append(
            PlannedSegment(role=role, start=start, num_tokens=length, chunk_id=ChunkId(f"c{number}"), **kind)
        )
        start += length
    return PrefillPlan(tuple(segments))


def test_recomputed_rows_completely_replace_the_cached_ones():
    """If all offsets of a reused chunk are recomputed, even NaN in its stored KV has no effect."""
    lengths = [20, 33, 9]
    tokens = np.random.default_rng(5).integers(0, 97, sum(lengths)).astype(np.int32)
    model = MODEL.device_model()
    shape = (1, 2, 33, MODEL.config.num_kv_heads, MODEL.config.head_dim)
    poisoned = run_reusing(
        model,
        tokens,
        _plan(lengths, [None, range(33), None]),
        lambda *_: np.full(shape, np.nan, np.float32),
    )
    wanted = llama_forward(MODEL.weights, MODEL.raw, tokens)[0][-1]
    np.testing.assert_allclose(poisoned.last_logits[-1], wanted, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_recomputing_every_row_of_reused_chunks_equals_full_prefill(seed):
    """Tests merging: k chunks of meaningless stored KV, all rows recomputed, next to computed chunks."""
    random = np.random.default_rng(seed)
    lengths = [int(length) for length in random.integers(1, 60, random.integers(1, 9))] + [9]
    actions = [range(length) if random.random() < 0.7 else None for length in lengths[:-1]] + [None]
    tokens = random.integers(0, 97, sum(lengths)).astype(np.int32)
    model = MODEL.device_model()
    heads = (MODEL.config.num_kv_heads, MODEL.config.head_dim)

    def read_layers(variant, first, last):
        return random.normal(size=(last - first, 2, lengths[int(variant[1:])], *heads)).astype(np.float32)

    result = run_reusing(model, tokens, _plan(lengths, actions), read_layers)
    wanted = llama_forward(MODEL.weights, MODEL.raw, tokens)[0]
    np.testing.assert_allclose(result.last_logits, wanted, atol=TOLERANCE)


def test_reuse_off_runs_no_cache_code(monkeypatch):
    segments = draw_segments(np.random.default_rng(7), [20, 30])

    def refuse(*_, **__):
        raise AssertionError("cache code ran")

    with MODEL.engine() as engine:
        wanted = answer(engine, segments, "bounded")
        for owner, names in (
            (engine._chunks.store, ("prepare_load", "prepare_store")),
            (engine._chunks.variants, ("of_chunks", "add")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, refuse)
        assert_same(answer(engine, segments, "off"), wanted)
        with pytest.raises(AssertionError, match="cache code ran"):
            answer(engine, segments, "bounded")
        monkeypatch.undo()
