"""Model directories with small tokenizers of the kinds in use, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The red ball is too high. Lily wants to play with it, but her mom said no.",
    "Question: who wrote the letter? Answer: Anna wrote 3 letters in 1972.",
    "Answer the question from the passages. It's what they've said.\n\nTitle\ntext\n",
    "Grüße aus Köln, 東京 and Москва 😀.",
] * 4
LLAMA3_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL_SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first %}{{ system }}{% endif %}{{ message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(directory: Path, template: str | list | None = None, *, strips: bool = False) -> Path:
    """Llama 3's kind: byte-level BPE, special tokens outside the model, one control token that is not `special`.

    Args:
      strips: control tokens swallow the white space around them, as some of Phi-3's do.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    flags = {"lstrip": strips, "rstrip": strips, "normalized": False}
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, **flags) for name in LLAMA3_SPECIALS])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    bos = LLAMA3_SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return _write(directory, tokenizer.to_str(), bos, "<|eot_id|>", template)


def sentencepiece(directory: Path, kind: str, template: str | list | None = None) -> Path:
    """Llama 2's kind (`kind="prepend"`) or Mistral v0.3's (`kind="first"`): BPE with bytes for unknown characters."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = MISTRAL_SPECIALS if kind == "first" else MISTRAL_SPECIALS[:3]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special + byte_tokens, show_progress=False, limit_alphabet=64
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] in special]
    if kind == "prepend":
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        definition["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
        definition["pre_tokenizer"] = None
    else:
        definition["pre_tokenizer"] |= {"split": False}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return _write(directory, tokenizer.to_str(), "<s>", "</s>", template)


def word_level(directory: Path) -> Path:
    """Whole words only, unknown ones are <unk>, and control tokens are words of the vocabulary too."""
    words = ["<unk>", "<s>", "</s>", "Answer", ":", "who", "ran", "\n"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:3])
    return _write(directory, tokenizer.to_str(), "<s>", "</s>", None)


def _added(content: str) -> dict:
    """A token as many tokenizer_config.json files spell it."""
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"__type": "AddedToken", "content": content, "special": True, **flags}


def _write(directory: Path, definition: str, bos: str, eos: str, template: str | list | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(definition)
    settings: dict = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": _added(eos)}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
