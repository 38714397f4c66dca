"""Trains the embedded model on made-up towns: python scripts/train_demo.py --out DIR [--steps N]

Every 500 steps and at the end the model is written to DIR in Hugging Face's layout, with the shipped tokenizer:
`ccjax evaluate --model DIR --ways full` measures it. The shipped weights are of 4,000 steps by the same curriculum, 90
minutes on two Xeon cores shared with other work.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import Array
from jaxtyping import Bool, Float, Int
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer

from ccjax.evaluation.town_words import FILLERS
from ccjax.evaluation.towns import KINDS, Context, Difficulty, Kind, sample_context
from ccjax.kernels.rope import apply_rope
from ccjax.loading.model import DEMO_MODEL
from ccjax.models.llama3 import LayerParams, LlamaConfig, Params, init_params
from ccjax.models.llama3.convert import load_config, save_pretrained
from ccjax.models.llama3.layers import finish_layer, project_qkv, rope_frequencies, unembed

SYSTEM_PROMPT = "Answer the question from the passages."
CONTEXT_WEIGHT = 0.03
"""Loss weight of passage tokens; answers weigh 1. Passages are mostly random and at equal weight would dominate."""
HINT_LAYERS, BLOCK_TOKENS, WARMUP_STEPS, WINDOW_STEPS = 4, 96, 50, 50
"""Layers after which hints are predicted; queries of a block of attention; steps in which learning rates rise; steps
over which exact match is averaged before the curriculum moves on."""
CONSTANT = 4.0
"""Axis 0 of every embedding: queries and keys need a component common to all tokens to attend by position alone."""
BACK_SHARPNESS, MATCH_SHARPNESS, COPY_STRENGTH = 6.0, 4.0, 3.0
"""Of the initial induction head."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The shape of a batch and the towns that fill it, each equally often; none for the induction warm-up."""

    num_tokens: int
    batch_size: int
    difficulties: tuple[Difficulty, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the curriculum.

    Attributes:
      rows: layouts of batches, each drawn equally often.
      num_questions: questions behind each context.
      recall_ratio: share of them that are a sentence to be completed by the value.
      advance_ratio: exact match over the last steps that starts the next stage, after `min_steps` at the earliest.
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


def _registers(*direct_ratios: float) -> tuple[Difficulty, ...]:
    return tuple(Difficulty(1, {"register": 1}, direct_ratio=ratio, num_relations=1) for ratio in direct_ratios)


def _hops(*direct_ratios: float, kinds: tuple[Kind, ...] = ("alias", "two_hop")) -> tuple[Difficulty, ...]:
    weights = {"nickname": 1.0, "place": 1.0}
    return tuple(Difficulty(2, weights, direct_ratio=ratio, num_relations=1, kinds=kinds) for ratio in direct_ratios)


_CROSSING: tuple[Kind, ...] = ("pronoun", "alias", "two_hop")
_PLAIN = {"register": 1.0, "portrait": 3.0, "pair": 1.0}
_ALL = {"register": 1.0, "portrait": 2.0, "pair": 1.0, "follow": 1.5, "nickname": 1.6, "place": 1.6}
_STRAY = {"register": 1.0, "portrait": 3.0, "pair": 1.0, "gossip": 1.2, "nickname": 0.5, "place": 1.0}
_PAIRS = Difficulty(2, {"register": 2, "portrait": 1, "pair": 2}, direct_ratio=0.3, num_relations=2)
_TWO = (*_registers(0.3), _PAIRS, *_hops(0.6, 0.3, kinds=KINDS))
_ONLY_HOPS = (*_hops(0.8, 0.4, 0.2), _PAIRS)
_THREE = (
    Difficulty(3, _PLAIN, direct_ratio=0.1, num_relations=3),
    Difficulty(3, _ALL, direct_ratio=0.1, num_relations=3, kinds=KINDS),
    *_hops(0.1),
)
_FIVE = (
    Difficulty(5, _PLAIN, min_words=27, num_relations=6),
    Difficulty(5, _ALL, min_words=27, kinds=KINDS),
    Difficulty(3, _ALL, num_relations=3, kinds=_CROSSING),
)
_LONG = (
    Difficulty(5, _PLAIN, min_words=24, max_words=80, num_relations=7),
    Difficulty(5, _STRAY, min_words=24, max_words=60),
    Difficulty(4, _ALL, min_words=24, max_words=80, kinds=KINDS),
    Difficulty(4, _ALL, min_words=24, kinds=_CROSSING),
)
_EIGHT = (Difficulty(8, _ALL, min_words=24, max_words=80, kinds=KINDS),)
STAGES = (
    Stage("induction", (Rows(64, 32),), min_steps=50),
    Stage("recall", (Rows(128, 32, _registers(1.0)),), recall_ratio=1.0),
    Stage("questions", (Rows(176, 24, _registers(1.0, 0.4)),), recall_ratio=0.4, advance_ratio=0.75),
    Stage("register", (Rows(176, 24, _registers(0.15)),), recall_ratio=0.3),
    Stage("two passages", (Rows(240, 20, _TWO),), 8, 0.2, advance_ratio=0.88, max_steps=300, hint_weight=0.5),
    Stage("only hops", (Rows(160, 30, _ONLY_HOPS),), 4, 0.1, advance_ratio=0.85, max_steps=900, hint_weight=0.5),
    Stage("three passages", (Rows(288, 18, _THREE),), advance_ratio=0.85, max_steps=300, hint_weight=0.5),
    Stage("five passages", (Rows(384, 14, _FIVE),), advance_ratio=0.88, max_steps=400, hint_weight=0.3),
    Stage("eight passages", (Rows(416, 13, _LONG), Rows(640, 8, _EIGHT)), advance_ratio=1.1, hint_weight=0.2),
)
"""Order and thresholds are measured: if it starts with five passages, a model of this size remains for thousands of
steps at the level of guessing among the values present. Two hops remain there until they are most questions of a batch
and the middle layers get the bridge as a hint. The last stage runs until the steps are used up."""


@dataclasses.dataclass(frozen=True)
class AnswerSpan:
    """Position of one answer: tokens [start, end) of row `row`, including the end-of-turn token."""

    row: int
    start: int
    end: int
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's rows: token ids [B, T], padded on the right; the loss weight of predicting each; hints [B, P, 2].

    A hint is the position that predicts an answer's first token, and the token that the middle layers should have found
    there: the bridge's first for a question over two passages, else the answer's. Both are 0 if there is no question.
    """

    token_ids: np.ndarray
    weights: np.ndarray
    hints: np.ndarray
    spans: tuple[AnswerSpan, ...]


def context_ids(tokenizer: Tokenizer, context: Context, system_prompt: str | None = SYSTEM_PROMPT) -> list[int]:
    """Token ids of the prompt up to the question; each segment is tokenized alone, as the engine does."""
    system = "" if system_prompt is None else f"<|system|> {system_prompt.strip()}<|end|>"
    segments = [f"<|bos|>{system}<|user|>"]
    segments += [f"{passage.title}\n{passage.text}\n\n" for passage in context.passages]
    return [token for encoding in tokenizer.encode_batch(segments, add_special_tokens=False) for token in encoding.ids]


def make_batch(
    tokenizer: Tokenizer,
    contexts: Sequence[Context],
    num_tokens: int,
    system_prompt: str | None = SYSTEM_PROMPT,
    recall: Callable[[], bool] = bool,
) -> Batch:
    """One row per context; questions that do not fit into `num_tokens` are left out.

    A second question is the next turn of the conversation. If `recall()` is true, a line of the user turn states the
    fact again instead, and its value counts as the answer.
    """
    token_ids = np.full((len(contexts), num_tokens), tokenizer.token_to_id("<|pad|>"), np.int32)
    weights = np.zeros((len(contexts), num_tokens), np.float32)
    hints = np.zeros((len(contexts), max(len(context.questions) for context in contexts), 2), np.int32)
    user, spans = tokenizer.token_to_id("<|user|>"), []
    for row, context in enumerate(contexts):
        ids = context_ids(tokenizer, context, system_prompt)
        weights[row, : len(ids)] = CONTEXT_WEIGHT
        recalled = [recall() for _ in context.questions]
        texts = []
        for question, is_line in zip(context.questions, recalled, strict=True):
            texts += [question.recall if is_line else f"{question.text}<|end|><|assistant|>"]
            texts += [f" {question.answer}" + (".\n" if is_line else "<|end|>")]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for turn, question in enumerate(context.questions):
            asked = ([user] if turn and not recalled[turn - 1] else []) + encoded[2 * turn]
            start = len(ids) + len(asked)
            end = start + len(encoded[2 * turn + 1])
            if end > num_tokens:
                break
            ids += asked + encoded[2 * turn + 1]
            weights[row, start:end] = 1.0
            hints[row, turn] = start - 1, tokenizer.encode(f" {question.bridge or question.answer}").ids[0]
            spans.append(AnswerSpan(row, start, end, question.kind))
        token_ids[row, : len(ids)] = ids[:num_tokens]  # pyright: ignore[reportArgumentType, reportCallIssue]
    return Batch(token_ids, weights, hints, tuple(spans))


def induction_batch(tokenizer: Tokenizer, rng: random.Random, batch_size: int, num_tokens: int) -> Batch:
    """Random words repeated with a random period per row; the loss is on the repeats only.

    With one period for all rows the model would only learn to copy from a fixed distance.
    """
    words = sorted(number for word, number in tokenizer.get_vocab().items() if word.startswith("Ġ") and len(word) > 2)
    token_ids = np.zeros((batch_size, num_tokens), np.int32)
    weights = np.zeros((batch_size, num_tokens), np.float32)
    spans = []
    for row in range(batch_size):
        period = rng.randint(6, num_tokens // 2)
        token_ids[row] = np.resize(np.asarray(rng.sample(words, period), np.int32), num_tokens)
        weights[row, period + 1 :] = 1.0
        spans += [AnswerSpan(row, at, at + 1, "single") for at in range(period + 1, num_tokens)]
    return Batch(token_ids, weights, np.zeros((batch_size, 1, 2), np.int32), tuple(spans))


def stage_batch(tokenizer: Tokenizer, stage: Stage, rng: random.Random) -> Batch:
    """A new batch of the stage; the same `rng` state gives the same batch."""
    rows = rng.choice(stage.rows)
    if not rows.difficulties:
        return induction_batch(tokenizer, rng, rows.batch_size, rows.num_tokens)
    contexts = [sample_context(rng, rng.choice(rows.difficulties), stage.num_questions) for _ in range(rows.batch_size)]
    # Sometimes another system prompt or none, so that the model does not depend on the default one.
    system_prompt = rng.choices((SYSTEM_PROMPT, rng.choice(FILLERS), None), (8, 1, 1))[0]
    return make_batch(tokenizer, contexts, rows.num_tokens, system_prompt, lambda: rng.random() < stage.recall_ratio)


def exact_matches(correct: np.ndarray, spans: Sequence[AnswerSpan]) -> list[bool]:
    """Per answer, whether every token of it was predicted, so that greedy decoding would generate exactly it: `correct`
    [B, T - 1] says at t whether token t + 1 was the likeliest."""
    return [bool(correct[span.row, span.start - 1 : span.end - 1].all()) for span in spans]


def initial_params(config: LlamaConfig, seed: int) -> Params:
    """Random weights with embeddings of unit scale, compensated in the final norm, and an induction head.

    Every answer depends on such a head (layer 0: look one token back; layer 1: find the token that followed an earlier
    copy of this one). From random weights 1,500 steps learnt half of it over this vocabulary, and the questions then
    stayed at guessing; here it exists at step 0, and is trained like any other weight.
    """
    key, carry_key, copy_key = jax.random.split(jax.random.key(seed), 3)
    params = init_params(config, key)
    width, head_dim = config.d_model, config.head_dim
    # A tied embedding small enough for the logits would vanish in the residual stream under the layers' outputs.
    embedding = (params.embedding * width**0.5).at[:, 0].set(CONSTANT)
    layers: tuple[Any, ...] = params.layers
    first, second, *rest = layers
    carry, copy = (jax.random.normal(k, (width, head_dim)).at[0].set(0.0) for k in (carry_key, copy_key))
    carry, copy = carry * width**-0.5, copy * width**-0.5
    basis = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(carry_key, 1), (width - 1, head_dim)))[0]
    carried = jnp.pad(basis.T, ((0, 0), (1, 0)))
    query, back = _look_back(config)
    first = dataclasses.replace(
        first,
        wq=first.wq.at[:, 0].set(0.0).at[0, 0].set(query),
        wk=first.wk.at[:, 0].set(0.0).at[0, 0].set(back),
        wv=first.wv.at[:, 0].set(carry),
        wo=first.wo.at[0].set(carried),
    )
    second = dataclasses.replace(
        second,
        wq=second.wq.at[:, 0].set(MATCH_SHARPNESS * carry),
        wk=second.wk.at[:, 0].set(MATCH_SHARPNESS * carried.T),
        wv=second.wv.at[:, 0].set(copy),
        wo=second.wo.at[0].set(COPY_STRENGTH * copy.T * (width / head_dim)),
    )
    return dataclasses.replace(
        params, embedding=embedding, final_norm=params.final_norm * width**-0.5, layers=(first, second, *rest)
    )


def _look_back(config: LlamaConfig) -> tuple[np.ndarray, np.ndarray]:
    """Query and key of the constant axis; their score after RoPE, a sum of cos(f (distance - 1)) over the fast
    frequencies, which distinguish neighbours, peaks one token back."""
    frequencies = np.asarray(rope_frequencies(config))
    weight = np.where(frequencies > 0.2, BACK_SHARPNESS, 0.0)
    query = np.concatenate([weight, np.zeros_like(weight)])
    key = np.concatenate([np.cos(frequencies), np.sin(frequencies)]) * (np.tile(weight, 2) > 0)
    return query.astype(np.float32), key.astype(np.float32)


def causal_attention(
    q: Float[Array, "B T Q H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
) -> Float[Array, "B T Q H"]:
    """Causal softmax attention, a block of queries at a time over the keys up to the block's end: without the masked
    half of each score matrix a training step on CPU takes 0.50 s instead of 0.95 s at B=16, T=320."""
    num_tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (array.swapaxes(1, 2) for array in (q * q.shape[3] ** -0.5, k, v))
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    blocks = []
    for start in range(0, num_tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, num_tokens)
        scores = jnp.matmul(q[:, :, start:end], k[:, :, :end].swapaxes(2, 3))
        hidden = jnp.arange(end)[None, :] > jnp.arange(start, end)[:, None]
        weights = jax.nn.softmax(scores + jnp.where(hidden, -1e30, 0.0)[None, None], axis=-1)
        blocks.append(jnp.matmul(weights, v[:, :, :end]))
    return jnp.concatenate(blocks, axis=2).swapaxes(1, 2)


def training_logits(
    params: Params, config: LlamaConfig, token_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T V"], Float[Array, "B T D"]]:
    """Next-token logits like `ccjax.models.llama3.forward`'s, float32, and the hidden states after `HINT_LAYERS`."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    frequencies = rope_frequencies(config)
    x = halfway = params.embedding[token_ids]
    for number, layer in enumerate(params.layers):
        q, k, v = project_qkv(x, layer, config.rms_norm_eps)
        q, k = apply_rope(q, positions, frequencies), apply_rope(k, positions, frequencies)
        x = finish_layer(x, causal_attention(q, k, v), layer, config.rms_norm_eps)
        halfway = x if number + 1 == HINT_LAYERS else halfway
    return unembed(x, params, config.rms_norm_eps), halfway


def weighted_loss(
    params: Params,
    config: LlamaConfig,
    token_ids: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    hints: Int[Array, "B P 2"],
    hint_weight: float,
) -> tuple[Float[Array, ""], Bool[Array, "B T-1"]]:
    """Weighted mean cross-entropy of each token given those before it, and where the right token was the likeliest.

    With a `hint_weight`, the mean cross-entropy of the hints (`Batch.hints`) is added, predicted from the hidden states
    after `HINT_LAYERS` layers: otherwise the model finds the first of two hops too late for the second.
    """
    logits, halfway = training_logits(params, config, token_ids[:, :-1])
    targets, weights = token_ids[:, 1:], weights[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = (losses * weights).sum() / weights.sum()
    if hint_weight:
        places, tokens = hints[..., 0], hints[..., 1]
        halfway = jnp.take_along_axis(halfway, places[..., None], axis=1)
        hinted = optax.softmax_cross_entropy_with_integer_labels(unembed(halfway, params, config.rms_norm_eps), tokens)
        has_hint = (tokens > 0).astype(hinted.dtype)
        loss += hint_weight * (hinted * has_hint).sum() / has_hint.sum()
    return loss, chosen >= logits.max(-1)


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW for the rest; the rates warm up, stay, and fall over the last fifth.

    Measured on the induction warm-up: Muon needs half of AdamW's steps.
    """
    fall_from = max(WARMUP_STEPS, num_steps * 4 // 5)

    def schedule(peak: float) -> optax.Schedule:
        rise, stay = optax.linear_schedule(0.0, peak, WARMUP_STEPS), optax.constant_schedule(peak)
        fall = optax.linear_schedule(peak, peak / 20, max(1, num_steps - fall_from))
        return optax.join_schedules([rise, stay, fall], [WARMUP_STEPS, fall_from])

    def matrices(params: dict[str, Params]) -> dict[str, Any]:
        """Input and output axes of each weight that is a matrix; None for AdamW."""
        matrix, heads = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(0, (1, 2))
        out = MuonDimensionNumbers((0, 1), 2)
        layer: Any = LayerParams(None, heads, heads, heads, out, None, matrix, matrix, matrix)  # type: ignore[arg-type]
        layers = (layer,) * len(params["params"].layers)
        return {"params": Params(embedding=None, layers=layers, final_norm=None, lm_head=None)}  # type: ignore[arg-type]

    by_kind = muon(
        schedule(0.02),
        weight_decay=0.05,
        adam_b2=0.95,
        adam_learning_rate=schedule(3e-3),
        muon_weight_dimension_numbers=matrices,  # pyright: ignore[reportArgumentType]
    )
    return optax.chain(optax.clip_by_global_norm(1.0), by_kind)


def make_step(config: LlamaConfig) -> Callable[..., tuple[TrainState, Array, Array]]:
    """The jitted update: (state, token_ids, weights, hints, hint_weight) -> (state, loss, correct [B, T - 1])."""

    def step(state: TrainState, *batch: Array, hint_weight: float) -> tuple[TrainState, Array, Array]:
        def loss_of(params: dict[str, Params]) -> tuple[Array, Array]:
            return weighted_loss(params["params"], config, *batch, hint_weight)  # pyright: ignore[reportCallIssue]

        (loss, correct), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        # optax mixes types and ranks, which a caller may have forbidden.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return state.apply_gradients(grads=gradients), loss, correct

    return jax.jit(step, donate_argnums=0, static_argnames="hint_weight")


def save(params: Params, config: LlamaConfig, directory: Path) -> None:
    """Writes the model with the shipped tokenizer."""
    save_pretrained(params, config, directory, dtype=jnp.float32)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO_MODEL / name, directory / name)


def train(config: LlamaConfig, stages: Sequence[Stage], directory: Path, num_steps: int, seed: int) -> list[float]:
    """Trains and writes the model; returns the loss of each step.

    Step n draws its batch from a generator seeded with (seed, n).
    """
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    state = TrainState.create(
        apply_fn=training_logits, params={"params": initial_params(config, seed)}, tx=make_optimizer(num_steps)
    )
    step = make_step(config)
    stage, stage_steps, losses, started = 0, 0, [], time.monotonic()
    recent: collections.deque[float] = collections.deque(maxlen=WINDOW_STEPS)
    tally: dict[str, list[bool]] = collections.defaultdict(list)
    for number in range(1, num_steps + 1):
        now = stages[stage]
        batch = stage_batch(tokenizer, now, random.Random(f"{seed}/{number - 1}"))
        arrays = (jnp.asarray(array) for array in (batch.token_ids, batch.weights, batch.hints))
        state, loss, correct = step(state, *arrays, hint_weight=now.hint_weight)
        matches = exact_matches(jax.device_get(correct), batch.spans)
        for span, matched in zip(batch.spans, matches, strict=True):
            tally[span.kind].append(matched)
        losses.append(float(loss))
        recent.append(sum(matches) / len(matches))
        stage_steps += 1
        passed = len(recent) == WINDOW_STEPS and sum(recent) / WINDOW_STEPS >= now.advance_ratio
        if stage + 1 < len(stages) and ((passed and stage_steps >= now.min_steps) or stage_steps == now.max_steps):
            stage, stage_steps = stage + 1, 0
            recent.clear()
        if number % 50 == 0 or not stage_steps or number == num_steps:
            kinds = "  ".join(f"{kind} {sum(hits) / len(hits):.3f}" for kind, hits in sorted(tally.items()))
            seconds = time.monotonic() - started
            print(f"step {number:5d}  {now.name:14s}  loss {losses[-1]:.3f}  {kinds}  {seconds:.0f} s", flush=True)
            tally.clear()
        if number % 500 == 0 or number == num_steps:
            save(state.params["params"], config, directory)  # pyright: ignore[reportArgumentType]
    return losses


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; `argv` defaults to the process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the trained model's directory")
    parser.add_argument("--steps", type=int, default=4000, metavar="N", help="training steps (default 4000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps: wanted a positive number, got {args.steps}")
    train(load_config(DEMO_MODEL), STAGES, args.out, args.steps, args.seed)


if __name__ == "__main__":
    main()
