"""Writes and reads the demo model's directory in Hugging Face's layout.

A directory is written under another name and renamed when complete: a reader never sees half a model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp
from tokenizers import Tokenizer

from ccjax.loading.model import DEMO_MODEL
from ccjax.models.llama3 import LlamaConfig, Params
from ccjax.models.llama3.convert import load_config, load_params, save_pretrained
from scripts.demo_model.tokenizer import BOS, END, PAD, save_tokenizer

MODEL_DIRECTORY = DEMO_MODEL


def export_model(params: Params, config: LlamaConfig, tokenizer: Tokenizer, directory: Path = MODEL_DIRECTORY) -> None:
    """Replaces `directory` by the model: config, float32 weights, tokenizer with chat template, generation defaults."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as work:
        fresh, old = Path(work) / "new", Path(work) / "old"
        save_pretrained(params, config, fresh, dtype=jnp.float32)
        save_tokenizer(tokenizer, fresh)
        generation = {
            "bos_token_id": tokenizer.token_to_id(BOS),
            "eos_token_id": tokenizer.token_to_id(END),
            "pad_token_id": tokenizer.token_to_id(PAD),
            "do_sample": False,
            "max_new_tokens": 16,
        }
        (fresh / "model.safetensors").chmod(0o644)
        (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        if directory.exists():
            os.replace(directory, old)
        os.replace(fresh, directory)
        shutil.rmtree(old, ignore_errors=True)


def load_model(directory: Path = MODEL_DIRECTORY) -> tuple[Params, LlamaConfig, Tokenizer]:
    """The model in `directory` in float32, and its tokenizer."""
    config = load_config(directory)
    return (
        load_params(directory, config, dtype=jnp.float32),
        config,
        Tokenizer.from_file(str(directory / "tokenizer.json")),
    )
