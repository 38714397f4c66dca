"""Documents to ranked passages: parsing, chunking, embedding, search by words and by similarity.

Names are loaded on first use: importing this package loads neither faiss nor jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccjax.retrieval.catalog import Passage as Passage
    from ccjax.retrieval.documents import DocumentError as DocumentError
    from ccjax.retrieval.documents import LoadedDocument as LoadedDocument
    from ccjax.retrieval.documents import load_document as load_document
    from ccjax.retrieval.embedding import Embedder as Embedder
    from ccjax.retrieval.embedding import MiniLMEmbedder as MiniLMEmbedder
    from ccjax.retrieval.embedding import default_embedder as default_embedder
    from ccjax.retrieval.report import RefreshReport as RefreshReport
    from ccjax.retrieval.retriever import Retriever as Retriever

_MODULES = {
    "catalog": ("Passage",),
    "documents": ("DocumentError", "LoadedDocument", "load_document"),
    "embedding": ("Embedder", "MiniLMEmbedder", "default_embedder"),
    "report": ("RefreshReport",),
    "retriever": ("Retriever",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
