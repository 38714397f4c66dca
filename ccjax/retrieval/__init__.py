"""Documents to ranked passages: parsing, chunking, embedding, search by words and by similarity.

Names are loaded on first use: importing this package loads neither faiss nor jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccjax.retrieval.catalog import Passage
    from ccjax.retrieval.documents import DocumentError, LoadedDocument, load_document
    from ccjax.retrieval.embedding import Embedder, MiniLMEmbedder, default_embedder
    from ccjax.retrieval.report import RefreshReport
    from ccjax.retrieval.retriever import Progress, Retriever

_EXPORTS = {
    "DocumentError": "documents",
    "LoadedDocument": "documents",
    "load_document": "documents",
    "Embedder": "embedding",
    "MiniLMEmbedder": "embedding",
    "default_embedder": "embedding",
    "Passage": "catalog",
    "Progress": "retriever",
    "RefreshReport": "report",
    "Retriever": "retriever",
}
__all__ = [
    "DocumentError",
    "Embedder",
    "LoadedDocument",
    "MiniLMEmbedder",
    "Passage",
    "Progress",
    "RefreshReport",
    "Retriever",
    "default_embedder",
    "load_document",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
