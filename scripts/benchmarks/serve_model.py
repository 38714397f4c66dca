"""Writes the model that the serving benchmark asks: random weights in Llama's architecture, the real Llama-3 tokenizer.

Only time is measured, so weights need not be trained. Knows no server.
"""

from __future__ import annotations

import getpass
import shutil
import tempfile
from pathlib import Path

import jax

from ccjax.text import load_tokenizer
from models.llama3 import LlamaConfig, init_params
from models.llama3.convert import save_pretrained


def shape(vocab_size: int, num_layers: int, width: int, num_heads: int = 16) -> LlamaConfig:
    """Llama's proportions as the other benchmarks have them, with a KV head for every four; tied embeddings as in the
    small Llama-3.2 models, because the tokenizer's vocabulary would else be half of all weights."""
    heads = (num_heads, max(1, num_heads // 4), width // num_heads)
    return LlamaConfig(vocab_size, width, num_layers, *heads, 2816 * width // 1024, 500000.0, tie_embeddings=True)


def cache_folder() -> Path:
    """Where the model and compiled steps are kept between runs: this user's, in the system's temporary directory."""
    return Path(tempfile.gettempdir()) / f"ccjax-bench-{getpass.getuser()}"


def random_model(tokenizer: Path, num_layers: int, width: int, cache: Path, *, num_heads: int = 16) -> Path:
    """A Hugging Face directory with such a model, written once and kept below `cache`.

    Args:
      tokenizer: folder with Llama-3's `tokenizer.model`.
    """
    loaded = load_tokenizer(tokenizer)
    if loaded is None:
        raise ValueError(f"tokenizer: wanted a folder with tokenizer.model, got {tokenizer}")
    config = shape(loaded.vocab_size, num_layers, width, num_heads)
    heads = "" if num_heads == 16 else f"-{num_heads}-heads"
    directory = cache / f"random-{config.num_layers}x{config.d_model}{heads}-{loaded.fingerprint[:8]}"
    if (directory / "config.json").exists():  # written last
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer / "tokenizer.model", directory / "tokenizer.model")
    save_pretrained(init_params(config, jax.random.key(0)), config, directory)
    return directory
