"""The kernels in the model's steps: the identities of reuse hold, in float32 to the oracle and in bfloat16."""

import concurrent.futures
import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig, Request, SamplingParams
from ccjax.loading.model import LoadedModel
from ccjax.models.llama3 import LlamaConfig, init_params
from ccjax.models.llama3.forward import forward
from ccjax.runner.device_model import DeviceModel
from ccjax.types import ChunkId, PlannedSegment, PrefillPlan, VariantId
from tests.engine.few_shapes import few_shapes
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted, run_plan, run_reusing
from tests.oracles import llama_forward
from tests.pallas_kernels.attention_cases import KERNELS

MODEL = TinyModel(num_hidden_layers=2, num_attention_heads=4, head_dim=32)
LENGTHS = [41, 20, 9]


def plan(*actions):
    """`actions`: recompute offsets of a reused passage, None to compute it."""
    segments, start = [], 0
    for number, (length, offsets) in enumerate(zip(LENGTHS, actions, strict=True)):
        kind = {"action": "compute"}
        if offsets is not None:
            kind = {"action": "reuse", "variant_id": VariantId(f"v{number}"), "recompute_offsets": tuple(offsets)}
        role = "question" if number == len(LENGTHS) - 1 else "passage"
        segments.append(
            PlannedSegment(role=role, start=start, num_tokens=length, chunk_id=ChunkId(f"c{number}"), **kind)
        )
        start += length
    return PrefillPlan(tuple(segments))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_full_prefill_reuse_and_recompute_agree_with_the_oracle(implementation):
    prompt = np.random.default_rng(0).integers(0, 97, sum(LENGTHS)).astype(np.int32)
    wanted, oracles = llama_forward(MODEL.weights, MODEL.raw, prompt)
    model = DeviceModel(MODEL.loaded.params, MODEL.config, implementation=implementation)

    full = run_plan(model, prompt, plan(None, None, None), collect=True)
    np.testing.assert_allclose(full.last_logits, wanted, atol=TOLERANCE)
    for layer, oracle in zip(full.layers, oracles, strict=True):
        # Segments begin at 0, 41, 61, 70: a token's mass is on its own segment and earlier ones; the mass on the first
        # four tokens, the attention sink, does not count.
        mass, own = np.asarray(layer.mass)[: len(prompt)], np.asarray(layer.self_mass)[: len(prompt)]
        np.testing.assert_allclose(mass.sum(-1), oracle.attention.mean(0)[:, 4:].sum(-1), atol=1e-5)
        assert not mass[:41, 1:].any() and not mass[:61, 2:].any() and (mass[61:, :3] > 0.0).all()
        assert (own <= mass[np.arange(len(prompt)), np.repeat([0, 1, 2], LENGTHS)] + 1e-6)[4:].all()

    # The first passage is read from the store; of the second, all rows of stored NaN are recomputed.
    first = full.kv.read_layers(0, MODEL.config.num_layers)[:, :, :41]
    stored = {"v0": first, "v1": np.full_like(first[:, :, :20], np.nan)}
    reuse = plan((), range(20), None)
    merged = run_reusing(model, prompt, reuse, lambda variant, a, b: stored[variant][a:b])
    np.testing.assert_allclose(merged.last_logits[-1], wanted[-1], atol=TOLERANCE)

    stored["v0"] = np.roll(first, 1, axis=2)  # the mutant: shifted by one position
    wrong = run_reusing(model, prompt, reuse, lambda variant, a, b: stored[variant][a:b])
    assert np.abs(wrong.last_logits[-1] - wanted[-1]).max() > 100 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_batched_requests_generate_the_tokens_of_the_oracle(implementation):
    segments = draw_segments(np.random.default_rng(1), [41, 20])
    prompts = [segments, permuted(segments, [1, 0])]
    with MODEL.engine(attention=implementation, max_model_len=128, strategy="prefix") as engine:
        for _ in range(2):  # computed, then reused
            with concurrent.futures.ThreadPoolExecutor(2) as clients:
                answers = list(
                    clients.map(lambda prompt: engine.generate_from_tokens(prompt, max_new_tokens=3), prompts)
                )
            for prompt, answered in zip(prompts, answers, strict=True):
                tokens = [*itertools.chain(*prompt), *answered.token_ids]
                logits = llama_forward(MODEL.weights, MODEL.raw, np.asarray(tokens))[0]
                assert list(answered.token_ids) == list(logits[-4:-1].argmax(-1))
    assert [answered.reuse.computed_tokens for answered in answers] == [len(segments[-1])] * 2


