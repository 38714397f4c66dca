"""Training: the loss is that of ccjax.models.llama3, the laid-in head copies, a resumed run is the unbroken one."""

import dataclasses
import functools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.demo.world import KINDS, Difficulty, sample_context
from ccjax.models.llama3 import forward as model_forward
from ccjax.models.llama3 import init_params
from ccjax.models.llama3.layers import unembed
from scripts import train_demo
from scripts.demo_model import objective, training
from scripts.demo_model.batches import exact_matches, induction_batch, make_batch, stage_batch
from scripts.demo_model.curriculum import QUICK_STAGES, STAGES
from scripts.demo_model.initial import initial_params
from scripts.demo_model.objective import training_logits, weighted_loss
from scripts.demo_model.training import Progression, TrainingConfig, advance, demo_config, train

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
forward = jax.jit(model_forward, static_argnums=1)
loss_of = jax.jit(weighted_loss, static_argnums=(1, 5))


@pytest.fixture(scope="module")
def config(tokenizer):
    """The fewest layers that an induction head takes."""
    return dataclasses.replace(demo_config(tokenizer.get_vocab_size()), num_layers=2, d_ff=128)


@pytest.fixture(scope="module")
def params(config):
    return init_params(config, jax.random.key(1))


@pytest.fixture
def hint_layers(monkeypatch):
    """Half of the layers that models have here."""
    monkeypatch.setattr(objective, "HINT_LAYERS", 1)
    return 1


def test_training_logits_match_the_model(config, params, hint_layers):
    logits_of = jax.jit(training_logits, static_argnums=1)
    token_ids = jax.random.randint(jax.random.key(2), (2, 210), 0, config.vocab_size)
    wanted = forward(params, config, token_ids)
    got, halfway = logits_of(params, config, token_ids)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    changed = token_ids.at[:, 100].set(7)
    difference = jnp.abs(logits_of(params, config, changed)[0] - wanted)
    assert float(difference[:, :100].max()) < 2e-5, "not causal"
    assert float(difference[:, 101:].max()) > 1e-2
    shallow = dataclasses.replace(params, layers=params.layers[:hint_layers])
    np.testing.assert_allclose(
        unembed(halfway, params, config.rms_norm_eps), forward(shallow, config, token_ids), atol=2e-5
    )


def test_weighted_loss_matches_a_manual_computation(config, params):
    token_ids = jnp.asarray([[5, 9, 12, 7], [8, 6, 11, 10]])
    weights = jnp.asarray([[9.0, 1.0, 0.0, 3.0], [4.0, 0.0, 0.0, 0.0]])
    logits = np.asarray(forward(params, config, token_ids), np.float64)[0]
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = -(log_probabilities[0, 9] + 3 * log_probabilities[2, 7]) / 4
    loss, correct = loss_of(params, config, token_ids, weights)
    assert float(loss) == pytest.approx(wanted, abs=1e-5)
    assert correct[:1].tolist() == [[bool(logits[t].argmax() == token) for t, token in enumerate([9, 12, 7])]]


