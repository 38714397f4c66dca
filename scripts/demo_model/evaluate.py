"""Measures the demo model: exact match per kind of question, compared with the best guess.

One question behind each context, as in serving. A question counts if every token of the answer and the end of turn
after it are the likeliest, so that greedy decoding generates exactly the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from ccjax.demo.world import KINDS, TEST_SEED, Context, Kind, held_out_contexts
from ccjax.models.llama3 import LlamaConfig, Params, forward
from scripts.demo_model.batches import exact_matches, make_batch
from scripts.demo_model.corpus import Corpus, question_context

PAD_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Score:
    """Exact match of `num_questions` questions, and that expected of guessing among the values present."""

    accuracy_ratio: float
    guess_ratio: float
    num_questions: int


@functools.partial(jax.jit, static_argnames="config")
def _is_likeliest(params: Params, config: LlamaConfig, token_ids: jax.Array) -> jax.Array:
    logits = forward(params, config, token_ids[:, :-1])
    return logits.argmax(-1) == token_ids[:, 1:]


def answered(
    params: Params, config: LlamaConfig, tokenizer: Tokenizer, contexts: Sequence[Context], batch_size: int = 16
) -> list[bool]:
    """Whether the first question of each context is answered exactly."""
    results: list[bool] = []
    for start in range(0, len(contexts), batch_size):
        part = [
            dataclasses.replace(context, questions=context.questions[:1])
            for context in contexts[start : start + batch_size]
        ]
        batch = make_batch(tokenizer, part, config.max_position_embeddings)
        longest = max(span.end for span in batch.spans)
        width = -(-longest // PAD_TOKENS) * PAD_TOKENS
        rows = jnp.asarray(batch.token_ids[:, :width])
        rows = jnp.pad(rows, ((0, batch_size - rows.shape[0]), (0, 0)))
        results += exact_matches(jax.device_get(_is_likeliest(params, config, rows)), batch.spans)
    return results


def score(contexts: Sequence[Context], results: Sequence[bool]) -> Score:
    """The figures of these contexts' first questions."""
    guesses = [context.questions[0].guess_ratio for context in contexts]
    return Score(sum(results) / len(results), sum(guesses) / len(guesses), len(results))


def evaluate_worlds(
    params: Params, config: LlamaConfig, tokenizer: Tokenizer, num_contexts: int = 200, num_passages: int = 4
) -> dict[Kind, Score]:
    """Scores per kind over fresh towns."""
    scores = {}
    for kind in KINDS:
        contexts = held_out_contexts(kind, num_contexts, num_passages)
        scores[kind] = score(contexts, answered(params, config, tokenizer, contexts))
    return scores


def corpus_contexts(corpus: Corpus, *, orders: int = 1, seed: int = 0) -> list[Context]:
    """Each question of the corpus behind five documents, `orders` times with different distractors and orders."""
    rng = random.Random(f"{TEST_SEED}/corpus/{seed}")
    return [question_context(corpus, question, rng) for _ in range(orders) for question in corpus.questions]


def evaluate_corpus(
    params: Params, config: LlamaConfig, tokenizer: Tokenizer, corpus: Corpus, *, orders: int = 2
) -> dict[Kind, Score]:
    """Scores per kind over the shipped corpus."""
    contexts = corpus_contexts(corpus, orders=orders)
    results = answered(params, config, tokenizer, contexts)
    scores: dict[Kind, Score] = {}
    for kind in KINDS:
        picked = [index for index, context in enumerate(contexts) if context.questions[0].kind == kind]
        scores[kind] = score([contexts[index] for index in picked], [results[index] for index in picked])
    return scores
