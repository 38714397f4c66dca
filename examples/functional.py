"""The functional API, from two passages to an answer in one jitted call: python examples/functional.py

Each passage is prefilled behind the instructions, without the other; the second is moved behind the first, 15 % of
their tokens are computed again, and the answer is decoded. Compiling takes about a minute.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
from jax import lax

from ccjax.functional import KV, deviations, generate, load, move_keys, partial_prefill, prefill

INSTRUCTIONS = "Answer the question from the passages.\n\n"
PASSAGES = (
    "The old lighthouse on Heron Point was built in 1871 from blocks of grey granite.\n\n",
    "The ferry Marigold sails from Saltby to the island three times a day. It carries sixty passengers.\n\n",
)
QUESTION = "Question: How often does the ferry sail to the island?\nAnswer: The ferry sails"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, demo, a Hugging Face directory or a GGUF file")
    params, config, tokenizer = load(parser.parse_args().model)
    assert tokenizer is not None
    texts = (INSTRUCTIONS, *PASSAGES, QUESTION)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    parts = [jnp.asarray(tokenizer.encode(text, allow_special=False), jnp.int32) for text in texts]
    parts[0] = jnp.concatenate([jnp.asarray(bos, jnp.int32), parts[0]])

    @jax.jit
    def answer(params, instructions, first, second, question):
        _, a = prefill(params, config, jnp.concatenate([instructions, first]))
        _, b = prefill(params, config, jnp.concatenate([instructions, second]))
        merged = KV.merge(a, move_keys(b[instructions.size :], 0, first.size))
        tokens = jnp.concatenate([instructions, first, second, question])

        deviation = deviations(params, config, merged, tokens[: merged.num_slots])
        _, repaired = lax.top_k(deviation, round(0.15 * (first.size + second.size)))
        asked = jnp.arange(merged.num_slots, tokens.size)
        rows = jnp.sort(jnp.concatenate([repaired, asked]))
        logits, kv, _ = partial_prefill(params, config, merged.append(asked), tokens[rows], rows)
        return generate(params, config, kv, logits.argmax(), 12)[0]

    token_ids = answer(params, *parts).tolist()
    end = next((index for index, token_id in enumerate(token_ids) if token_id in tokenizer.eos_ids), None)
    print(QUESTION + tokenizer.decode(token_ids[:end]))


if __name__ == "__main__":
    main()