def test_hint_loss_uses_logits_of_the_middle_layer(config, params, hint_layers):
    token_ids = jnp.asarray([[5, 9, 12, 7], [8, 6, 11, 10]])
    weights = jnp.ones((2, 4))
    hints = jnp.asarray([[[1, 30], [0, 0]], [[0, 41], [2, 50]]])  # (place, token); (0, 0) is none
    shallow = dataclasses.replace(params, layers=params.layers[:hint_layers])
    logits = np.asarray(forward(shallow, config, token_ids), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    hinted = -(log_probabilities[0, 1, 30] + log_probabilities[1, 0, 41] + log_probabilities[1, 2, 50]) / 3
    plain, _ = loss_of(params, config, token_ids, weights)
    loss, _ = loss_of(params, config, token_ids, weights, hints, 0.5)
    assert float(loss) == pytest.approx(float(plain) + 0.5 * hinted, abs=1e-5)
    assert float(loss_of(params, config, token_ids, weights, hints, 0.0)[0]) == pytest.approx(float(plain), abs=1e-6)


def _induction_accuracy(params, config, batch):
    predicted = forward(params, config, jnp.asarray(batch.token_ids[:, :-1])).argmax(-1)
    return np.mean(exact_matches(np.asarray(predicted) == batch.token_ids[:, 1:], batch.spans))


def test_initial_induction_head_copies_before_training(config, tokenizer):
    batch = induction_batch(tokenizer, random.Random(0), 16, 64)
    params = initial_params(config, seed=0)
    assert _induction_accuracy(params, config, batch) > 0.5
    second = params.layers[1]
    deaf = dataclasses.replace(second, wk=second.wk.at[:, 0].set(0.0))
    params = dataclasses.replace(params, layers=(params.layers[0], deaf, *params.layers[2:]))
    assert _induction_accuracy(params, config, batch) < 0.1


def test_induction_periods_differ_between_rows(tokenizer):
    batch = induction_batch(tokenizer, random.Random(0), 16, 64)
    periods = {int(np.argmax(row > 0)) - 1 for row in batch.weights}
    assert len(periods) > 5
    for row, weights in zip(batch.token_ids, batch.weights, strict=True):
        period = int(np.argmax(weights > 0)) - 1
        assert (row[period:] == row[:-period]).all() and len(set(row[:period].tolist())) == period


def test_batch_weights_cover_only_the_answers(tokenizer):
    weights = (("portrait", 1.0), ("register", 1.0))
    context = sample_context(random.Random(4), Difficulty(4, weights, kinds=KINDS), 3)
    batch = make_batch(tokenizer, [context], 512)
    assert len(batch.spans) == 3
    for span, question in zip(batch.spans, context.questions, strict=True):
        ids = batch.token_ids[0, span.start : span.end].tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == f" {question.answer}<|end|>"
        assert (batch.weights[0, span.start : span.end] == 1).all()
        assert (batch.weights[0, span.start - 4 : span.start] == 0).all()
    correct = np.ones((1, 511), bool)
    correct[0, batch.spans[1].end - 2] = False
    assert exact_matches(correct, batch.spans) == [True, False, True], "every token of the answer counts"
    assert (batch.token_ids[0, batch.spans[-1].end :] == 0).all()
    assert (batch.weights[0, batch.spans[-1].end :] == 0).all()
    for (place, token), span, question in zip(batch.hints[0], batch.spans, context.questions, strict=True):
        assert place == span.start - 1, "the place that predicts the answer's first token"
        assert f" {question.bridge or question.answer}".startswith(tokenizer.decode([token]))
    cut = make_batch(tokenizer, [context], batch.spans[1].end)
    assert cut.hints[0, 2].tolist() == [0, 0]
    assert cut.spans == batch.spans[:2]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_makes_full_batches(tokenizer, stage):
    for rows in stage.rows:
        batch = stage_batch(tokenizer, dataclasses.replace(stage, rows=(rows,)), random.Random(0))
        assert batch.token_ids.shape == (rows.batch_size, rows.num_tokens)
        asked = {span.row for span in batch.spans}
        assert asked == set(range(rows.batch_size)), "a row without a question teaches nothing"
    batch = stage_batch(tokenizer, stage, random.Random(0))
    again = stage_batch(tokenizer, stage, random.Random(0))
    np.testing.assert_array_equal(batch.token_ids, again.token_ids)


def test_curriculum_advances_when_recent_accuracy_is_high_enough():
    stages = STAGES[:2]

    def stepped(progression, count, matched_ratio):
        for _ in range(count):
            progression = advance(progression, stages, matched_ratio, 0.1)
        return progression

    good = stepped(Progression(stage_steps=500), 49, 1.0)
    assert good.stage == 0
    good = stepped(good, 1, 1.0)
    assert (good.stage, good.stage_steps, good.recent) == (1, 0, ())
    bad = stepped(Progression(stage_steps=500), 100, stages[0].advance_ratio - 0.01)
    assert bad.stage == 0 and bad.step == 100
    assert stepped(Progression(stage=1, stage_steps=500), 100, 1.0).stage == 1, "the last stage has no next one"


def interrupt():
    raise KeyboardInterrupt


def test_resumed_training_gives_the_same_model(config, tokenizer, tmp_path, monkeypatch, capsys):
    quick = functools.partial(TrainingConfig, warmup_steps=5, checkpoint_steps=8)
    monkeypatch.setattr(train_demo, "TrainingConfig", quick)
    monkeypatch.setattr(train_demo, "demo_config", lambda size: dataclasses.replace(config, vocab_size=size))
    monkeypatch.setattr(training, "make_step", functools.cache(training.make_step))  # compiled once
    losses, ends = [], []
    monkeypatch.setattr(
        training, "advance", lambda *now: (losses.append(now[3]), ends.append(advance(*now)), ends[-1])[-1]
    )

    def run(name, *more):
        train_demo.main(["--out", str(tmp_path / name), "--quick", "--steps", "16", "--seed", "3", *more])
        assert "step    16" in capsys.readouterr().out
        return ends[-1], {path.name: path.read_bytes() for path in (tmp_path / name / "model").iterdir()}

    end, model = run("whole")
    assert end.loss < 0.7 * losses[0]
    assert model.keys() == FILES and json.loads(model["config.json"])["model_type"] == "llama"
    interrupted = quick(config, QUICK_STAGES, 16, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            training, "exact_matches", lambda *given: interrupt() if len(ends) == 25 else exact_matches(*given)
        )
        train(interrupted, tokenizer, tmp_path / "broken")
    assert run("broken", "--resume") == (end, model)
    with pytest.raises(ValueError, match="wanted no earlier checkpoint, or resume"):
        train(interrupted, tokenizer, tmp_path / "broken")
    with pytest.raises(ValueError, match="wanted an earlier checkpoint"):
        train(interrupted, tokenizer, tmp_path / "nothing", resume=True)


def test_command_line_names_the_bad_argument(capsys):
    for arguments, name in (([], "--out"), (["--out", "x", "--steps", "0"], "--steps")):
        with pytest.raises(SystemExit):
            train_demo.main(arguments)
        assert name in capsys.readouterr().err