CONFIG = LlamaConfig(512, 256, 2, 4, 2, 64, 256, 500000.0)
ROUNDING = 0.03
"""Largest relative distance of bfloat16 logits if shapes, and so rounding, differ; measured on a CPU 0.007, and 0.6 for
KV computed behind other passages and reused unchanged."""
FLOAT32_ROUNDING = 3e-5
"""The same in float32 from the plain model on the host's CPU, which runs no kernel; measured on a CPU 1.3e-6, and 0.009
in bfloat16. TF32 keeps 11 bits, 5e-4."""


@pytest.fixture(scope="module")
def model():
    params = init_params(CONFIG, jax.random.key(5), jnp.bfloat16)
    return LoadedModel("identities", CONFIG, params, None, None, frozenset(), "identities")


SYSTEM, *PASSAGES, QUESTION = draw_segments(np.random.default_rng(5), [60, 48, 130, 33], system=17, vocab=512)
PROMPT, OTHER = [SYSTEM, *PASSAGES, QUESTION], [SYSTEM, *PASSAGES[::-1], QUESTION]


@contextlib.contextmanager
def engine(model, dtype="bfloat16", **settings):
    """A function that answers a prompt, on an engine with the device's own kernels."""
    sampling = SamplingParams(max_new_tokens=4, first_logits=True, ignore_eos=True)
    config = EngineConfig(dtype=dtype, max_model_len=512, **settings)
    with few_shapes(), Engine(model, config) as running:
        yield lambda prompt, reuse: running.run(Request(segments=prompt, sampling=sampling, reuse=reuse))


def distance(got, wanted):
    """Relative distance of two answers' logits of the first token."""
    got, wanted = (getattr(answer, "first_logits", answer) for answer in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def is_same(got, wanted):
    return got.token_ids == wanted.token_ids and distance(got, wanted) == 0.0


@pytest.mark.gpu
def test_reuse_behind_the_same_prefix_is_full_prefill_up_to_rounding(model):
    with engine(model) as ask:
        full, other = ask(PROMPT, "off"), ask(OTHER, "off")
        assert is_same(ask(PROMPT, "off"), full)
        assert is_same(ask(PROMPT, "bounded"), full), "an empty store"
        for prompt, reuse, wanted in ((PROMPT, "exact", full), (PROMPT, "bounded", full), (OTHER, "exact", other)):
            got = ask(prompt, reuse)
            assert got.reuse.exact and not got.reuse.recomputed_tokens
            assert distance(got, wanted) < ROUNDING
        on_host = ask(PROMPT, "exact")
    with engine(model, strategy="reuse", device_cache_bytes=8 << 20) as ask:
        ask(PROMPT, "exact")
        on_device = ask(PROMPT, "exact")
        assert {document.tier for document in on_device.reuse.per_document} == {"device"}
        assert is_same(on_device, on_host)
        naive = ask(OTHER, "bounded")
        assert min(distance(naive, other), distance(naive, full)) > ROUNDING


@pytest.mark.gpu
def test_everything_recomputed_is_full_prefill(model):
    with engine(model, recompute_ratio=1.0) as ask:
        ask(PROMPT, "exact")
        assert is_same(ask(OTHER, "bounded"), ask(OTHER, "off"))


@pytest.mark.gpu
def test_float32_on_the_device_agrees_with_the_plain_model_on_the_host(model):
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        token_ids = jnp.array([list(itertools.chain(*PROMPT))], jnp.int32)
        wanted = np.asarray(forward(jax.device_put(params, cpu), CONFIG, token_ids)[0, -1])
    with engine(dataclasses.replace(model, params=params), "float32") as ask:
        assert distance(ask(PROMPT, "off"), wanted) < FLOAT32_ROUNDING
    with engine(model) as ask:
        assert distance(ask(PROMPT, "off"), wanted) > FLOAT32_ROUNDING
