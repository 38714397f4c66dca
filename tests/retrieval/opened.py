"""Retrievers over small folders, which count words and embed by them. Contains no assertions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.retrieval import Embedder, LexicalEmbedder, Retriever


class CountingEmbedder:
    """A lexical embedder that remembers the texts it was given."""

    def __init__(self, name: str = "counting-1") -> None:
        self._inner = LexicalEmbedder(dim=512)
        self.name, self.dim = name, self._inner.dim
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.texts.extend(texts)
        return self._inner.embed(texts)

    def taken(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


def open_retriever(docs: Path, embedder: Embedder | None = None, **options: Any) -> Retriever:
    settings = {"count_tokens": lambda text: len(text.split()), "chunk_tokens": 6, **options}
    return Retriever.open(docs, embedder=embedder or LexicalEmbedder(), **settings)
