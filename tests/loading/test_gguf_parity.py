"""Logits of GGUF files against those of Hugging Face transformers on the same weights, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from ccjax.loading.gguf import config_of, load_gguf, open_gguf, text_of
from ccjax.models.llama3 import forward
from tests.loading.gguf_files import Shape, as_read, byte_level_words, hugging_face_tensors, write_gguf

pytestmark = pytest.mark.peers

ATOL = 1e-4
TEXT = "The letter was written by Ann Lee in 1912.\n\nWho wrote it, and when?"


def peer_logits(path: Path, tokens: np.ndarray, shape: Shape) -> np.ndarray:
    """Of the model whose configuration transformers reads from the file; the weights are put back by the tests' own
    means, because transformers wants accelerate for them."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    written = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    tensors = as_read(shape, config.vocab_size, written, tied=config.tie_word_embeddings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unknown = model.load_state_dict({n: torch.from_numpy(v) for n, v in tensors.items()}, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()) and not unknown
    model.tie_weights()
    with torch.no_grad():
        return model.float().eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()


def our_logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    file = open_gguf(path)
    config = config_of(file)
    params = load_gguf(file, config, dtype=jnp.float32)
    return np.asarray(forward(params, config, jnp.asarray(tokens[None], jnp.int32))[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F16], ids=lambda kind: kind.name)
def test_logits_of_small_files_match_transformers(tmp_path, kind, tied):
    shape, words = Shape(), byte_level_words()
    path = tmp_path / "model.gguf"
    write_gguf(path, shape, hugging_face_tensors(shape, len(words.tokens), tied=tied), words, kind=kind)
    tokens = np.random.default_rng(1).integers(0, len(words.tokens), 200)
    ours, peers = our_logits(path, tokens), peer_logits(path, tokens, shape)
    assert np.abs(peers).max() > 1
    np.testing.assert_allclose(ours, peers, atol=ATOL, rtol=0)


def test_logits_of_smollm2_match_transformers(smollm2):
    found = text_of(open_gguf(smollm2))
    assert found is not None
    tokens = np.array(found[0].encode(TEXT, allow_special=False))
    shape = Shape(num_layers=30, d_model=576, num_heads=9, num_kv_heads=3, d_ff=1536)
    ours, peers = our_logits(smollm2, tokens), peer_logits(smollm2, tokens, shape)
    print(f"largest difference {np.abs(ours - peers)[1:].max():.1e}, largest logit {np.abs(peers).max():.1f}")
    np.testing.assert_allclose(ours[1:], peers[1:], atol=ATOL, rtol=0)
    # The first token, which the others attend to most, rounds worse: there float32 is 4e-5 (transformers) and 2e-4
    # (ours) from transformers in float64.
    np.testing.assert_allclose(ours[0], peers[0], atol=5 * ATOL, rtol=0)
