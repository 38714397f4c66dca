"""Where a model's weights come from: a Hugging Face directory, a GGUF file, a checkpoint of our own, or a preset filled
at random."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.errors import ConfigError
from ccjax.models.llama3.checkpoint import CheckpointIndex, is_checkpoint, load_checkpoint, read_index
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.convert import fingerprint, fingerprint_files, load_config, load_params, replacing
from ccjax.models.llama3.params import Params, ParamSpec, init_params
from ccjax.models.llama3.presets import preset
from ccjax.models.llama3.sharding import spread

if TYPE_CHECKING:
    from ccjax.loading.gguf import GgufFile

RANDOM = "random:"
"""What the names of models with random weights begin with."""

_SOURCE_FILE = "ccjax_source.json"

OnLoad = Callable[[int, int], None]
"""Called with (done, total) while weights load."""
Placing = Callable[[ParamSpec], jax.sharding.Sharding]
"""Where a leaf is to be."""


class Weights(Protocol):
    """The weights of one model, not loaded yet.

    Attributes:
      directory: where they lie, with files that belong to them; None for a GGUF file and for random ones.
    """

    @property
    def directory(self) -> Path | None: ...
    @property
    def config(self) -> LlamaConfig: ...

    def format_of(self, quantization: str | None) -> str | None:
        """The format that `load` gives weights in where that one is asked for.

        Raises:
          ConfigError: there are no such weights.
        """
        ...

    def fingerprint(self, dtype: str, quantization: str | None) -> str:
        """Digest of configuration and weights, before they are brought into `dtype` and that format: the same in every
        process, and for the same weights however they are stored."""
        ...

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        """The parameter tree, one leaf at a time."""
        ...


@dataclasses.dataclass(frozen=True)
class HuggingFaceWeights:
    """Those of a Hugging Face directory.

    Attributes:
      digest: of every byte of its weight files, or of the weights that these were made of.
    """

    directory: Path
    config: LlamaConfig
    digest: str

    def format_of(self, quantization: str | None) -> str | None:
        return quantization

    def fingerprint(self, dtype: str, quantization: str | None) -> str:
        return self.digest

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        return load_params(
            self.directory,
            self.config,
            dtype=jnp.dtype(dtype),
            quantization=quantization,
            progress=progress,
            sharding=sharding,
        )


@dataclasses.dataclass(frozen=True)
class CheckpointWeights:
    """Those of a checkpoint that `ccjax convert` wrote. Their bytes are verified when they load."""

    directory: Path
    config: LlamaConfig
    index: CheckpointIndex

    def format_of(self, quantization: str | None) -> str | None:
        stored = self.index.quantization
        if stored is not None and quantization not in (None, stored):
            raise ConfigError(f"quantization: wanted {stored}, which {self.directory} is in, got {quantization!r}")
        return stored or quantization

    def fingerprint(self, dtype: str, quantization: str | None) -> str:
        index = self.index
        from_rounded = quantization is not None and index.quantization is None
        if not index.is_rounded or (dtype == index.dtype and not from_rounded):
            return index.source
        return hashlib.sha256(f"{index.source}\0rounded to {index.dtype}".encode()).hexdigest()

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        put = None if sharding is None else _putting(sharding)
        return load_checkpoint(
            self.directory, dtype=jnp.dtype(dtype), quantization=quantization, progress=progress, put=put
        )


@dataclasses.dataclass(frozen=True)
class GgufWeights:
    """Those of a GGUF file, dequantised as they load.

    Attributes:
      digest: of every byte of the file, or of its parts.
    """

    file: GgufFile
    config: LlamaConfig
    digest: str
    directory: None = None

    def format_of(self, quantization: str | None) -> str | None:
        return quantization

    def fingerprint(self, dtype: str, quantization: str | None) -> str:
        return self.digest

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        from ccjax.loading.gguf import load_gguf  # the package behind it is for those who have such files

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
    """A preset or a shape, filled at random: for speed, memory and scale without downloads.

    Attributes:
      name: of `ccjax.models.llama3.presets`.
    """

    name: str
    seed: int
    config: LlamaConfig
    directory: None = None

    def format_of(self, quantization: str | None) -> str | None:
        return quantization

    def fingerprint(self, dtype: str, quantization: str | None) -> str:
        identity = ("ccjax-random-1", self.name, self.seed, self.config.to_hf())
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def load(self, dtype: str, quantization: str | None, sharding: Placing | None, progress: OnLoad | None) -> Params:
        # The kind of generator is named: a setting of JAX would change the weights and not the fingerprint.
        key = jax.random.key(self.seed, impl="threefry2x32")
        return init_params(
            self.config,
            key,
            jnp.dtype(dtype),
            quantization=quantization,
            progress=progress,
            sharding=sharding or _anywhere,
        )


def random_weights(name: str, vocab_size: int) -> RandomWeights:
    """The weights that "random:NAME" or "random:NAME:SEED" names; the seed is 0 where there is none.

    Args:
      vocab_size: of a model that is named by its shape.

    Raises:
      ConfigError: no such preset, with those there are, or no such seed.
    """
    wanted, _, seed = name.removeprefix(RANDOM).partition(":")
    if seed and not (seed.isascii() and seed.isdecimal() and int(seed) < 2**32):
        raise ConfigError(f"model: wanted {RANDOM}{wanted}:SEED with a seed from 0 to 2^32 - 1, got {name!r}")
    try:
        return RandomWeights(wanted, int(seed or 0), preset(wanted, vocab_size))
    except ValueError as error:
        raise ConfigError(f"model: after {RANDOM} {error}") from error


def weights_in(directory: Path) -> Weights:
    """The weights of a model directory, in whichever form. Those of Hugging Face are hashed, every byte; none is kept.

    Raises:
      CheckpointError: files are missing or do not fit.
    """
    config = load_config(directory)
    if is_checkpoint(directory):
        return CheckpointWeights(directory, config, read_index(directory))
    digest = fingerprint(directory)
    return HuggingFaceWeights(directory, config, _noted_source(directory, digest) or digest)


def gguf_weights(file: GgufFile) -> GgufWeights:
    """The weights of a GGUF file. Every byte is hashed; none is kept.

    Raises:
      CheckpointError: its architecture is not supported.
    """
    from ccjax.loading.gguf import config_of

    config = config_of(file)
    digest = fingerprint_files(config, {f"gguf-{number}": path for number, path in enumerate(file.paths)})
    return GgufWeights(file, config, digest)


def note_source(directory: Path, source: str) -> None:
    """Notes in a Hugging Face directory whose weights its files hold, for as long as these stay as they are."""
    note = {"files": fingerprint(directory), "source": source}
    with replacing(directory / _SOURCE_FILE) as temporary:
        temporary.write_text(json.dumps(note, indent=1) + "\n")


def _noted_source(directory: Path, digest: str) -> str | None:
    try:
        note = json.loads((directory / _SOURCE_FILE).read_text("utf-8"))
        return note["source"] if note["files"] == digest and isinstance(note["source"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _putting(sharding: Placing) -> Callable[[ParamSpec, np.ndarray], Any]:
    """Each device takes its part from the host."""
    return lambda spec, host: spread(host, sharding(spec))


def _anywhere(_: ParamSpec) -> None:
    return None
