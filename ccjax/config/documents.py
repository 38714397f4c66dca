"""Which documents a server answers from, and how they are split into passages and searched."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from ccjax.config.base import SettingsModel
from ccjax.config.values import FolderPath, Names, NumBytes

SearchKind = Literal["hybrid", "dense", "lexical"]
DEMO = "demo"
"""The documents in the package; a directory of that name is ./demo."""


class DocumentOptions(SettingsModel):
    """Documents that answers are based on; all readers of an index need the same options."""

    model_config = ConfigDict(title="documents")

    docs: FolderPath | None = None
    """Directory of documents whose passages are added to prompts without any, or demo for the handbook of a small
    museum (with the model demo, what that was trained on); without it nothing is added."""
    index_dir: FolderPath | None = None
    """Directory of the index; without it below ~/.cache/ccjax/index."""
    search: SearchKind = "hybrid"
    """By words and by meaning (hybrid), by meaning alone (dense), or by words alone (lexical); without a sentence
    encoder hybrid is lexical."""
    docs_exclude: Names = ()
    """Patterns of files and directories to leave out, separated by commas, in the form of .gitignore ('drafts/,*.log');
    !NAME brings back what a .gitignore or .ccjaxignore in the folder leaves out."""
    docs_links: bool = False
    """Follow links that lead out of the directory of documents."""
    max_file_bytes: NumBytes = Field(default=20_000_000, ge=1)
    """Largest file, or line of a .jsonl collection, that is read."""
    embedder: str = "auto"
    """auto (the installed one), or a directory of a sentence-transformers model."""
    chunk_tokens: int = Field(default=200, ge=1)
    """Longest passage, in tokens."""
