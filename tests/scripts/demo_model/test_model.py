"""The shipped model: answers its corpus far above guessing, and is the same model to transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.demo.world import held_out_contexts
from ccjax.models.llama3 import forward as model_forward
from scripts.demo_model.batches import tokenize_context
from scripts.demo_model.corpus import build_corpus
from scripts.demo_model.evaluate import answered, corpus_contexts, score
from scripts.demo_model.export import MODEL_DIRECTORY, export_model, load_model
from scripts.demo_model.tokenizer import END, question_segment

forward = jax.jit(model_forward, static_argnums=1)

FLOORS = {"single": 0.97, "pronoun": 0.93, "alias": 0.97, "two_hop": 0.97}
"""A little below what `scripts/train_demo.py --evaluate` measures."""


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def contexts():
    return corpus_contexts(build_corpus())


def _of_kind(contexts, kind, count):
    """`count` questions of the kind, spread over all documents."""
    picked = [context for context in contexts if context.questions[0].kind == kind]
    return [picked[index * len(picked) // count] for index in range(count)]


def _greedy(params, config, tokenizer, context, width=512):
    """The answer as a decoder would write it, one token after another."""
    ids = tokenize_context(tokenizer, context) + tokenizer.encode(question_segment(context.questions[0].text)).ids
    written = []
    while len(written) < 8:
        row = np.zeros((1, width), np.int32)
        row[0, : len(ids)] = ids
        token = int(forward(params, config, jnp.asarray(row))[0, len(ids) - 1].argmax())
        if token == tokenizer.token_to_id(END):
            break
        ids.append(token)
        written.append(token)
    return tokenizer.decode(written).strip()


@pytest.mark.parametrize(
    ("kind", "num_passages", "count"),
    [
        *((kind, num, 4) for kind in FLOORS for num in (None, 4)),
        ("two_hop", 8, 4),
        pytest.param("single", None, 42, marks=pytest.mark.slow),
        *(pytest.param(kind, num, 48, marks=pytest.mark.slow) for kind in FLOORS for num in (4, 8)),
    ],
)
def test_accuracy_is_far_above_guessing(model, contexts, kind, num_passages, count):
    """The shipped questions, and those of fresh towns over so many passages."""
    picked = held_out_contexts(kind, count, num_passages) if num_passages else _of_kind(contexts, kind, count)
    result = score(picked, answered(*model, picked, batch_size=4))
    floor = FLOORS[kind] - (0.05 if num_passages == 8 else 0.0)
    assert result.accuracy_ratio >= floor
    assert result.guess_ratio <= floor - (0.3 if num_passages else 0.2)


def test_exact_match_agrees_with_greedy_decoding(model, contexts):
    picked = _of_kind(contexts, "single", 2) + _of_kind(contexts, "alias", 2)
    for context, matched in zip(picked, answered(*model, picked, batch_size=4), strict=True):
        assert (_greedy(*model, context) == context.questions[0].answer) == matched


def test_export_replaces_a_directory_and_reads_back_the_same(model, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/stale.txt").write_text("old")
    export_model(*model, tmp_path / "demo")
    wanted = {path.name: path.read_bytes() for path in MODEL_DIRECTORY.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()} == wanted
    assert json.loads(wanted["generation_config.json"])["eos_token_id"] == model[2].token_to_id(END)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.peers
def test_transformers_generates_the_same_answers(model, contexts):
    import torch
    from transformers import AutoModelForCausalLM

    params, config, tokenizer = model
    theirs = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32)
    for context in _of_kind(contexts, "single", 2) + _of_kind(contexts, "pronoun", 2):
        ids = tokenize_context(tokenizer, context) + tokenizer.encode(question_segment(context.questions[0].text)).ids
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = theirs(row).logits[0].numpy()
            written = theirs.generate(row, attention_mask=torch.ones_like(row))[0, len(ids) :].tolist()
        ours = np.asarray(forward(params, config, jnp.asarray([ids], jnp.int32)))[0]
        np.testing.assert_allclose(ours, logits, atol=1e-3)
        assert tokenizer.decode(written).strip() == _greedy(params, config, tokenizer, context)
