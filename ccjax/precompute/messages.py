"""What the process that directs a compilation of a collection and its workers say to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ccjax.precompute.plan import Plan
from ccjax.types import Document

if TYPE_CHECKING:
    from ccjax.config import DocumentOptions


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a worker has to know.

    Attributes:
      model: directory, or "demo".
      engine: fields of `EngineConfig`, the store among them; those that a server of this collection has.
      documents: of that server, too.
      compile_cache: directory where compiled steps are kept.
      num_neighbours: that each passage is also computed behind; 0 for none.
      environment: variables of the environment that only this worker has.
    """

    model: str
    engine: Mapping[str, Any]
    documents: DocumentOptions
    compile_cache: str
    num_neighbours: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Collection:
    """A collection as a worker read it, and what is to be done.

    Attributes:
      passages: in corpus order: by document id, then as they stand there.
      frame: the passages that others are prepared behind.
      unusable: (path, reason) of files that could not be read.
      dtype: of the model's KV. kv_bytes_per_token: of it in memory.
    """

    passages: tuple[Document, ...]
    frame: tuple[Document, ...]
    plan: Plan
    unusable: tuple[tuple[str, str], ...]
    dtype: str
    kv_bytes_per_token: int


@dataclasses.dataclass(frozen=True)
class WarmingWork:
    """Some variants to compute: each document behind those of `behind`; see `Engine.begin_warming`."""

    documents: tuple[Document, ...]
    behind: tuple[tuple[Document, ...], ...]


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a worker raised: a refusal that names its argument, or a defect."""

    is_refusal: bool
    message: str
