"""Finds and loads a model: weights, tokenizer, chat template, limits."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ccjax.errors import ConfigError
from ccjax.loading.devices import mesh_for
from ccjax.loading.named import PACKAGED, gguf_path
from ccjax.loading.weights import RANDOM, Weights, gguf_weights, random_weights, weights_in
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.convert import load_config
from ccjax.models.llama3.fused import fuse
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sharding import param_sharding
from ccjax.text import BYTE_TEMPLATE, ByteTokenizer, ChatTemplate, PromptBuilder, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from ccjax.loading.gguf import GgufFile

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) during long operations."""

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEMO_MODEL = ASSETS / "demo_model"
DEMO_CORPUS = ASSETS / "demo_corpus"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run; `tokenizer` and `template` are None without tokenizer files, `directory` is None if the
    model is not in one."""

    name: str
    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    eos_ids: frozenset[int]
    fingerprint: str
    directory: Path | None = None


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model whose weights are not loaded yet; `tokenizer` and `template` are None without tokenizer files."""

    name: str
    weights: Weights
    tokenizer: Tokenizer | None
    template: ChatTemplate | None

    @property
    def config(self) -> LlamaConfig:
        """The architecture."""
        return self.weights.config

    def fingerprint(self, dtype: str, quantization: str | None = None) -> str:
        """sha256 (hex) of everything that determines the KV that this model computes in `dtype` with weights in the
        format `quantization`."""
        tokenizer = self.tokenizer.fingerprint if self.tokenizer else ""
        identity = (self.weights.fingerprint, tokenizer, dtype)
        if quantization is not None:
            identity += (f"{quantization}-1",)
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def read_model_files(path: str | Path, *, tokenizer: str | Path | None = None) -> ModelFiles:
    """Reads the files of a Hugging Face directory, a GGUF file or the embedded model ("demo"); "random:NAME[:SEED]" has
    none. Hashes every byte of the weights without keeping them.

    Args:
      tokenizer: directory with tokenizer files to use instead of the model's own.

    Raises:
      ConfigError, CheckpointError: as `load_model`.
    """
    file = _gguf(path)
    words, template = _text_of(path, tokenizer, file)
    if _is_random(path):
        assert words is not None
        weights, name = random_weights(str(path), words.vocab_size), str(path)
    elif file is not None:
        weights, name = gguf_weights(file), str(path) if str(path) in PACKAGED else file.name
    else:
        directory = model_directory(path)
        weights = weights_in(directory)
        name = "demo" if str(path) == "demo" else directory.resolve().name
    if words is not None and words.vocab_size > weights.config.vocab_size:
        where = tokenizer or path
        raise ConfigError(
            f"model: the tokenizer of {where} has {words.vocab_size} tokens, the model only {weights.config.vocab_size}"
        )
    return ModelFiles(name, weights, words, template)


def model_config(path: str | Path, *, tokenizer: str | Path | None = None) -> LlamaConfig:
    """The architecture of a model that `load_model` accepts; reads no weights.

    Raises:
      ConfigError, CheckpointError: as `load_model`.
    """
    if _is_random(path):
        words = ByteTokenizer() if tokenizer is None else _text_of(path, tokenizer)[0]
        assert words is not None
        return random_weights(str(path), words.vocab_size).config
    file = _gguf(path)
    if file is None:
        return load_config(model_directory(path))
    from ccjax.loading.gguf import config_of

    return config_of(file)


