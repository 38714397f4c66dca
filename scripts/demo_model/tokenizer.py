"""The demo model's tokenizer: a byte-level BPE that gives every word of the demo world one token.

Any other text is split into smaller pieces, down to bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ccjax.demo.lexicon import SYSTEM_PROMPT, lexicon_texts

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, END, "<|system|>", "<|user|>", "<|assistant|>")
SPLIT = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('role: wanted system, user or assistant, got ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' }}"
    "{{- '' if message['role'] == 'user' else ' ' }}"
    "{{- message['content'] | trim }}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""Answers and system messages keep the space before their first word, so that a word is one token at any position."""


def train_tokenizer() -> Tokenizer:
    """The tokenizer, the same in every process: merges until each word of the lexicon, with its space, is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(_world_words()), trainer)
    return tokenizer


def world_words() -> list[str]:
    """Every word of the lexicon with the space before it, sorted."""
    return sorted(word for word in _world_words() if word.startswith(" "))


def _world_words() -> set[str]:
    split = pre_tokenizers.Split(SPLIT, behavior="isolated")
    words = {"\n\n"}
    for text in lexicon_texts():
        plain = text.replace("{s}", "").replace("{t}", "").replace("{v}", "").replace("{r}", "").replace("{p}", "")
        pieces = [piece.strip() for piece, _ in split.pre_tokenize_str(plain) if piece.strip()]
        words.update(piece if not piece.isalpha() else f" {piece}" for piece in pieces)
        if pieces and text[0] != "{" and (" " in text):
            words.add(pieces[0])
    return words


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the chat template included, in Hugging Face's layout."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def system_segment(system_prompt: str | None = SYSTEM_PROMPT) -> str:
    """The chat template rendered up to and including the opening of the user turn."""
    system = "" if system_prompt is None else f"<|system|> {system_prompt.strip()}{END}"
    return f"{BOS}{system}<|user|>"


def document_segment(title: str, text: str) -> str:
    """One passage as in the prompt."""
    return f"{title}\n{text}\n\n"


def question_segment(question: str) -> str:
    """The question, the end of the user turn and the opening of the assistant turn."""
    return f"{question}{END}<|assistant|>"


def answer_segment(answer: str) -> str:
    """The text that the model should generate: the answer and the end of its turn."""
    return f" {answer}{END}"
