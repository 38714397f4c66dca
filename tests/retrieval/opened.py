"""Retrievers over small folders, which count words and search by them. Contains no assertions."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.retrieval import Embedder, Retriever


class CountingEmbedder:
    """Hashed words, without weights to load; remembers the texts it was given."""

    def __init__(self, name: str = "counting-1", dim: int = 512) -> None:
        self.name, self.dim, self._dim = name, dim, dim
        self.texts: list[str] = []
        self.share = 1.0

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.texts.extend(texts)
        vectors = np.zeros((len(texts), self._dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w\w+", text.lower()):
                vector[zlib.crc32(word.encode()) % self._dim] += 1.0
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)

    def taken(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts

    def windows(self, text: str) -> Sequence[str]:
        """Eight words each."""
        words = text.split()
        return [" ".join(words[start : start + 8]) for start in range(0, len(words), 8)]

    def known_share(self, text: str) -> float:
        return self.share


class HeldEmbedder(CountingEmbedder):
    """Knows that a car is an automobile; in the background each call waits for a permit, or fails with `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.error: Exception | None = None
        self.in_background: list[str] = []

    def go(self) -> None:
        self.permits.release(1000)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        if threading.current_thread().name == "ccjax-vectors":
            assert self.permits.acquire(timeout=600)
            if self.error is not None:
                raise self.error
            self.in_background.extend(texts)
        return super().embed([text.replace("car ", "automobile ") for text in texts])


def open_retriever(docs: Path, embedder: Embedder | None = None, **options: Any) -> Retriever:
    """By words alone unless there is an `embedder`."""
    search = "lexical" if embedder is None else "hybrid"
    settings = {"count_tokens": lambda text: len(text.split()), "chunk_tokens": 8, "search": search, **options}
    return Retriever(docs, embedder=embedder, **settings)