def load_model(
    path: str | Path,
    *,
    dtype: str,
    quantization: str | None = None,
    tokenizer: str | Path | None = None,
    tensor_parallel_size: int = 1,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a model from a Hugging Face directory, a GGUF file or a package (`ccjax.loading.named`), the embedded one
    for "demo", or one with random weights.

    "random:NAME" or "random:NAME:SEED" is a preset of `ccjax.models.llama3.presets`, or LAYERSxWIDTH[xHEADS], filled at
    random on the device. Without `tokenizer` its tokens are bytes, which is logged as a warning.

    Args:
      quantization: one of `ccjax.models.llama3.quantized.WEIGHT_FORMATS`; None keeps weights in `dtype`.
      tokenizer: directory with tokenizer files to use instead of the model's own.
      tensor_parallel_size: number of devices to shard the weights over.

    Raises:
      ConfigError: there is no such directory, package or preset, or the model cannot be sharded that way.
      CheckpointError: files are missing or inconsistent; the message names file and tensor.
    """
    files = read_model_files(path, tokenizer=tokenizer)
    mesh = mesh_for(files.config, tensor_parallel_size)
    sharding = None if mesh is None else functools.partial(param_sharding, mesh)
    on_load = None if progress is None else lambda done, total: progress("weights", done, total)
    words, directory = files.tokenizer, files.weights.directory
    if words is not None:
        eos_ids = words.eos_ids
    else:
        eos_ids = frozenset() if directory is None else _eos_ids(directory)
    params = files.weights.load(dtype, quantization, sharding, on_load)
    return LoadedModel(
        name=files.name,
        config=files.config,
        params=fuse(params) if mesh is None else params,
        tokenizer=words,
        template=files.template,
        eos_ids=eos_ids,
        fingerprint=files.fingerprint(dtype, quantization),
        directory=directory,
    )


def load_prompt_builder(
    path: str | Path, system_prompt: str | None = None, *, tokenizer: str | Path | None = None
) -> PromptBuilder | None:
    """The builder that turns messages and passages into token ids as an engine with this model does, without loading
    weights; None for a directory without tokenizer files.

    Raises:
      ConfigError, CheckpointError: as `load_model`.
    """
    words, template = _text_of(path, tokenizer)
    return None if words is None or template is None else prompt_builder(words, template, system_prompt)


def model_tokenizer(path: str | Path, tokenizer: str | Path | None = None) -> Tokenizer | None:
    """The tokenizer of a model that `load_model` accepts, without loading weights; None without tokenizer files.

    Raises:
      ConfigError: there is no such directory.
      ValueError: a tokenizer file cannot be used.
    """
    return _text_of(path, tokenizer)[0]


def prompt_builder(tokenizer: Tokenizer, template: ChatTemplate, system_prompt: str | None) -> PromptBuilder:
    """A builder with this system prompt; None uses the built-in one beside documents."""
    return PromptBuilder(tokenizer, template, system_prompt=system_prompt)


def model_directory(path: str | Path) -> Path:
    """The directory of a model; for "demo" that of the embedded one.

    Raises:
      ConfigError: there is no such directory.
    """
    directory = DEMO_MODEL if str(path) == "demo" else Path(path)
    if not directory.is_dir():
        names = ", ".join(f'"{name}"' for name in ("demo", *PACKAGED))
        wanted = f"{names}, a directory with a Hugging Face model, a GGUF file (.gguf), or {RANDOM}NAME"
        raise ConfigError(f"model: wanted {wanted}, got {str(path)!r}")
    return directory


def _is_random(path: str | Path) -> bool:
    return isinstance(path, str) and path.startswith(RANDOM)


def _gguf(path: str | Path) -> GgufFile | None:
    file = None if _is_random(path) else gguf_path(path)
    if file is None:
        return None
    from ccjax.loading.gguf import open_gguf  # here, so that the gguf package is only imported if needed

    return open_gguf(file)


def _text_of(
    path: str | Path, tokenizer: str | Path | None, file: GgufFile | None = None
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and template of a model, or those in the directory `tokenizer`; `file` if it is already open."""
    if tokenizer is not None:
        directory = Path(tokenizer)
        words = load_tokenizer(directory) if directory.is_dir() else None
        if words is None:
            raise ConfigError(f"tokenizer: wanted a directory with tokenizer files, got {str(tokenizer)!r}")
        return words, _usable(words, ChatTemplate.load(directory), tokenizer)
    if _is_random(path):
        logger.warning(
            "%s has no tokenizer: its tokens are bytes, so that texts are about four times as many as with a real one. "
            "Name a directory with tokenizer files (tokenizer=, --tokenizer) for lengths as in use",
            path,
        )
        return ByteTokenizer(), BYTE_TEMPLATE
    file = _gguf(path) if file is None else file
    if file is not None:
        from ccjax.loading.gguf import text_of

        words, template = text_of(file) or (None, None)
        return words, None if words is None or template is None else _usable(words, template, path)
    directory = model_directory(path)
    words = load_tokenizer(directory)
    return words, None if words is None else _usable(words, ChatTemplate.load(directory), path)


def _usable(words: Tokenizer, template: ChatTemplate, place: str | Path) -> ChatTemplate:
    """The template, held still.

    Raises:
      ConfigError: it fails with a plain question, as it would for each chat.
    """
    template = _held_still(template)
    try:
        prompt_builder(words, template, None).build_chat([{"role": "user", "content": "Who?"}])
    except Exception as error:  # of anything that a template does
        reason = " ".join(str(error).split()).removeprefix("messages: ") or type(error).__name__
        raise ConfigError(
            f"model: wanted a chat template that renders a message of a user, got one in {str(place)!r} that "
            f"fails: {reason}; mend it, or name a directory with another one (tokenizer=, --tokenizer)"
        ) from error
    return template


def _held_still(template: ChatTemplate) -> ChatTemplate:
    """The chat template with a fixed date.

    Llama 3.1's and 3.2's templates put a date into the system prompt; the current date would change the prefix of every
    stored chunk at midnight. The fixed one is the templates' own default.
    """
    return dataclasses.replace(template, variables={"date_string": "26 Jul 2024", **template.variables})


def _eos_ids(directory: Path) -> frozenset[int]:
    """End-of-text ids from the model's configuration files, for directories without a tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        try:
            value = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        except (ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"model: wanted a JSON object in {file}, got {error}") from error
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
