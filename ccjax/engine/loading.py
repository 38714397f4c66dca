"""Finds and loads a model directory: weights, tokenizer, chat template, limits. Knows no store and no request."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

from ccjax.errors import ConfigError
from ccjax.text import ChatTemplate, Tokenizer, load_tokenizer
from models.llama3.config import LlamaConfig
from models.llama3.convert import fingerprint, load_config, load_params
from models.llama3.params import Params

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while something long runs."""

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEMO_MODEL = ASSETS / "demo_model"
DEMO_CORPUS = ASSETS / "demo_corpus"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run; `tokenizer` and `template` are None for a directory without tokenizer files, `directory`
    is for one that comes from none."""

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
    """What a model directory holds beside the weights, and who it is; `tokenizer` is None where there are no files.

    Attributes:
      weights_fingerprint: digest of configuration and weights, see `models.llama3.convert.fingerprint`.
    """

    name: str
    directory: Path
    config: LlamaConfig
    tokenizer: Tokenizer | None
    weights_fingerprint: str

    def fingerprint(self, dtype: str) -> str:
        """sha256 (hex) of all that decides the KV that this model computes in `dtype`."""
        tokenizer = self.tokenizer.fingerprint if self.tokenizer else ""
        identity = (self.weights_fingerprint, tokenizer, dtype, repr(self.config))
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def read_model_files(path: str | Path) -> ModelFiles:
    """The files of a Hugging Face directory, or of the embedded model for "demo". Every byte of the weights is hashed,
    but none is kept.

    Raises:
      ConfigError, CheckpointError: as `load_model`.
    """
    directory = DEMO_MODEL if str(path) == "demo" else Path(path)
    if not directory.is_dir():
        raise ConfigError(f'model: wanted "demo" or a directory with a Hugging Face model, got {str(path)!r}')
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"model: the tokenizer in {directory} has {tokenizer.vocab_size} tokens, config.json only "
            f"{config.vocab_size}"
        )
    name = "demo" if str(path) == "demo" else directory.resolve().name
    return ModelFiles(name, directory, config, tokenizer, fingerprint(directory))


def load_model(path: str | Path, *, dtype: str, progress: Progress | None = None) -> LoadedModel:
    """The model in a Hugging Face directory, or the embedded one for "demo".

    Raises:
      ConfigError: there is no such directory.
      CheckpointError: files are missing or do not fit; the message names file and tensor.
    """
    files = read_model_files(path)
    on_tensor = None if progress is None else lambda done, total: progress("weights", done, total)
    params = load_params(files.directory, files.config, dtype=jnp.dtype(dtype), progress=on_tensor)
    tokenizer = files.tokenizer
    return LoadedModel(
        name=files.name,
        config=files.config,
        params=params,
        tokenizer=tokenizer,
        template=_template(files.directory) if tokenizer is not None else None,
        eos_ids=tokenizer.eos_ids if tokenizer is not None else _eos_ids(files.directory),
        fingerprint=files.fingerprint(dtype),
        directory=files.directory,
    )


def _template(directory: Path) -> ChatTemplate:
    """The chat template with its date held still.

    Llama 3.1's and 3.2's templates print a date into the system prompt; today's would change the prefix of every stored
    chunk at midnight. This one is their own default.
    """
    template = ChatTemplate.load(directory)
    return dataclasses.replace(template, variables={"date_string": "26 Jul 2024", **template.variables})


def _eos_ids(directory: Path) -> frozenset[int]:
    """End-of-text ids that the model files name, for directories without a tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        try:
            value = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"model: wanted a JSON object in {file}, got {error}") from error
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
