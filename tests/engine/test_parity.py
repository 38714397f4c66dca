"""The engine on a directory saved by transformers, against transformers' own prefill and greedy generation."""

import numpy as np
import pytest

from ccjax import Engine

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("peer")
    model.save_pretrained(directory)
    return model, directory


def _segments():
    random = np.random.default_rng(0)
    return [[int(token) for token in random.integers(0, 151, length)] for length in (8, 60, 45, 12)]


def test_prefill_and_greedy_decoding_match_transformers_even_with_reuse(peer):
    import torch

    model, directory = peer
    segments = _segments()
    ids = torch.tensor([[token for segment in segments for token in segment]])
    with torch.inference_mode():
        logits = model(ids).logits[0].numpy()
        tokens = model.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :].tolist()
    with Engine.from_pretrained(directory) as engine:
        np.testing.assert_allclose(engine.prefill_logits(ids[0].tolist()), logits, atol=1e-4)
        for reuse in ("off", "exact", "bounded"):
            assert list(engine.generate_from_tokens(segments, max_new_tokens=32, reuse=reuse).token_ids) == tokens
    assert len(set(tokens)) > 5 and np.abs(logits).max() > 1


def test_bfloat16_logits_stay_close_to_transformers(peer):
    import torch

    model, directory = peer
    ids = [token for segment in _segments() for token in segment]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    with Engine.from_pretrained(directory, dtype="bfloat16") as engine:
        error = np.abs(engine.prefill_logits(ids) - logits).max() / np.abs(logits).max()
        report = engine.generate_from_tokens(_segments(), max_new_tokens=2).reuse
        again = engine.generate_from_tokens(_segments(), max_new_tokens=2).reuse
    assert 1e-4 < error < 0.06
    assert report.reused_tokens == 0 and again.reused_tokens == 113
