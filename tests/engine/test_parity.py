"""The engine on a directory saved by transformers, against transformers' own prefill and greedy generation."""

import numpy as np
import pytest

from ccjax import Engine

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def segments():
    """The tokens of a prompt's segments."""
    random = np.random.default_rng(0)
    return [[int(token) for token in random.integers(0, 151, length)] for length in (8, 60, 45, 12)]


def saved(directory, name, **options):
    """A random model of transformers, saved to the directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    more = {"num_local_experts": 8} if name == "Mixtral" else {"tie_word_embeddings": False}
    config = getattr(transformers, f"{name}Config")(
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
        **more,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(directory, **options)
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [("Llama", {}), ("Mixtral", {}), ("Mixtral", {"save_original_format": False})],
    ids=str,
)
def test_prefill_and_greedy_decoding_match_transformers_even_with_reuse(tmp_path, segments, name, options):
    import torch

    model = saved(tmp_path, name, **options)
    ids = torch.tensor([[token for segment in segments for token in segment]])
    with torch.inference_mode():
        logits = model(ids).logits[0].numpy()
        tokens = model.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :].tolist()
    with Engine.from_pretrained(tmp_path) as engine:
        np.testing.assert_allclose(engine.prefill_logits(ids[0].tolist()), logits, atol=1e-4)
        for reuse in ("off", "exact", "bounded"):
            assert list(engine.generate_from_tokens(segments, max_new_tokens=32, reuse=reuse).token_ids) == tokens
    assert len(set(tokens)) > 5 and np.abs(logits).max() > 1


def test_bfloat16_logits_stay_close_to_transformers(tmp_path, segments):
    import torch

    model = saved(tmp_path, "Llama")
    ids = [token for segment in segments for token in segment]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    with Engine.from_pretrained(tmp_path, dtype="bfloat16") as engine:
        error = np.abs(engine.prefill_logits(ids) - logits).max() / np.abs(logits).max()
        report = engine.generate_from_tokens(segments, max_new_tokens=2).reuse
        again = engine.generate_from_tokens(segments, max_new_tokens=2).reuse
    assert 1e-4 < error < 0.06
    assert report.reused_tokens == 0 and again.reused_tokens == 113
