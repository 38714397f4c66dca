"""A variant's metadata as stored in its record, and the summary of it that the index keeps for every variant."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import jax

from ccjax.cache.document_registry import Origin
from ccjax.cache.prefix_runs import is_run_record
from ccjax.policy.capture import make_variant_id
from ccjax.prompts import Prompt
from ccjax.store.spec import ShardRecord, ShardSummary
from ccjax.types import ChunkId, SegmentRole, VariantId, VariantMeta

_STORED_FIELDS = ("prefix_ids", "roles", "inter_by_prefix", "a_mean", "b_mean", "cci", "token_ranking", "fidelity")
_STORED_FIELDS += ("token_deviations", "token_received", "start", "platform")
"""Immutable metadata; `frequency_reuse`, which changes with every use, is kept outside the records."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownVariant:
    """What is known of a stored variant before its record is read; field names as in `VariantMeta`."""

    variant_id: VariantId
    chunk_id: ChunkId
    num_tokens: int
    num_bytes: int
    frequency_reuse: float = 0.0

    @classmethod
    def of(cls, summary: ShardSummary, frequency_reuse: float) -> KnownVariant:
        """From the store's summary, without reading the record."""
        return cls(VariantId(summary[0]), ChunkId(summary[1]), summary[2], summary[3], frequency_reuse)


def record_from_meta(meta: VariantMeta, prompt: Prompt) -> ShardRecord:
    """The record of a variant computed in `prompt`, with the data needed to recompute it."""
    lasting: dict[str, Any] = {name: getattr(meta, name) for name in _STORED_FIELDS}
    lasting["token_ids"] = next(chunk.token_ids for chunk in prompt.chunks if chunk.chunk_id == meta.chunk_id)
    lasting["platform"] = meta.platform or own_platform()
    return ShardRecord(
        variant_id=meta.variant_id,
        chunk_id=meta.chunk_id,
        num_tokens=meta.num_tokens,
        num_bytes=meta.num_bytes,
        meta={name: list(value) if isinstance(value, tuple) else value for name, value in lasting.items()},
    )


def meta_from_record(record: ShardRecord, frequency_reuse: float) -> VariantMeta | None:
    """The metadata in a record; None if it is missing or invalid."""
    try:
        meta = record.meta
        prefix_ids = tuple(ChunkId(chunk) for chunk in meta["prefix_ids"])
        inter = tuple(float(value) for value in meta["inter_by_prefix"])
        roles = tuple(meta["roles"])
        if len(roles) != len(prefix_ids) + 1 or not set(roles) <= set(get_args(SegmentRole)):
            return None
        ranking = tuple(int(offset) for offset in meta["token_ranking"])
        fidelity = meta["fidelity"]
        by_token = {name: tuple(map(float, meta[name])) for name in ("token_deviations", "token_received")}
        for values in by_token.values():
            if len(values) not in (0, record.num_tokens) or not all(map(is_frequency, values)):
                return None
        start = meta["start"]
        if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
            return None
        if len(inter) != len(prefix_ids) or sorted(ranking) != list(range(record.num_tokens)):
            return None
        if fidelity not in ("exact", "approx"):
            return None
        platform = meta["platform"]
        if not isinstance(platform, str):
            return None
        return VariantMeta(
            variant_id=VariantId(record.variant_id),
            chunk_id=ChunkId(record.chunk_id),
            prefix_ids=prefix_ids,
            inter_by_prefix=inter,
            a_mean=float(meta["a_mean"]),
            b_mean=float(meta["b_mean"]),
            cci=float(meta["cci"]),
            token_ranking=ranking,
            num_tokens=record.num_tokens,
            num_bytes=record.num_bytes,
            frequency_reuse=frequency_reuse,
            fidelity=fidelity,
            start=start,
            platform=platform,
            roles=roles,
            **by_token,
        )
    except (KeyError, TypeError, ValueError):
        return None


def parent_id(variant: object) -> VariantId | None:
    """The parent of an exact variant in RAGCache's knowledge tree: the exact variant of the chunk before it, behind the
    chunks before that. None for a first chunk, for an approximate variant, and before the record was read."""
    if isinstance(variant, VariantMeta):
        prefix_ids, fidelity = variant.prefix_ids, variant.fidelity
    elif isinstance(variant, ShardRecord):
        prefix_ids, fidelity = tuple(map(ChunkId, _texts(variant, "prefix_ids"))), variant.meta.get("fidelity")
    else:
        return None
    return make_variant_id(prefix_ids[-1], prefix_ids[:-1], "exact") if prefix_ids and fidelity == "exact" else None


def with_origin(record: ShardRecord, origin: Origin) -> ShardRecord:
    """The record with `origin` added for `origin_of_record`; unchanged where the prefix says it all."""
    beyond = {"seen": origin.seen - origin_of_record(record).seen, "after": origin.after}
    more = {name: sorted(values) for name, values in beyond.items() if values}
    return dataclasses.replace(record, meta={**record.meta, **more}) if more else record


def origin_of_record(record: ShardRecord) -> Origin:
    """The origin of a variant's KV according to its record."""
    chunks = [record.chunk_id, *_texts(record, "prefix_ids"), *_texts(record, "seen")]
    return Origin(frozenset(map(ChunkId, chunks)), frozenset(_texts(record, "after")), is_run_record(record))


def token_ids(record: ShardRecord) -> list[int]:
    """The chunk's token ids; empty if they are missing or invalid."""
    ids = record.meta.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in ids):
        return []
    return ids


def own_platform() -> str:
    """JAX's name of the platform that this process computes on."""
    return jax.default_backend()


def is_frequency(value: Any) -> bool:
    """True for a valid `f_r`: a finite number >= 0."""
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0.0


def _texts(record: ShardRecord, name: str) -> list[str]:
    values = record.meta.get(name)
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
