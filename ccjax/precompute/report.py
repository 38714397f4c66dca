"""The report of a compilation, as plain JSON types."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection as AnyOf
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ccjax.precompute.estimate import Estimate
from ccjax.precompute.messages import Collection
from ccjax.precompute.plan import Unit

if TYPE_CHECKING:
    from ccjax.cache.documents.pruning import Pruned
    from ccjax.precompute.quality import Quality

REPORT_VERSION = 1


@dataclasses.dataclass
class Counts:
    """Progress so far.

    Attributes:
      computed: variants computed and stored by this run. present: variants that existed when it was their turn.
      computed_tokens: that ran through the model. stored_bytes: of objects and records.
      seconds: since the first batch was handed out.
      failed: (passage, number of neighbours, reason) of what could not be computed or stored.
    """

    computed: int = 0
    present: int = 0
    computed_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    failed: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        """Variants processed."""
        return self.computed + self.present + len(self.failed)

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens, over all workers."""
        return self.computed_tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class Report:
    """Everything known at the end of a run, whatever ended it.

    Attributes:
      settings: of the run, for the record.
      stored: ids of the variants in the store at the end.
      interrupted: the signal that ended the run early; None for none.
      error: any other reason for an early end; None for none.
    """

    settings: dict[str, Any]
    collection: Collection | None = None
    estimate: Estimate | None = None
    counts: Counts = dataclasses.field(default_factory=Counts)
    stored: set[str] = dataclasses.field(default_factory=set)
    pruned: Pruned | None = None
    quality: Quality | None = None
    is_dry_run: bool = False
    interrupted: str | None = None
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """True if everything that can be stored is stored."""
        plan = None if self.collection is None else self.collection.plan
        return plan is not None and all(unit.variant_id in self.stored for unit in plan.units)

    def to_json(self) -> dict[str, Any]:
        """Versioned; docs/precompute.md has the keys."""
        found: dict[str, Any] = {
            "version": REPORT_VERSION,
            **self.settings,
            "dry_run": self.is_dry_run,
            "interrupted": self.interrupted,
            "error": self.error,
        }
        if self.collection is not None:
            found |= self._coverage(self.collection)
        if self.estimate is not None:
            missing = {"num_bytes": self.estimate.num_bytes, "missing_bytes": self.estimate.missing_bytes}
            found["estimate"] = {**dataclasses.asdict(self.estimate), **missing}
        counts = {**dataclasses.asdict(self.counts), "tokens_per_s": self.counts.tokens_per_s}
        del counts["failed"]
        found["run"] = counts
        found["pruned"] = None if self.pruned is None else dataclasses.asdict(self.pruned)
        found["quality"] = None if self.quality is None else dataclasses.asdict(self.quality)
        return found

    def _coverage(self, collection: Collection) -> dict[str, Any]:
        plan, passages = collection.plan, collection.passages
        num_tokens = sum(unit.num_tokens for unit in plan.alone)
        failed = [
            {"passage": passages[number].id, "neighbours": neighbours, "reason": reason}
            for number, neighbours, reason in self.counts.failed
        ]
        return {
            "dtype": collection.dtype,
            "kv_bytes_per_token": collection.kv_bytes_per_token,
            "passages": {"total": len(passages), **coverage(plan.alone, self.stored, len(passages))},
            "framed": coverage(plan.framed, self.stored, len(plan.framed)),
            "behind_neighbours": coverage(plan.conditioned, self.stored, len(plan.conditioned)),
            "tokens": num_tokens,
            "too_long": [passages[number].id for number in plan.too_long],
            "failed": failed,
            "unusable_files": [{"path": path, "reason": reason} for path, reason in collection.unusable],
        }


def coverage(units: Sequence[Unit], stored: AnyOf[str], total: int) -> dict[str, Any]:
    """Number of the `total` passages with their variant in the store, and of the tokens of `units`."""
    there = [unit for unit in units if unit.variant_id in stored]
    num_tokens = sum(unit.num_tokens for unit in units)
    return {
        "stored": len(there),
        "share": len(there) / total if total else None,
        "token_share": sum(unit.num_tokens for unit in there) / num_tokens if num_tokens else None,
    }
