"""Estimates the bytes and seconds that computing a collection takes, and whether they fit."""

from __future__ import annotations

import dataclasses
import os
import shutil
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from ccjax.policy.settings import PlannerSettings
from ccjax.policy.storage import least_rate
from ccjax.precompute.plan import Unit

NOTE_BYTES = 512
"""Size of the note that maps a passage to its document; mostly two hashes and names."""


@dataclasses.dataclass(frozen=True)
class FileSystem:
    """Location of a `file://` store: an existing directory, its free bytes, its block size."""

    directory: str
    free_bytes: int
    block_bytes: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Work to be done.

    Attributes:
      variants: number of missing ones. tokens: of these. computed_tokens: that run through the model for them.
      object_bytes: KV as stored, exact without compression, an upper bound with it. record_bytes: of their commit
        records, accurate to some per cent because numbers vary in length.
      disk_bytes: including notes, directories and partial blocks; None for a bucket.
      seconds: from the sample; None if nothing was measured. seconds_per_token: of one worker.
      free_bytes: of the file system; None for a bucket. budget_bytes: left in the store's budget; None for none.
    """

    variants: int
    tokens: int
    computed_tokens: int
    object_bytes: int
    record_bytes: int
    disk_bytes: int | None
    seconds: float | None
    seconds_per_token: float | None
    free_bytes: int | None
    budget_bytes: int | None

    @property
    def num_bytes(self) -> int:
        """Objects and records."""
        return self.object_bytes + self.record_bytes

    @property
    def hidden_bytes_per_s(self) -> float | None:
        """Rate from which requests hide loading this KV behind the share that they recompute by default (CacheBlend
        sec. 5.1); None if nothing was measured."""
        if not (self.seconds_per_token and self.tokens):
            return None
        bytes_per_token = -(-self.object_bytes // self.tokens)
        return least_rate(bytes_per_token, self.seconds_per_token, PlannerSettings().recompute_cap)

    @property
    def missing_bytes(self) -> int:
        """Bytes by which it does not fit; 0 if it does."""
        short = [0]
        if self.free_bytes is not None and self.disk_bytes is not None:
            short.append(self.disk_bytes - self.free_bytes)
        if self.budget_bytes is not None:
            short.append(self.num_bytes - self.budget_bytes)
        return max(short)


def make_estimate(
    missing: Sequence[Unit],
    *,
    file_system: FileSystem | None,
    budget_bytes: int | None,
    stored_bytes: int,
    sample_tokens: int,
    sample_s: Sequence[float],
) -> Estimate:
    """Estimates the missing units.

    A file takes whole blocks and a directory one, so a store with many short passages takes more space than the sum of
    its objects and records.

    Args:
      budget_bytes: of the store; None for no limit. stored_bytes: used part of it.
      sample_tokens: computed tokens of the sample that each worker computed concurrently.
      sample_s: seconds that each worker took for it; empty if nothing was measured.
    """
    computed_tokens = sum(unit.computed_tokens for unit in missing)
    disk_bytes = None
    if file_system is not None:
        block = file_system.block_bytes
        parts = ((unit.object_bytes, unit.record_bytes, NOTE_BYTES, block) for unit in missing)
        disk_bytes = sum(-(-size // block) * block for unit_parts in parts for size in unit_parts)
    tokens_per_s = sum(sample_tokens / seconds for seconds in sample_s)
    return Estimate(
        variants=len(missing),
        tokens=sum(unit.num_tokens for unit in missing),
        computed_tokens=computed_tokens,
        object_bytes=sum(unit.object_bytes for unit in missing),
        record_bytes=sum(unit.record_bytes for unit in missing),
        disk_bytes=disk_bytes,
        seconds=computed_tokens / tokens_per_s if tokens_per_s else None if missing else 0.0,
        seconds_per_token=sum(sample_s) / (len(sample_s) * sample_tokens) if sample_s else None,
        free_bytes=None if file_system is None else file_system.free_bytes,
        budget_bytes=None if budget_bytes is None else max(0, budget_bytes - stored_bytes),
    )


def sample(missing: Sequence[Unit], most: int) -> tuple[Unit, ...]:
    """At most `most` of the units of passages alone, or of all if there are none, evenly spread over lengths."""
    units = [unit for unit in missing if not unit.behind] or list(missing)
    ordered = sorted(units, key=lambda unit: (unit.num_tokens, unit.passage))
    if len(ordered) <= most:
        return tuple(ordered)
    return tuple(ordered[(2 * place + 1) * len(ordered) // (2 * most)] for place in range(most))


def file_system_of(url: str) -> FileSystem | None:
    """The file system of a `file://` store, which need not exist yet; None for other URLs."""
    place = _path(url)
    if place is None:
        return None
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return FileSystem(str(place), shutil.disk_usage(place).free, os.statvfs(place).f_frsize)


def _path(url: str) -> Path | None:
    parts = urllib.parse.urlsplit(url)
    return Path(urllib.parse.unquote(parts.path)) if parts.scheme == "file" else None
