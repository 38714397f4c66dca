"""Converts models to checkpoints, which load fast, or to the Hugging Face format."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ccjax.config.engine import DTYPES
from ccjax.errors import ConfigError
from ccjax.loading.gguf import load_gguf, lossless_dtype, open_gguf, vocabulary_of
from ccjax.loading.model import Progress, model_directory
from ccjax.loading.named import gguf_path
from ccjax.loading.weights import (
    RANDOM,
    CheckpointWeights,
    GgufWeights,
    HuggingFaceWeights,
    Weights,
    gguf_weights,
    note_source,
    random_weights,
    weights_in,
)
from ccjax.models.llama3.checkpoint import write_checkpoint, write_params
from ccjax.models.llama3.convert import load_params, save_pretrained, stored_dtype
from ccjax.models.llama3.params import ParamSpec
from ccjax.text import ByteTokenizer, load_tokenizer

_COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def to_checkpoint(
    model: str | Path,
    directory: Path,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a model as an Orbax checkpoint for `load_model`.

    Holds one part of the checkpoint in memory at a time; random weights are all generated first.

    Args:
      model: as for `load_model`, but not a checkpoint.
      dtype: of weights that are not quantised; None for a lossless one, float32 for random weights.
      quantization: one of `ccjax.models.llama3.quantized.WEIGHT_FORMATS`, or None.
      tokenizer: directory with tokenizer files to copy instead of the model's own.

    Raises:
      ConfigError, CheckpointError: the model cannot be read, or an argument is invalid.
    """
    weights, beside = _source(model, tokenizer, directory)
    kept = _kept(weights)
    dtype = dtype or kept or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: wanted one of {DTYPES}, got {dtype!r}")
    directory.mkdir(parents=True, exist_ok=True)
    _copy(beside, directory)
    (directory / "config.json").unlink(missing_ok=True)
    if weights.directory is not None:  # unchanged, with keys that LlamaConfig does not have (end-of-text ids)
        shutil.copyfile(weights.directory / "config.json", directory / "config.json")

    def produce(add: Callable[[np.ndarray], None]) -> None:
        def put(_: ParamSpec, host: np.ndarray) -> None:
            add(host)

        settings = {"dtype": jnp.dtype(dtype), "quantization": quantization, "progress": _on_load(progress), "put": put}
        if isinstance(weights, HuggingFaceWeights):
            load_params(weights.directory, **settings)
        elif isinstance(weights, GgufWeights):
            load_gguf(weights.file, weights.config, **settings)
        else:
            params = weights.load(dtype, quantization, None, _on_load(progress))
            write_params(params, weights.config, quantization, add)

    write_checkpoint(
        directory,
        weights.config,
        produce,
        source=weights.fingerprint(dtype, quantization),
        dtype=dtype,
        is_rounded=kept is None or (kept, dtype) == ("float32", "bfloat16"),
        quantization=quantization,
    )


def to_hugging_face(
    model: str | Path,
    directory: Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a model in the format of Hugging Face transformers. Holds the whole model in memory.

    Args:
      model: as for `load_model`, not quantised.
      dtype: that of a checkpoint, or float32; None for the checkpoint's dtype, else float32.

    Raises:
      ConfigError, CheckpointError: as `to_checkpoint`.
    """
    weights, beside = _source(model, tokenizer, directory)
    if weights.format_of(None) is not None:
        raise ConfigError(f"model: wanted one that is not quantised, got {model} in {weights.format_of(None)}")
    kept = weights.index.dtype if isinstance(weights, CheckpointWeights) else "float32"
    dtype = kept if dtype is None else dtype
    if dtype != kept and dtype != "float32":
        raise ConfigError(f"dtype: wanted {kept} or float32, which keep every digit of {model}, got {dtype!r}")
    params = weights.load(dtype, None, None, _on_load(progress))
    directory.mkdir(parents=True, exist_ok=True)
    save_pretrained(params, weights.config, directory)
    _copy(beside, directory)
    note_source(directory, weights.fingerprint(dtype, None))


def _source(model: str | Path, tokenizer: Path | None, target: Path) -> tuple[Weights, Mapping[str, bytes]]:
    """The weights, and the tokenizer and configuration files to copy: name -> content."""
    if tokenizer is not None and (not tokenizer.is_dir() or load_tokenizer(tokenizer) is None):
        raise ConfigError(f"tokenizer: wanted a directory with tokenizer files, got {str(tokenizer)!r}")
    if str(model).startswith(RANDOM):
        words = None if tokenizer is None else load_tokenizer(tokenizer)
        return random_weights(str(model), (words or ByteTokenizer()).vocab_size), _beside(tokenizer)
    path = gguf_path(model)
    if path is not None:
        file = open_gguf(path)
        vocabulary = None if tokenizer is not None else vocabulary_of(file)
        texts = {} if vocabulary is None else vocabulary.files()
        return gguf_weights(file), {name: text.encode() for name, text in texts.items()} or _beside(tokenizer)
    home = model_directory(model)
    if target.exists() and home.samefile(target):
        raise ConfigError(f"directory: wanted another one than the model's, got {str(target)!r}")
    return weights_in(home), _beside(tokenizer or home)


def _kept(weights: Weights) -> str | None:
    """The dtype that stores the weights without loss, or None if there is none."""
    if isinstance(weights, CheckpointWeights):
        raise ConfigError(
            f"model: wanted a Hugging Face directory, a GGUF file or random weights, got a checkpoint: "
            f"{weights.directory}"
        )
    if isinstance(weights, HuggingFaceWeights):
        return stored_dtype(weights.directory)
    return lossless_dtype(weights.file) if isinstance(weights, GgufWeights) else "float32"


def _on_load(progress: Progress | None) -> Any:
    return None if progress is None else lambda done, total: progress("weights", done, total)


def _beside(directory: Path | None) -> dict[str, bytes]:
    paths = [] if directory is None else [directory / name for name in _COPIED]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _copy(files: Mapping[str, bytes], directory: Path) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)
