"""Trains the demo model: optimiser, curriculum, progress and Orbax checkpoints.

Step n draws its batch from a generator seeded with (seed, n), so a resumed run sees the same batches as any other.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from optax.contrib import MuonDimensionNumbers, muon
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from ccjax.models.llama3 import LayerParams, LlamaConfig, Params
from scripts.demo_model.batches import Stage, exact_matches, stage_batch
from scripts.demo_model.initial import initial_params
from scripts.demo_model.objective import weighted_loss

WINDOW_STEPS = 50
"""Steps over which accuracy is averaged before the curriculum moves on."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Everything that determines the trained weights.

    Attributes:
      num_steps: steps in all; the learning rate falls over the last fifth.
      stages: the curriculum, see `scripts.demo_model.curriculum`.
    """

    model: LlamaConfig
    stages: tuple[Stage, ...]
    num_steps: int
    seed: int = 0
    matrix_learning_rate: float = 0.02
    vector_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    checkpoint_steps: int = 250


@dataclasses.dataclass(frozen=True)
class Progression:
    """State of a run: next step, stage, steps in the stage, exact match of the stage's last steps, last loss."""

    step: int = 0
    stage: int = 0
    stage_steps: int = 0
    recent: tuple[float, ...] = ()
    loss: float = float("inf")


def demo_config(vocab_size: int) -> LlamaConfig:
    """The shipped model's shape: 1.62 M parameters at 1,732 tokens."""
    # theta as in Llama 3: at 10,000 half of a 32-wide head's pairs turn too fast to match words over a hundred tokens,
    # and copying is learnt much later (40 % against 6 % after 200 steps).
    return LlamaConfig(
        rope_theta=500000.0,
        vocab_size=vocab_size,
        d_model=128,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        d_ff=352,
        tie_embeddings=True,
        max_position_embeddings=2048,
    )


def _muon_axes(params: Params) -> Params:
    """Input and output axes of each weight that is a matrix, for Muon; None for AdamW."""
    matrix, heads = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(0, (1, 2))
    layer = LayerParams(
        attention_norm=None,
        wq=heads,
        wk=heads,
        wv=heads,
        wo=MuonDimensionNumbers((0, 1), 2),
        mlp_norm=None,
        w_gate=matrix,
        w_up=matrix,
        w_down=matrix,
    )  # type: ignore[arg-type]
    return Params(embedding=None, layers=(layer,) * len(params.layers), final_norm=None, lm_head=None)  # type: ignore[arg-type]


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW for the rest; the rates warm up, stay, and fall over the last fifth.

    Measured on the induction warm-up: Muon needs half of AdamW's steps.
    """

    def schedule(peak: float) -> optax.Schedule:
        fall_from = max(config.warmup_steps, config.num_steps * 4 // 5)
        fall_steps = max(1, config.num_steps - fall_from)
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, config.warmup_steps),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, peak / 20, fall_steps),
            ],
            [config.warmup_steps, fall_from],
        )

    optimizer = muon(
        schedule(config.matrix_learning_rate),
        weight_decay=config.weight_decay,
        adam_b2=0.95,
        adam_learning_rate=schedule(config.vector_learning_rate),
        muon_weight_dimension_numbers=_muon_axes,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def make_step(config: TrainingConfig) -> Callable[..., Any]:
    """The jitted update: (params, optimizer state, token_ids, weights, hints, hint_weight) -> (params, state, loss,
    correct [B, T - 1])."""
    optimizer = make_optimizer(config)

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="hint_weight")
    def step(
        params: Params, state: Any, token_ids: jax.Array, weights: jax.Array, hints: jax.Array, hint_weight: float
    ) -> tuple[Any, ...]:
        (loss, correct), gradients = jax.value_and_grad(weighted_loss, has_aux=True)(
            params, config.model, token_ids, weights, hints, hint_weight
        )
        # optax mixes types and ranks, which a caller may have forbidden.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, correct

    return step


class Checkpoints:
    """Orbax checkpoints of a run: parameters, optimiser state and progression."""

    def __init__(self, directory: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
        self.directory = directory
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    @property
    def latest_step(self) -> int | None:
        """The newest step on disk, or None."""
        return self._manager.latest_step()

    def save(self, params: Params, state: Any, progression: Progression) -> None:
        """Writes one checkpoint under the progression's step; keeps an existing one of that step."""
        if self.latest_step == progression.step:
            return
        arrays = ocp.args.StandardSave({"params": params, "optimizer": state})
        where = ocp.args.JsonSave(dataclasses.asdict(progression))
        self._manager.save(progression.step, args=ocp.args.Composite(arrays=arrays, progression=where))

    def restore(self, params: Params, state: Any) -> tuple[Params, Any, Progression]:
        """The newest checkpoint, in the shapes of the given trees."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "optimizer": state})
        restored = self._manager.restore(
            self.latest_step,
            args=ocp.args.Composite(arrays=ocp.args.StandardRestore(target), progression=ocp.args.JsonRestore()),
        )
        raw = dict(restored["progression"])
        arrays = restored["arrays"]
        return arrays["params"], arrays["optimizer"], Progression(**{**raw, "recent": tuple(raw["recent"])})

    def close(self) -> None:
        """Waits for open writes."""
        self._manager.close()


def advance(progression: Progression, stages: Sequence[Stage], matched_ratio: float, loss: float) -> Progression:
    """The progression after one more step; moves to the next stage once the window's exact match is high enough."""
    stage = stages[progression.stage]
    recent = (*progression.recent, matched_ratio)[-WINDOW_STEPS:]
    progression = Progression(progression.step + 1, progression.stage, progression.stage_steps + 1, recent, loss)
    passed = len(recent) == WINDOW_STEPS and sum(recent) / WINDOW_STEPS >= stage.advance_ratio
    passed = passed and progression.stage_steps >= stage.min_steps
    passed = passed or progression.stage_steps == stage.max_steps
    if passed and progression.stage + 1 < len(stages):
        return dataclasses.replace(progression, stage=progression.stage + 1, stage_steps=0, recent=())
    return progression


