"""Messages between the coordinator of a compilation and its workers."""

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
    """Settings of a worker.

    Attributes:
      model: directory, or "demo".
      engine: fields of `EngineConfig`, including the store; the same as for a server of this collection.
      documents: as for that server.
      compile_cache: directory for compiled steps.
      num_neighbours: number of similar passages to compute each passage behind; 0 for none.
      environment: environment variables of this worker only.
    """

    model: str
    engine: Mapping[str, Any]
    documents: DocumentOptions
    compile_cache: str
    num_neighbours: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Collection:
    """A collection as read by a worker, and the work to be done.

    Attributes:
      passages: in corpus order: by document id, then in reading order.
      frame: the passages behind which others are prepared.
      unusable: (path, reason) of files that could not be read.
      dtype: of the model's KV. kv_bytes_per_token: in memory.
    """

    passages: tuple[Document, ...]
    frame: tuple[Document, ...]
    plan: Plan
    unusable: tuple[tuple[str, str], ...]
    dtype: str
    kv_bytes_per_token: int


@dataclasses.dataclass(frozen=True)
class WarmingWork:
    """Some variants to compute: each document behind those of `behind`; see `EngineDocuments.begin_warming`."""

    documents: tuple[Document, ...]
    behind: tuple[tuple[Document, ...], ...]


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception in a worker: a refused argument, or a defect."""

    is_refusal: bool
    message: str
