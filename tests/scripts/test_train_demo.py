"""Training: the loss is that of ccjax.models.llama3, prompts are those of serving, the initial head copies."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from ccjax.evaluation.towns import KINDS, Difficulty, sample_context
from ccjax.loading.model import DEMO_MODEL
from ccjax.models.llama3 import forward as model_forward
from ccjax.models.llama3 import init_params
from ccjax.models.llama3.convert import load_config
from ccjax.models.llama3.layers import unembed
from ccjax.text.prompt import PromptBuilder
from ccjax.text.template import ChatTemplate
from ccjax.text.tokenizer_files import load_tokenizer
from scripts import train_demo
from scripts.train_demo import (
    STAGES,
    Rows,
    Stage,
    context_ids,
    exact_matches,
    induction_batch,
    initial_params,
    make_batch,
    stage_batch,
    train,
    training_logits,
    weighted_loss,
)

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
NO_HINTS = jnp.zeros((2, 1, 2), jnp.int32)
forward = jax.jit(model_forward, static_argnums=1)
loss_of = jax.jit(weighted_loss, static_argnums=(1, 5))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def config():
    """The fewest layers that an induction head takes."""
    return dataclasses.replace(load_config(DEMO_MODEL), num_layers=2, d_ff=128)


@pytest.fixture(scope="module")
def params(config):
    return init_params(config, jax.random.key(1))


@pytest.fixture
def hint_layers(monkeypatch):
    """Half of the layers that models have here."""
    monkeypatch.setattr(train_demo, "HINT_LAYERS", 1)
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
    loss, correct = loss_of(params, config, token_ids, weights, NO_HINTS, 0.0)
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
    plain, _ = loss_of(params, config, token_ids, weights, NO_HINTS, 0.0)
    loss, _ = loss_of(params, config, token_ids, weights, hints, 0.5)
    assert float(loss) == pytest.approx(float(plain) + 0.5 * hinted, abs=1e-5)


def test_initial_induction_head_copies_before_training(config, tokenizer):
    batch = induction_batch(tokenizer, random.Random(0), 16, 64)

    def accuracy(params):
        predicted = forward(params, config, jnp.asarray(batch.token_ids[:, :-1])).argmax(-1)
        return np.mean(exact_matches(np.asarray(predicted) == batch.token_ids[:, 1:], batch.spans))

    params = initial_params(config, seed=0)
    assert accuracy(params) > 0.5
    second = params.layers[1]
    deaf = dataclasses.replace(second, wk=second.wk.at[:, 0].set(0.0))
    assert accuracy(dataclasses.replace(params, layers=(params.layers[0], deaf, *params.layers[2:]))) < 0.1


def test_induction_periods_differ_between_rows(tokenizer):
    batch = induction_batch(tokenizer, random.Random(0), 16, 64)
    periods = {int(np.argmax(row > 0)) - 1 for row in batch.weights}
    assert len(periods) > 5
    for row, weights in zip(batch.token_ids, batch.weights, strict=True):
        period = int(np.argmax(weights > 0)) - 1
        assert (row[period:] == row[:-period]).all() and len(set(row[:period].tolist())) == period


def test_batch_weights_cover_only_the_answers(tokenizer):
    context = sample_context(random.Random(4), Difficulty(4, {"portrait": 1, "register": 1}, kinds=KINDS), 3)
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


def test_training_prompt_equals_the_prompt_built_for_serving(tokenizer):
    """Segment by segment, and over a second turn: training must see exactly the ids that serving will."""
    weights = {"portrait": 1, "follow": 1, "nickname": 1, "place": 1, "register": 1}
    context = sample_context(random.Random(11), Difficulty(5, weights, min_words=27, kinds=KINDS), 2)
    builder = PromptBuilder(load_tokenizer(DEMO_MODEL), ChatTemplate.load(DEMO_MODEL))
    first, second = context.questions
    messages = [{"role": "user", "content": first.text}]
    one = builder.build_chat(messages, context.passages)
    batch = make_batch(tokenizer, [context], 1024)
    assert list(one.token_ids) == batch.token_ids[0, : batch.spans[0].start].tolist()
    ids = context_ids(tokenizer, context)
    assert list(one.token_ids)[: len(ids)] == ids
    messages += [{"role": "assistant", "content": first.answer}, {"role": "user", "content": second.text}]
    two = builder.build_chat(messages, context.passages)
    assert list(two.token_ids) == batch.token_ids[0, : batch.spans[1].start].tolist()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_makes_full_batches(tokenizer, stage):
    for rows in stage.rows:
        batch = stage_batch(tokenizer, dataclasses.replace(stage, rows=(rows,)), random.Random(0))
        assert batch.token_ids.shape == (rows.batch_size, rows.num_tokens)
        asked = {span.row for span in batch.spans}
        assert asked == set(range(rows.batch_size)), "a row without a question teaches nothing"
    batch = stage_batch(tokenizer, stage, random.Random(0))
    np.testing.assert_array_equal(batch.token_ids, stage_batch(tokenizer, stage, random.Random(0)).token_ids)


def test_training_lowers_the_loss_and_writes_the_model(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_demo, "WARMUP_STEPS", 5)
    monkeypatch.setattr(train_demo, "WINDOW_STEPS", 4)
    rows = (Rows(24, 8),)
    stages = [Stage("first", rows, advance_ratio=0.0, min_steps=8), Stage("second", rows, advance_ratio=0.0)]
    losses = train(config, stages, tmp_path / "model", num_steps=16, seed=3)
    assert len(losses) == 16 and losses[-1] < 0.7 * losses[0]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step     8  first") and said[1].startswith("step    16  second")
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
    assert load_config(tmp_path / "model") == config


def test_command_line_names_the_bad_argument(capsys):
    for arguments, name in (([], "--out"), (["--out", "x", "--steps", "0"], "--steps")):
        with pytest.raises(SystemExit):
            train_demo.main(arguments)
        assert name in capsys.readouterr().err
