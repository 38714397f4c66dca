"""The engine's index of chunk variants: what is stored, and how useful each has been.

Keeps metadata and token ids, no KV. Bytes are the store's, what goes when room is needed is for placement to say.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ccjax.engine.chunk_tokens import ChunkTokens
from ccjax.engine.documents import DocumentRegistry, Origin
from ccjax.engine.placement import Costs, Pinned, Placement
from ccjax.engine.prompts import Prompt
from ccjax.policy.capture import make_variant_id
from ccjax.policy.reuse import cache_fix_overhead
from ccjax.policy.variants import choose_victims, reuse_credit
from ccjax.types import ChunkId, Fidelity, VariantId, VariantMeta
from store.spec import ShardRecord
from store.tickets import LoadTicket
from store.tiered import TieredStore

logger = logging.getLogger(__name__)


class VariantIndex:
    """Variants by chunk, rebuilt from the store's records at start; not thread-safe but for `of_chunks`, the engine's
    lock guards it.

    Attributes:
      tokens: token ids of the chunks that the held variants are made of, as far as they are known.
      documents: which documents the chunks belong to, and which of these were erased.
    """

    def __init__(
        self, store: TieredStore, costs: Costs, *, policy: str, alpha: float, max_variants: int | None
    ) -> None:
        """
        Args:
          policy: eviction policy of every tier.
          alpha: CacheCraft eq. 12, for what a later use of a variant may cost.
          max_variants: CacheCraft sec. 3.3 `N x M`; None for as many as there is room for.
        """
        self.tokens = ChunkTokens()
        self.documents = DocumentRegistry(store.notes)
        self._store = store
        self._alpha = alpha
        self._max_variants = max_variants
        self._placement = Placement(store, costs, policy=policy, on_gone=self._drop)
        self._by_id: dict[VariantId, VariantMeta] = {}
        self._by_chunk: dict[ChunkId, dict[VariantId, VariantMeta]] = {}
        self._siblings_lock = threading.Lock()
        self._with_system: set[VariantId] = set()
        self._origins: dict[VariantId, Origin] = {}
        hints = store.read_hints()
        frequencies = _frequencies(hints)
        for record in store.records():
            self._take_in(record, frequencies.get(record.variant_id, 0.0))
        self._placement.adopt(self._by_id.values(), hints.get("eviction"))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, variant_id: object) -> bool:
        return variant_id in self._by_id

    def __iter__(self) -> Iterator[VariantMeta]:
        return iter(tuple(self._by_id.values()))

    def of_chunks(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """Known variants of each chunk; chunks without any are left out. May be asked while another thread adds."""
        with self._siblings_lock:
            return {chunk: tuple(self._by_chunk[chunk].values()) for chunk in chunk_ids if chunk in self._by_chunk}

    def prompt_of(self, meta: VariantMeta) -> Prompt:
        """The prompt that computes a held variant anew: its prefix, its chunk, and one token in place of a question.

        Raises:
          KeyError: the token ids of one of these chunks are not known.
        """
        chunks = tuple(self.tokens.chunk(key) for key in (*meta.prefix_ids, meta.chunk_id))
        return Prompt(chunks, meta.variant_id in self._with_system, chunks[-1].token_ids[-1:], max_new_tokens=1)

    def origin(self, meta: VariantMeta) -> Origin:
        """Which texts a held variant was computed while looking at."""
        return self._origins.get(meta.variant_id) or Origin(frozenset({meta.chunk_id, *meta.prefix_ids}))

    def origin_of(self, variant_id: VariantId) -> Origin:
        """`origin` by id; of none where the variant is not held."""
        meta = self._by_id.get(variant_id)
        return Origin(frozenset()) if meta is None else self.origin(meta)

    def spare(self, pins: Pinned) -> None:
        """From now on eviction leaves alone what `pins` names."""
        self._placement.pins = pins

    def credit(self, cfo_by_variant: Sequence[tuple[VariantId, float]]) -> None:
        """The uses of one request: each is worth 1/CFO to `f_r` (CacheCraft sec. 3.3)."""
        self._placement.next_request()
        for variant_id, cfo in cfo_by_variant:
            meta = self._by_id.get(variant_id)
            if meta is not None:
                gain = reuse_credit(cfo, meta.num_tokens)
                self._put(dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + gain))
                self._placement.use(meta, cfo)

    def add(
        self,
        meta: VariantMeta,
        kv: np.ndarray,
        prompt: Prompt,
        *,
        pinned: Collection[VariantId],
        seen: frozenset[ChunkId] = frozenset(),
    ) -> bool:
        """Stores a variant computed in `prompt`, evicting what is worth less; False if no tier took it. An exact
        variant takes the place of the approximate one behind the same prefix, its `f_r` and its uses, or of a lossy
        copy of itself. `seen` are chunks besides its own and its prefix that had a part in its KV."""
        meta = self._in_place_of_approximate(meta)
        known = self._by_id.get(meta.variant_id)
        if known is not None:
            meta = dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + known.frequency_reuse)
        if self._max_variants is not None:
            excess = max(0, len(self._by_id) + (known is None) - self._max_variants)
            protected = {*pinned, *self._placement.pinned_ids(None)}
            victims = choose_victims(self._by_id.values(), excess, pinned=protected)
            if victims is None:
                return False
            self._placement.evict(victims)
        expected_cfo = cache_fix_overhead(meta.cci, 0.0, self._alpha)
        seen = seen.union((meta.chunk_id, *meta.prefix_ids))
        origin = Origin(seen, self.documents.after(meta.chunk_id, seen))
        record = _with_origin(_record_from_meta(meta, prompt), origin)
        if not self._placement.store(record, kv, expected_cfo=expected_cfo, pinned=pinned):
            return False
        self._put(meta, has_system=prompt.has_system, origin=origin)
        for chunk in prompt.chunks:
            self.tokens.learn(chunk.chunk_id, chunk.token_ids)
        return True

    def complete_load(self, ticket: LoadTicket, *, ok: bool = True) -> None:
        """Unpins what was loaded; with `ok`, what is worth it moves into a faster tier."""
        self._placement.complete_load(ticket, self._by_id, ok=ok)

    def discard(self, variant_id: VariantId) -> None:
        """Removes a damaged or replaced variant from every tier and from the index."""
        self._store.discard(variant_id)
        self.forget(variant_id)

    def forget(self, variant_id: VariantId) -> None:
        """Removes a variant that no tier holds any more from the index."""
        self._placement.forget(variant_id)
        self._drop(variant_id)

    def _drop(self, variant_id: VariantId) -> None:
        meta = self._by_id.pop(variant_id, None)
        if meta is not None:
            self._with_system.discard(variant_id)
            self._origins.pop(variant_id, None)
            self.tokens.release(meta)
            with self._siblings_lock:
                siblings = self._by_chunk[meta.chunk_id]
                del siblings[variant_id]
                if not siblings:
                    del self._by_chunk[meta.chunk_id]

    def replaces_approximate(self, meta: VariantMeta) -> bool:
        """True if `add` of this exact variant would replace an approximate one."""
        return meta.fidelity == "exact" and _twin_id(meta, "approx") in self._by_id

    def drop_if_replaced(self, meta: VariantMeta) -> bool:
        """Removes an approximate variant for which there is an exact one behind the same prefix, say of another
        process; False if there is none."""
        exact = self._by_id.get(_twin_id(meta, "exact"))
        if exact is None:
            return False
        self._put(self._in_place_of_approximate(exact))
        return True

    def follow(self, added: Collection[str], removed: Collection[str]) -> tuple[int, int]:
        """Takes in what the disk gained and lost by other processes; the numbers of variants that became known and
        unknown here by that."""
        before = set(self._by_id)
        records = {record.variant_id: record for record in self._store.records()} if added else {}
        for variant_id in added:
            if variant_id in records and variant_id not in self._by_id:
                self._take_in(records[variant_id], 0.0)
        self._placement.adopt([self._by_id[VariantId(key)] for key in added if key in self._by_id])
        for variant_id in removed:
            self._placement.follow(variant_id)
            if self._store.tier_of(variant_id) is None:
                self.forget(VariantId(variant_id))
        return len(self._by_id.keys() - before), len(before - self._by_id.keys())

    def uses(self) -> dict[str, Any]:
        """What eviction goes by, as JSON values that `restore` takes."""
        return self._placement.uses(self._by_id.keys())

    def restore(self, restored: Iterable[tuple[ShardRecord, float]], uses: Any = None) -> None:
        """Takes in variants that were brought into the store from elsewhere, with their `f_r` and `uses()` there; of
        those that are known already, the `f_r` if it is greater."""
        added = []
        for record, frequency_reuse in restored:
            known = self._by_id.get(VariantId(record.variant_id))
            if known is None:
                self._take_in(record, frequency_reuse)
                added.append(VariantId(record.variant_id))
            elif frequency_reuse > known.frequency_reuse:
                self._put(dataclasses.replace(known, frequency_reuse=frequency_reuse))
        self._placement.adopt([self._by_id[key] for key in added if key in self._by_id], uses)

    def save_hints(self) -> None:
        """Writes `f_r` and what eviction goes by beside the store, so that after a restart the least used variants
        still go first."""
        hints = self._store.read_hints()
        earlier = _frequencies(hints)  # of another process on the same store; `f_r` only grows
        held = {meta.variant_id: max(meta.frequency_reuse, earlier.get(meta.variant_id, 0.0)) for meta in self}
        frequencies = {key: value for key, value in held.items() if value}
        eviction = self._placement.state(hints.get("eviction"), held)
        self._store.write_hints({"frequency_reuse": frequencies, "eviction": eviction})

    def _in_place_of_approximate(self, meta: VariantMeta) -> VariantMeta:
        if not self.replaces_approximate(meta):
            return meta
        twin = self._by_id[_twin_id(meta, "approx")]
        self._placement.inherit(twin.variant_id, meta.variant_id)
        self.discard(twin.variant_id)
        return dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + twin.frequency_reuse)

    def _take_in(self, record: ShardRecord, frequency_reuse: float) -> None:
        meta = _meta_from_record(record)
        if meta is None:
            logger.warning("variant %s: unreadable metadata, dropped from the store", record.variant_id)
            self._store.discard(record.variant_id)
            return
        origin = origin_of_record(record)
        if self.documents.is_erased(meta.chunk_id, origin):
            self._store.discard(record.variant_id)
            return
        meta = dataclasses.replace(meta, frequency_reuse=frequency_reuse)
        self._put(meta, has_system=record.meta.get("has_system") is True, origin=origin)
        self.tokens.learn(meta.chunk_id, _token_ids(record))

    def _put(self, meta: VariantMeta, *, has_system: bool = False, origin: Origin | None = None) -> None:
        if meta.variant_id not in self._by_id:
            self.tokens.hold(meta)
            if origin is not None:
                self._origins[meta.variant_id] = origin
            if has_system:
                self._with_system.add(meta.variant_id)
        self._by_id[meta.variant_id] = meta
        with self._siblings_lock:
            self._by_chunk.setdefault(meta.chunk_id, {})[meta.variant_id] = meta


_STORED_FIELDS = ("prefix_ids", "inter_by_prefix", "a_mean", "b_mean", "cci", "token_ranking", "fidelity")
"""Metadata that lasts; `frequency_reuse`, which changes with every use, is kept apart from the records."""


def _twin_id(meta: VariantMeta, fidelity: Fidelity) -> VariantId:
    return make_variant_id(meta.chunk_id, meta.prefix_ids, fidelity)


def _record_from_meta(meta: VariantMeta, prompt: Prompt) -> ShardRecord:
    """The record of a variant computed in `prompt`, with what it takes to compute it again."""
    lasting: dict[str, Any] = {name: getattr(meta, name) for name in _STORED_FIELDS}
    lasting["token_ids"] = next(chunk.token_ids for chunk in prompt.chunks if chunk.chunk_id == meta.chunk_id)
    lasting["has_system"] = prompt.has_system
    return ShardRecord(
        variant_id=meta.variant_id,
        chunk_id=meta.chunk_id,
        num_tokens=meta.num_tokens,
        num_bytes=meta.num_bytes,
        meta={name: list(value) if isinstance(value, tuple) else value for name, value in lasting.items()},
    )


def _meta_from_record(record: ShardRecord) -> VariantMeta | None:
    try:
        meta = record.meta
        prefix_ids = tuple(ChunkId(chunk) for chunk in meta["prefix_ids"])
        inter = tuple(float(value) for value in meta["inter_by_prefix"])
        ranking = tuple(int(offset) for offset in meta["token_ranking"])
        fidelity = meta["fidelity"]
        if len(inter) != len(prefix_ids) or sorted(ranking) != list(range(record.num_tokens)):
            return None
        if fidelity not in ("exact", "approx"):
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
            fidelity=fidelity,
        )
    except (KeyError, TypeError, ValueError):
        return None


def _with_origin(record: ShardRecord, origin: Origin) -> ShardRecord:
    """The record with what `origin_of_record` finds; for most variants nothing but their prefix."""
    beyond = {"seen": origin.seen - origin_of_record(record).seen, "after": origin.after}
    more = {name: sorted(values) for name, values in beyond.items() if values}
    return dataclasses.replace(record, meta={**record.meta, **more}) if more else record


def origin_of_record(record: ShardRecord) -> Origin:
    """What a record says of where its KV comes from."""
    chunks = [record.chunk_id, *_texts(record, "prefix_ids"), *_texts(record, "seen")]
    return Origin(frozenset(map(ChunkId, chunks)), frozenset(_texts(record, "after")))


def _texts(record: ShardRecord, name: str) -> list[str]:
    values = record.meta.get(name)
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _token_ids(record: ShardRecord) -> list[int]:
    """The chunk's token ids; none in records of older stores."""
    ids = record.meta.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in ids):
        return []
    return ids


def _frequencies(hints: Mapping[str, Any]) -> dict[str, float]:
    """The sound ones of the `f_r` that `save_hints` noted."""
    values = hints.get("frequency_reuse")
    items = values.items() if isinstance(values, dict) else ()
    return {key: float(value) for key, value in items if _is_frequency(value)}


def _is_frequency(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0.0
