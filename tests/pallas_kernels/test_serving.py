"""The kernels in the model's steps: the same serving identities hold as on the CPU path."""

import concurrent.futures
import itertools

import numpy as np
import pytest

from ccjax.runner.device_model import DeviceModel
from ccjax.types import ChunkId, PrefillPlan, Segment, VariantId
from scripts.gpucheck.attention_cases import KERNELS
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted, run_plan, run_reusing
from tests.oracles import llama_forward

MODEL = TinyModel(num_hidden_layers=2, num_attention_heads=4, head_dim=32)
LENGTHS = [41, 20, 9]


def plan(*actions):
    """`actions`: recompute offsets of a reused passage, None to compute it."""
    segments, start = [], 0
    for number, (length, offsets) in enumerate(zip(LENGTHS, actions, strict=True)):
        kind = {"action": "compute"}
        if offsets is not None:
            kind = {"action": "reuse", "variant_id": VariantId(f"v{number}"), "recompute_offsets": tuple(offsets)}
        role = "question" if number == len(LENGTHS) - 1 else "document"
        segments.append(Segment(role=role, start=start, num_tokens=length, chunk_id=ChunkId(f"c{number}"), **kind))
        start += length
    return PrefillPlan(tuple(segments))


@pytest.mark.parametrize("implementation", KERNELS)
def test_full_prefill_reuse_and_recompute_agree_with_the_oracle(implementation):
    prompt = np.random.default_rng(0).integers(0, 97, sum(LENGTHS)).astype(np.int32)
    wanted, oracles = llama_forward(MODEL.weights, MODEL.raw, prompt)
    model = DeviceModel(MODEL.loaded.params, MODEL.config, implementation=implementation)

    full = run_plan(model, prompt, plan(None, None, None), collect=True)
    np.testing.assert_allclose(full.last_logits, wanted, atol=TOLERANCE)
    for layer, oracle in zip(full.layers, oracles, strict=True):
        # Segment bounds are 0, 41, 61, 70: a token's mass is on its own segment and earlier ones; the mass on the first
        # four tokens, the attention sink, does not count.
        mass, own = np.asarray(layer.mass)[: len(prompt)], np.asarray(layer.self_mass)[: len(prompt)]
        np.testing.assert_allclose(mass.sum(-1), oracle.attention.mean(0)[:, 4:].sum(-1), atol=1e-5)
        assert not mass[:41, 1:].any() and not mass[:61, 2:].any() and (mass[61:, :3] > 0.0).all()
        assert (own <= mass[np.arange(len(prompt)), np.repeat([0, 1, 2], LENGTHS)] + 1e-6)[4:].all()

    # The first passage is read from the store; of the second, all rows of stored NaN are recomputed.
    first = np.stack([np.stack([np.asarray(layer.k)[:41], np.asarray(layer.v)[:41]]) for layer in full.layers])
    stored = {"v0": first, "v1": np.full_like(first[:, :, :20], np.nan)}
    reuse = plan((), range(20), None)
    merged = run_reusing(model, prompt, reuse, lambda variant, a, b: stored[variant][a:b])
    np.testing.assert_allclose(merged.last_logits[-1], wanted[-1], atol=TOLERANCE)

    stored["v0"] = np.roll(first, 1, axis=2)  # the mutant: shifted by one position
    wrong = run_reusing(model, prompt, reuse, lambda variant, a, b: stored[variant][a:b])
    assert np.abs(wrong.last_logits[-1] - wanted[-1]).max() > 100 * TOLERANCE


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
