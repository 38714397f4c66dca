"""Training batches: worlds as token ids in the engine's own segment order, with loss weights.

Each prompt segment is tokenized alone and the ids are concatenated, exactly as the engine does it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from ccjax.demo.lexicon import FILLERS
from ccjax.demo.world import Context, Difficulty, Kind, sample_context
from scripts.demo_model.tokenizer import (
    PAD,
    SYSTEM_PROMPT,
    answer_segment,
    document_segment,
    question_segment,
    system_segment,
    world_words,
)

CONTEXT_WEIGHT = 0.03
"""Loss weight of passage tokens; answers weigh 1. Passages are mostly random and at equal weight would dominate."""


@dataclasses.dataclass(frozen=True)
class AnswerSpan:
    """Position of one answer: tokens [start, end) of row `row`, including the end-of-turn token."""

    row: int
    start: int
    end: int
    kind: Kind
    guess_ratio: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's rows.

    Attributes:
      token_ids: [B, T] int32, padded on the right.
      weights: [B, T] float32, the loss weight of predicting each token.
      hints: [B, P, 2] int32, per question the position that predicts the answer's first token, and the token that the
        middle layers should have found there: the bridge's first for a question over two passages, else the answer's.
        Both 0 if there is no question.
    """

    token_ids: np.ndarray
    weights: np.ndarray
    hints: np.ndarray
    spans: tuple[AnswerSpan, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The shape of a batch and the worlds that fill it.

    Attributes:
      difficulties: worlds to draw from, each equally often; empty for the induction warm-up.
    """

    num_tokens: int
    batch_size: int
    difficulties: tuple[Difficulty, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
      rows: layouts of batches, each drawn equally often.
      num_questions: questions behind each context.
      recall_ratio: share of them that are a sentence to be completed by the value.
      advance_ratio: exact match over the last steps that starts the next stage.
      min_steps: steps before that is checked.
      max_steps: steps after which the next stage starts at any exact match; None for no limit.
      hint_weight: loss weight of a batch's hints.
    """

    name: str
    rows: tuple[Rows, ...]
    num_questions: int = 8
    recall_ratio: float = 0.0
    advance_ratio: float = 0.9
    min_steps: int = 150
    max_steps: int | None = None
    hint_weight: float = 0.0


def tokenize_context(tokenizer: Tokenizer, context: Context, system_prompt: str | None = SYSTEM_PROMPT) -> list[int]:
    """Token ids of the prompt up to, not including, the question."""
    segments = [system_segment(system_prompt)]
    segments += [document_segment(passage.title, passage.text) for passage in context.passages]
    return [token for encoding in tokenizer.encode_batch(segments, add_special_tokens=False) for token in encoding.ids]


def make_batch(
    tokenizer: Tokenizer,
    contexts: Sequence[Context],
    num_tokens: int,
    *,
    system_prompt: str | None = SYSTEM_PROMPT,
    recall: Callable[[], bool] = lambda: False,
) -> Batch:
    """One row per context; questions that do not fit into `num_tokens` are left out.

    A second question follows as the next turn of the same conversation, as rendered by the chat template. If `recall()`
    is true, a line of the user turn states the fact again instead, and its value counts as the answer.
    """
    token_ids = np.full((len(contexts), num_tokens), tokenizer.token_to_id(PAD), np.int32)
    weights = np.zeros((len(contexts), num_tokens), np.float32)
    hints = np.zeros((len(contexts), max(len(context.questions) for context in contexts), 2), np.int32)
    user = tokenizer.encode("<|user|>", add_special_tokens=False).ids
    spans = []
    for row, context in enumerate(contexts):
        ids = tokenize_context(tokenizer, context, system_prompt)
        weights[row, : len(ids)] = CONTEXT_WEIGHT
        recalled = [recall() for _ in context.questions]
        texts = []
        for question, is_line in zip(context.questions, recalled, strict=True):
            asked = question.recall if is_line else question_segment(question.text)
            texts += [asked, f" {question.answer}.\n" if is_line else answer_segment(question.answer)]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for turn, question in enumerate(context.questions):
            asked = (user if turn and not recalled[turn - 1] else []) + encoded[2 * turn]
            start = len(ids) + len(asked)
            end = start + len(encoded[2 * turn + 1])
            if end > num_tokens:
                break
            ids += asked + encoded[2 * turn + 1]
            weights[row, start:end] = 1.0
            hints[row, turn] = start - 1, tokenizer.encode(f" {question.bridge or question.answer}").ids[0]
            spans.append(AnswerSpan(row, start, end, question.kind, question.guess_ratio))
        ids = ids[:num_tokens]
        token_ids[row, : len(ids)] = ids
    return Batch(token_ids, weights, hints, tuple(spans))


def induction_batch(tokenizer: Tokenizer, rng: random.Random, batch_size: int, num_tokens: int) -> Batch:
    """Random words repeated with a random period per row; the loss is on the repeats only.

    With one period for all rows the model would only learn to copy from a fixed distance.
    """
    words = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in world_words()]
    token_ids = np.zeros((batch_size, num_tokens), np.int32)
    weights = np.zeros((batch_size, num_tokens), np.float32)
    spans = []
    for row in range(batch_size):
        period = rng.randint(6, num_tokens // 2)
        token_ids[row] = np.resize(np.asarray(rng.sample(words, period), np.int32), num_tokens)
        weights[row, period + 1 :] = 1.0
        spans += [AnswerSpan(row, at, at + 1, "single", 0.0) for at in range(period + 1, num_tokens)]
    return Batch(token_ids, weights, np.zeros((batch_size, 1, 2), np.int32), tuple(spans))


def stage_batch(tokenizer: Tokenizer, stage: Stage, rng: random.Random) -> Batch:
    """A new batch of the stage; the same `rng` state gives the same batch."""
    rows = rng.choice(stage.rows)
    if not rows.difficulties:
        return induction_batch(tokenizer, rng, rows.batch_size, rows.num_tokens)
    contexts = [sample_context(rng, rng.choice(rows.difficulties), stage.num_questions) for _ in range(rows.batch_size)]
    # Sometimes another system prompt or none, so that the model does not depend on the default one.
    system_prompt = rng.choices((SYSTEM_PROMPT, rng.choice(FILLERS), None), (8, 1, 1))[0]
    return make_batch(
        tokenizer,
        contexts,
        rows.num_tokens,
        system_prompt=system_prompt,
        recall=lambda: rng.random() < stage.recall_ratio,
    )


def exact_matches(correct: np.ndarray, spans: Sequence[AnswerSpan]) -> list[bool]:
    """Per answer, whether every token of it was predicted, so that greedy decoding would generate exactly it.

    Args:
      correct: [B, T - 1] bool; entry t says whether token t + 1 was the likeliest one after tokens 0..t.
    """
    return [bool(correct[span.row, span.start - 1 : span.end - 1].all()) for span in spans]
