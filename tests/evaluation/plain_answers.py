"""The embedded model's answers by its plain forward pass."""

import functools

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from ccjax.loading.model import DEMO_MODEL
from ccjax.models.llama3 import forward
from ccjax.models.llama3.convert import load_config, load_params
from scripts.train_demo import exact_matches, make_batch

plain_forward = jax.jit(forward, static_argnums=1)


@functools.cache
def demo_model():
    """Parameters, configuration and tokenizer."""
    config = load_config(DEMO_MODEL)
    params = load_params(DEMO_MODEL, config, dtype=jnp.float32)
    return params, config, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def answered(contexts, batch_size=4):
    """Whether the question of each context is answered exactly: every token of the answer is the likeliest."""
    params, config, tokenizer = demo_model()
    results = []
    for start in range(0, len(contexts), batch_size):
        batch = make_batch(tokenizer, contexts[start : start + batch_size], config.max_position_embeddings)
        width = -(-max(span.end for span in batch.spans) // 64) * 64
        rows = jnp.asarray(batch.token_ids[:, :width])
        rows = jnp.pad(rows, ((0, batch_size - rows.shape[0]), (0, 0)))
        likeliest = plain_forward(params, config, rows[:, :-1]).argmax(-1)
        results += exact_matches(jax.device_get(likeliest == rows[:, 1:]), batch.spans)
    return results
