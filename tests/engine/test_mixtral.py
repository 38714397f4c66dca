"""A mixture of experts in the engine: the identities of tests/engine/test_identities.py, a running batch, and Hugging
Face transformers' own prefill and greedy generation."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax import Engine
from ccjax.loading.model import read_model_files
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.engine.test_batch_loop import Client, ask
from tests.engine.test_identities import answer, assert_same
from tests.oracles import llama_forward

MODEL = TinyModel(5, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)


@pytest.mark.parametrize("lengths", [[1], [90, 1, 1, 200, 33]], ids=str)
def test_full_prefill_matches_the_oracle(lengths):
    tokens = [token for part in draw_segments(np.random.default_rng(len(lengths)), lengths) for token in part]
    with MODEL.engine() as engine:
        logits = engine.prefill_logits(tokens)
    np.testing.assert_allclose(logits, llama_forward(MODEL.weights, MODEL.raw, tokens)[0], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "reuse"),
    [([300], "fast"), ([40, 40, 41], "bounded"), ([10, 20, 30, 40, 50, 60, 70], "exact")],
    ids=str,
)
def test_cold_run_equals_full_prefill_and_warm_run_recomputes_nothing(lengths, reuse):
    segments = draw_segments(np.random.default_rng(sum(lengths)), lengths)
    total = sum(map(len, segments))
    with MODEL.engine() as engine:
        plain = answer(engine, segments, "off")
        assert (plain[2].computed_tokens, plain[2].reused_tokens, plain[2].exact) == (total, 0, True)
        for reused in (0, total - len(segments[-1])):
            again = answer(engine, segments, reuse)
            assert_same(again, plain)
            assert (again[2].reused_tokens, again[2].recomputed_tokens, again[2].exact) == (reused, 0, True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_full_recompute_and_exact_reuse_equal_full_prefill_in_any_order(seed):
    random = np.random.default_rng(seed)
    lengths = [int(length) for length in random.integers(1, 120, random.integers(3, 8))]
    segments = draw_segments(random, lengths)
    with MODEL.engine(recompute_ratio=1.0) as everything, MODEL.engine() as engine:
        for _ in range(3):
            shuffled = permuted(segments, random.permutation(len(lengths)))
            plain = answer(engine, shuffled, "off", tokens=12)
            assert_same(answer(everything, shuffled, "bounded", tokens=12), plain)
            exact = answer(engine, shuffled, "exact", tokens=12)
            assert_same(exact, plain)
            assert exact[2].exact and exact[2].recomputed_tokens == 0


def test_naive_reuse_behind_other_chunks_differs_from_full_prefill():
    """Mutant for the identities above: without recompute the error far exceeds the tolerance."""
    segments = draw_segments(np.random.default_rng(0), [60, 50, 40])
    shuffled = permuted(segments, [2, 1, 0])
    with MODEL.engine(strategy="reuse") as engine:
        answer(engine, segments, "bounded")
        naive, plain = answer(engine, shuffled, "bounded"), answer(engine, shuffled, "off")
    assert not naive[2].exact and naive[2].reused_tokens > 100
    assert max(abs(a - b) for a, b in zip(naive[1], plain[1], strict=True)) > 100 * TOLERANCE


def test_exact_answers_in_a_batch_equal_those_of_each_request_alone():
    random = np.random.default_rng(8)
    segments = draw_segments(random, [40, 33, 64, 17])
    orders = [random.permutation(4) for _ in range(4)]
    with MODEL.engine() as engine:
        wanted = [answer(engine, permuted(segments, order), "off", tokens=20)[0] for order in orders]
    with MODEL.engine(max_num_batched_tokens=64, device_cache_bytes=3 << 20) as engine:
        for _ in range(2):
            clients = [Client(engine, ask(permuted(segments, order), "exact", 20)) for order in orders]
            assert [client.response().token_ids for client in clients] == wanted


def test_fingerprint_of_a_model_without_experts_is_unchanged():
    """It is part of the key of stored chunk-caches."""
    wanted = "6699599aca887d4fa6862ab4ad9c6cf40d67acfeea3c21561f21ec6a12fbc109"
    assert read_model_files("demo").fingerprint("float32") == wanted


@pytest.mark.peers
@pytest.mark.parametrize("is_original", [True, False])
def test_prefill_and_greedy_decoding_match_transformers_even_with_reuse(tmp_path, is_original):
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path, **({} if is_original else {"save_original_format": False}))
    random = np.random.default_rng(0)
    segments = [[int(token) for token in random.integers(0, 151, length)] for length in (8, 60, 45, 12)]
    ids = torch.tensor([[token for segment in segments for token in segment]])
    with torch.inference_mode():
        logits = model(ids).logits[0].numpy()
        tokens = model.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :].tolist()
    assert len(set(tokens)) > 5 and np.abs(logits).max() > 1
    with Engine.from_pretrained(tmp_path) as engine:
        np.testing.assert_allclose(engine.prefill_logits(ids[0].tolist()), logits, atol=1e-4)
        for reuse in ("off", "exact", "bounded"):
            assert list(engine.generate_from_tokens(segments, max_new_tokens=32, reuse=reuse).token_ids) == tokens
