"""The tokenizer: one token per word of the world, every byte comes back, the engine builds the trained prompts."""

import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from ccjax.demo.lexicon import SYSTEM_PROMPT
from ccjax.demo.world import KINDS, Difficulty, sample_context
from ccjax.text.prompt import PromptBuilder
from ccjax.text.template import ChatTemplate
from ccjax.text.tokenizer import load_tokenizer
from ccjax.types import Document
from scripts.demo_model.batches import make_batch, tokenize_context
from scripts.demo_model.export import MODEL_DIRECTORY
from scripts.demo_model.tokenizer import question_segment, world_words


def _context():
    weights = (("portrait", 1.0), ("follow", 1.0), ("nickname", 1.0), ("place", 1.0), ("register", 1.0))
    return sample_context(random.Random(11), Difficulty(5, weights, min_words=27, kinds=KINDS), 3)


def test_every_world_word_is_one_token(tokenizer):
    assert len(world_words()) > 500
    assert [word for word in world_words() if len(tokenizer.encode(word).ids) != 1] == []


@pytest.mark.parametrize(
    "text", ["Mara Venn", "Ünïcødé — 北京 🙂\n\n\ttabs", "".join(map(chr, range(1, 300))), "zzqx 1234567890 {}[]"]
)
def test_tokenizer_round_trips_arbitrary_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_shipped_tokenizer_equals_one_trained_in_another_process(tokenizer):
    shipped = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    code = "from scripts.demo_model.tokenizer import train_tokenizer; print(train_tokenizer().to_str())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert shipped.to_str() == tokenizer.to_str() == other


def test_training_prompt_equals_the_prompt_built_for_serving(tokenizer):
    """Segment by segment, and over a second turn: training must see exactly the ids that serving will."""
    context = _context()
    builder = PromptBuilder(load_tokenizer(MODEL_DIRECTORY), ChatTemplate.load(MODEL_DIRECTORY))
    documents = [Document(text=passage.text, title=passage.title) for passage in context.passages]
    first, second, _ = context.questions
    messages = [{"role": "user", "content": first.text}]
    one = builder.build_chat(messages, documents)
    assert list(one.system + sum(one.documents, ())) == tokenize_context(tokenizer, context, SYSTEM_PROMPT)
    assert list(one.question) == tokenizer.encode(question_segment(first.text)).ids
    messages += [{"role": "assistant", "content": first.answer}, {"role": "user", "content": second.text}]
    two = builder.build_chat(messages, documents)
    batch = make_batch(tokenizer, [context], 1024)
    assert list(one.token_ids) == batch.token_ids[0, : batch.spans[0].start].tolist()
    assert list(two.token_ids) == batch.token_ids[0, : batch.spans[1].start].tolist()


@pytest.mark.peers
def test_transformers_renders_and_tokenizes_the_same_chat(tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "Where does Mara Venn live?"}]
    builder = PromptBuilder(load_tokenizer(MODEL_DIRECTORY), ChatTemplate.load(MODEL_DIRECTORY))
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert theirs(text, add_special_tokens=False)["input_ids"] == list(builder.build_chat(messages).token_ids)
    with pytest.raises(Exception, match="wanted system, user or assistant, got tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
