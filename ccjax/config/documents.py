"""Which documents a server answers from, and how they are split into passages and searched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ccjax.config.base import KEYWORD_ONLY, SettingsModel
from ccjax.config.values import FolderPath

IndexKind = Literal["auto", "flat", "ivf", "hnsw"]


class DocumentOptions(SettingsModel):
    """Documents that answers are based on; all readers of an index need the same options."""

    model_config = ConfigDict(title="documents")

    docs: FolderPath | None = None
    """Directory of documents; the models "demo" and "smollm2" include some."""
    no_docs: bool = False
    """Never retrieve documents, with any model."""
    index_dir: FolderPath | None = None
    """Directory of the index; without it below ~/.cache/ccjax/index."""
    index_kind: Annotated[IndexKind, KEYWORD_ONLY] = "auto"
    """Kind of the vector index; auto is ivf for 50,000 passages and more, else flat."""
    index_recall: Annotated[float, KEYWORD_ONLY] = Field(default=0.95, gt=0, lt=1)
    """Target recall of ivf and hnsw: share of the nearest passages to find."""
    embedder: str = "auto"
    """auto, lexical, or a directory of a sentence-transformers model."""
    chunk_tokens: int = Field(default=200, ge=1)
    """Longest passage, in tokens."""
    overlap_tokens: int = Field(default=0, ge=0)
    """Tokens by which adjacent passages may overlap."""