def restore_or_start(
    config: TrainingConfig, checkpoints: Checkpoints, *, resume: bool
) -> tuple[Params, Any, Progression]:
    """Parameters, optimiser state and progression: new, or with `resume` from the newest checkpoint.

    Raises:
      ValueError: `resume` without a checkpoint, or a checkpoint without `resume`.
    """
    if resume != (checkpoints.latest_step is not None):
        wanted = "an earlier checkpoint" if resume else "no earlier checkpoint, or resume"
        raise ValueError(f"checkpoints: wanted {wanted} in {checkpoints.directory}, got step {checkpoints.latest_step}")
    params = initial_params(config.model, config.seed)
    state = make_optimizer(config).init(params)
    return checkpoints.restore(params, state) if resume else (params, state, Progression())


def train(
    config: TrainingConfig,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
) -> tuple[Params, Progression]:
    """Trained parameters and the final progression.

    Args:
      directory: checkpoints go to `directory / "checkpoints"`.
      resume: continue from the newest checkpoint there.

    Raises:
      ValueError: as `restore_or_start`.
    """
    console = console or Console()
    checkpoints = Checkpoints(directory / "checkpoints")
    params, state, progression = restore_or_start(config, checkpoints, resume=resume)
    step = make_step(config)
    end = config.num_steps
    tally: dict[str, list[bool]] = collections.defaultdict(list)
    guesses: list[float] = []
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=config.num_steps, completed=progression.step)
        while progression.step < end:
            stage = config.stages[progression.stage]
            batch = stage_batch(tokenizer, stage, random.Random(f"{config.seed}/{progression.step}"))
            arrays = (jnp.asarray(array) for array in (batch.token_ids, batch.weights, batch.hints))
            params, state, loss, correct = step(params, state, *arrays, hint_weight=stage.hint_weight)
            matches = exact_matches(jax.device_get(correct), batch.spans)
            for span, matched in zip(batch.spans, matches, strict=True):
                tally[span.kind].append(matched)
                guesses.append(span.guess_ratio)
            before = progression.stage
            progression = advance(progression, config.stages, sum(matches) / len(matches), float(loss))
            bar.update(task, completed=progression.step, description=stage.name)
            if progression.step % 50 == 0 or progression.stage != before or progression.step == end:
                kinds = "  ".join(f"{kind} {sum(hits) / len(hits):.3f}" for kind, hits in sorted(tally.items()))
                console.print(
                    f"step {progression.step:5d}  {stage.name:14s}  loss {progression.loss:.3f}  {kinds}  "
                    f"guessing {sum(guesses) / len(guesses):.3f}  {time.monotonic() - started:.0f} s",
                    highlight=False,
                )
                tally.clear()
                guesses.clear()
            if progression.step % config.checkpoint_steps == 0 or progression.step == end:
                checkpoints.save(params, state, progression)
    checkpoints.close()
    return params, progression
