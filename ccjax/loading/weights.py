"""Sources of a model's weights: a Hugging Face directory, a GGUF file, or a preset with random weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp

from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.convert import fingerprint, fingerprint_files, load_config, load_params, stored_dtype
from ccjax.models.llama3.params import Params, ParamSpec, init_params
from ccjax.models.llama3.presets import preset

if TYPE_CHECKING:
    from ccjax.loading.gguf import GgufFile

logger = logging.getLogger(__name__)

RANDOM = "random:"
"""Prefix of the names of models with random weights."""

OnLoad = Callable[[int, int], None]
"""Called with (done, total) while weights load."""
Placing = Callable[[ParamSpec], jax.sharding.Sharding]
"""Returns the sharding of a leaf."""


class Weights(Protocol):
    """The weights of one model, not loaded yet.

    Attributes:
      directory: the model's directory; None for a GGUF file and for random weights.
      fingerprint: digest of the weights as stored, and of the configuration as far as it changes KV.
    """

    @property
    def directory(self) -> Path | None: ...
    @property
    def config(self) -> LlamaConfig: ...
    @property
    def fingerprint(self) -> str: ...

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        """Loads the parameter tree, one leaf at a time."""
        ...


@dataclasses.dataclass(frozen=True)
class HuggingFaceWeights:
    """Weights in a Hugging Face directory; the fingerprint is of every byte of its weight files."""

    directory: Path
    config: LlamaConfig
    fingerprint: str

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        if stored_dtype(self.directory) == "bfloat16":
            _say_how_bfloat16_runs(self.directory, dtype, quantization)
        return load_params(
            self.directory,
            self.config,
            dtype=jnp.dtype(dtype),
            quantization=quantization,
            progress=progress,
            sharding=sharding,
        )


@dataclasses.dataclass(frozen=True)
class GgufWeights:
    """Weights in a GGUF file, dequantised while they load; the fingerprint is of every byte of the file, or of all its
    parts."""

    file: GgufFile
    config: LlamaConfig
    fingerprint: str
    directory: None = None

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        from ccjax.loading.gguf import load_gguf  # here, so that the gguf package is only imported if needed

        if any(tensor.tensor_type.name == "BF16" for _, tensor in self.file.tensors.values()):
            _say_how_bfloat16_runs(self.file.path, dtype, quantization)
        return load_gguf(
            self.file,
            self.config,
            dtype=jnp.dtype(dtype),
            quantization=quantization,
            progress=progress,
            sharding=sharding,
        )


@dataclasses.dataclass(frozen=True)
class RandomWeights:
    """A preset or a shape with random weights, to measure speed and memory without downloads.

    Attributes:
      name: a preset of `ccjax.models.llama3.presets`, or LAYERSxWIDTH[xHEADS].
    """

    name: str
    seed: int
    config: LlamaConfig
    directory: None = None

    @property
    def fingerprint(self) -> str:
        identity = ("ccjax-random-2", self.name, self.seed, self.config.kv_identity)
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        # A fixed generator: JAX's default is a setting, which would change the weights but not the fingerprint.
        key = jax.random.key(self.seed, impl="threefry2x32")
        return init_params(
            self.config,
            key,
            jnp.dtype(dtype),
            quantization=quantization,
            progress=progress,
            sharding=sharding or (lambda _: None),
        )


def _say_how_bfloat16_runs(path: Path, dtype: str, quantization: str | None) -> None:
    if dtype == "float32" and quantization is None and jax.default_backend() == "cpu":
        logger.warning(
            "%s: stored in bfloat16, runs in float32, which CPUs compute many times faster; int8 is faster still", path
        )


def random_weights(name: str, vocab_size: int) -> RandomWeights:
    """The weights that "random:NAME" or "random:NAME:SEED" names; the default seed is 0.

    Args:
      vocab_size: of a model that is named by its shape.

    Raises:
      ConfigError: no such preset (the message lists all), or an invalid seed.
    """
    wanted, _, seed = name.removeprefix(RANDOM).partition(":")
    if seed and not (seed.isascii() and seed.isdecimal() and int(seed) < 2**32):
        raise ConfigError(f"model: wanted {RANDOM}{wanted}:SEED with a seed from 0 to 2^32 - 1, got {name!r}")
    try:
        return RandomWeights(wanted, int(seed or 0), preset(wanted, vocab_size))
    except ValueError as error:
        raise ConfigError(f"model: after {RANDOM} {error}") from error


def weights_in(directory: Path) -> Weights:
    """The weights in a Hugging Face directory. Hashes every byte.

    Raises:
      CheckpointError: files are missing or inconsistent.
    """
    return HuggingFaceWeights(directory, load_config(directory), fingerprint(directory))


def gguf_weights(file: GgufFile) -> GgufWeights:
    """The weights of a GGUF file. Hashes every byte.

    Raises:
      CheckpointError: its architecture is not supported.
    """
    from ccjax.loading.gguf import config_of

    config = config_of(file)
    digest = fingerprint_files(config, {f"gguf-{number}": path for number, path in enumerate(file.paths)})
    return GgufWeights(file, config, digest)
