"""A Llama directory with random weights and its own tokenizer, complete like a Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.convert import save_pretrained
from ccjax.models.llama3.params import init_params

_SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
_TEMPLATE = (
    "<|begin|>{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, texts: list[str], *, seed: int = 0, **shape: int) -> None:
    """Fills `directory` with a 2-layer model, or one of another shape; `texts` train its byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=_SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    small = {"d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "d_ff": 64}
    config = LlamaConfig(**{"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1024} | small | shape)
    save_pretrained(init_params(config, jax.random.key(seed)), config, directory)
