"""The embedded model: answers questions far above guessing, and is the same model to transformers."""

import numpy as np
import pytest

from ccjax.evaluation.towns import held_out_contexts
from ccjax.loading.model import DEMO_MODEL
from ccjax.text.prompt import PromptBuilder
from ccjax.text.template import ChatTemplate
from ccjax.text.tokenizer_files import load_tokenizer
from scripts.train_demo import SYSTEM_PROMPT, context_ids
from tests.evaluation.plain_answers import answered, demo_model, plain_forward

FLOORS = {"single": 0.97, "pronoun": 0.93, "alias": 0.97, "two_hop": 0.97}
"""A little below what was measured over 100 questions of each kind."""


def greedy(context, width=512):
    """The answer as a decoder would write it, one token after another."""
    params, config, tokenizer = demo_model()
    ids = question_ids(context)
    written = []
    while len(written) < 8:
        row = np.zeros((1, width), np.int32)
        row[0, : len(ids)] = ids
        token = int(plain_forward(params, config, row)[0, len(ids) - 1].argmax())
        if token == tokenizer.token_to_id("<|end|>"):
            break
        ids.append(token)
        written.append(token)
    return tokenizer.decode(written).strip()


def question_ids(context):
    tokenizer = demo_model()[2]
    asked = f"{context.questions[0].text}<|end|><|assistant|>"
    return context_ids(tokenizer, context) + tokenizer.encode(asked, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("kind", "num_passages", "count"),
    [
        *((kind, 4, 4) for kind in FLOORS),
        ("two_hop", 8, 4),
        *(pytest.param(kind, num, 48, marks=pytest.mark.slow) for kind in FLOORS for num in (4, 8)),
    ],
)
def test_accuracy_is_far_above_guessing(kind, num_passages, count):
    contexts = held_out_contexts(kind, count, num_passages)
    floor = FLOORS[kind] - (0.05 if num_passages == 8 else 0.0)
    assert np.mean(answered(contexts)) >= floor
    assert np.mean([context.questions[0].guess_ratio for context in contexts]) <= floor - 0.3


def test_exact_match_agrees_with_greedy_decoding():
    contexts = held_out_contexts("single", 2) + held_out_contexts("alias", 2)
    for context, matched in zip(contexts, answered(contexts), strict=True):
        assert (greedy(context) == context.questions[0].answer) == matched


@pytest.mark.peers
def test_transformers_generates_the_same_answers():
    import torch
    from transformers import AutoModelForCausalLM

    params, config, tokenizer = demo_model()
    theirs = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    for context in held_out_contexts("single", 2) + held_out_contexts("pronoun", 2):
        ids = question_ids(context)
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = theirs(row).logits[0].numpy()
            written = theirs.generate(row, attention_mask=torch.ones_like(row))[0, len(ids) :].tolist()
        ours = np.asarray(plain_forward(params, config, np.asarray([ids], np.int32)))[0]
        np.testing.assert_allclose(ours, logits, atol=1e-3)
        assert tokenizer.decode(written).strip() == greedy(context)


@pytest.mark.peers
def test_transformers_renders_and_tokenizes_the_same_chat():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(DEMO_MODEL)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "Where does Mara Venn live?"}]
    builder = PromptBuilder(load_tokenizer(DEMO_MODEL), ChatTemplate.load(DEMO_MODEL))
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert theirs(text, add_special_tokens=False)["input_ids"] == list(builder.build_chat(messages).token_ids)
    with pytest.raises(Exception, match="wanted system, user or assistant, got tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
