"""The engine's index of chunk variants: what is stored, and how useful each has been.

Keeps metadata and token ids, no KV. Bytes are the store's, what goes when room is needed is for placement to say.
A variant's record is looked into when its chunk is first asked for: there may be hundreds of thousands.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ccjax.engine.chunk_tokens import ChunkTokens
from ccjax.engine.placement import Costs, Placement
from ccjax.engine.prompts import Prompt
from ccjax.engine.variant_records import (
    KnownVariant,
    has_system,
    is_frequency,
    meta_from_record,
    record_from_meta,
    token_ids,
)
from ccjax.policy.capture import make_variant_id
from ccjax.policy.reuse import cache_fix_overhead
from ccjax.policy.variants import choose_victims, reuse_credit
from ccjax.types import ChunkId, Fidelity, VariantId, VariantMeta
from store.bulk import uncollected
from store.spec import ShardRecord
from store.tickets import LoadTicket
from store.tiered import TieredStore

logger = logging.getLogger(__name__)


class VariantIndex:
    """Variants by chunk, rebuilt from the store's records at start; not thread-safe, the engine's lock guards it.

    Attributes:
      tokens: token ids of the chunks that the variants looked into are made of, as far as they are known.
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
        self._store = store
        self._alpha = alpha
        self._max_variants = max_variants
        self._placement = Placement(store, costs, policy=policy, on_gone=self._drop)
        self._by_id: dict[VariantId, VariantMeta | KnownVariant] = {}
        self._by_chunk: dict[ChunkId, dict[VariantId, VariantMeta | KnownVariant]] = {}
        self._with_system: set[VariantId] = set()
        self._maybe_approximate: dict[VariantId, None] = {}
        hints = store.read_hints()
        frequencies = _frequencies(hints)
        with uncollected():
            for summary in store.summaries():
                self._put_known(KnownVariant.of(summary, frequencies.get(summary.variant_id, 0.0)))
            self._placement.adopt(self._by_id.values(), hints.get("eviction"))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, variant_id: object) -> bool:
        return variant_id in self._by_id

    def __iter__(self) -> Iterator[VariantMeta]:
        """Every variant; reads the records of those that were never asked for, and does not keep what it read."""
        for held in tuple(self._by_id.values()):
            meta = held if isinstance(held, VariantMeta) else self._read(held)[0]
            if meta is not None:
                yield meta

    def of_chunks(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """Known variants of each chunk; chunks without any are left out. The first call with a chunk reads the records
        of its variants; one that cannot be read is dropped."""
        found = {}
        for chunk in chunk_ids:
            held = tuple(self._by_chunk.get(chunk, {}).values())
            metas = tuple(filter(None, map(self._look_into, held)))
            if metas:
                found[chunk] = metas
        return found

    def approximate(self, is_cancelled: Callable[[], bool] | None = None) -> list[VariantMeta]:
        """The approximate variants, with the token ids of their chunks as far as these are known. Work for idle time:
        reads the records of all variants once, until `is_cancelled` returns True."""
        while self._maybe_approximate and not (is_cancelled is not None and is_cancelled()):
            variant_id = next(iter(self._maybe_approximate))
            del self._maybe_approximate[variant_id]
            record = self._store.get_record(variant_id)
            if record is not None and record.meta.get("fidelity") != "exact":
                self._look_into(self._by_id[variant_id])
        metas = [meta for meta in self._by_id.values() if isinstance(meta, VariantMeta) and meta.fidelity == "approx"]
        self._learn_tokens({key for meta in metas for key in meta.prefix_ids})
        return metas

    def prompt_of(self, meta: VariantMeta) -> Prompt:
        """The prompt that computes a held variant anew: its prefix, its chunk, and one token in place of a question.

        Raises:
          KeyError: the token ids of one of these chunks are not known.
        """
        self._learn_tokens((*meta.prefix_ids, meta.chunk_id))
        chunks = tuple(self.tokens.chunk(key) for key in (*meta.prefix_ids, meta.chunk_id))
        return Prompt(chunks, meta.variant_id in self._with_system, chunks[-1].token_ids[-1:], max_new_tokens=1)

    def credit(self, cfo_by_variant: Sequence[tuple[VariantId, float]]) -> None:
        """The uses of one request: each is worth 1/CFO to `f_r` (CacheCraft sec. 3.3)."""
        self._placement.next_request()
        for variant_id, cfo in cfo_by_variant:
            meta = self._by_id.get(variant_id)
            if meta is not None:
                gain = reuse_credit(cfo, meta.num_tokens)
                self._update(dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + gain))
                self._placement.use(meta, cfo)

    def add(self, meta: VariantMeta, kv: np.ndarray, prompt: Prompt, *, pinned: Collection[VariantId]) -> bool:
        """Stores a variant computed in `prompt`, evicting what is worth less; False if no tier took it. An exact
        variant takes the place of the approximate one behind the same prefix, its `f_r` and its uses, or of a lossy
        copy of itself."""
        meta = self._in_place_of_approximate(meta)
        known = self._by_id.get(meta.variant_id)
        if known is not None:
            meta = dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + known.frequency_reuse)
        if self._max_variants is not None:
            excess = max(0, len(self._by_id) + (known is None) - self._max_variants)
            victims = choose_victims(self._by_id.values(), excess, pinned=pinned)
            if victims is None:
                return False
            self._placement.evict(victims)
        expected_cfo = cache_fix_overhead(meta.cci, 0.0, self._alpha)
        record = record_from_meta(meta, prompt)
        if not self._placement.store(record, kv, expected_cfo=expected_cfo, pinned=pinned):
            return False
        self._put(meta, has_system=prompt.has_system)
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
            self._maybe_approximate.pop(variant_id, None)
            if isinstance(meta, VariantMeta):
                self.tokens.release(meta)
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
        known = self._by_id.get(_twin_id(meta, "exact"))
        exact = None if known is None else self._look_into(known)
        if exact is None:
            return False
        self._put(self._in_place_of_approximate(exact))
        return True

    def follow(self, added: Collection[str], removed: Collection[str]) -> tuple[int, int]:
        """Takes in what the disk gained and lost by other processes; the numbers of variants that became known and
        unknown here by that."""
        before = set(self._by_id)
        for summary in filter(None, map(self._store.get_summary, added)):
            if summary.variant_id not in self._by_id:
                self._put_known(KnownVariant.of(summary, 0.0))
        self._placement.adopt([self._by_id[VariantId(key)] for key in added if key in self._by_id])
        for variant_id in removed:
            self._placement.follow(variant_id)
            if self._store.tier_of(variant_id) is None:
                self.forget(VariantId(variant_id))
        return len(self._by_id.keys() - before), len(before - self._by_id.keys())

    def save_hints(self) -> None:
        """Writes `f_r` and what eviction goes by beside the store, so that after a restart the least used variants
        still go first."""
        hints = self._store.read_hints()
        earlier = _frequencies(hints)  # of another process on the same store; `f_r` only grows
        known = self._by_id.values()
        held = {one.variant_id: max(one.frequency_reuse, earlier.get(one.variant_id, 0.0)) for one in known}
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

    def _read(self, known: KnownVariant) -> tuple[VariantMeta | None, ShardRecord | None]:
        """What the record says, and the record itself; None where either cannot be read."""
        record = self._store.get_record(known.variant_id)
        return (None if record is None else meta_from_record(record, known.frequency_reuse)), record

    def _look_into(self, held: VariantMeta | KnownVariant) -> VariantMeta | None:
        """The metadata of a held variant, read and kept if it was not; one that cannot be read is dropped: None."""
        if isinstance(held, VariantMeta):
            return held
        meta, record = self._read(held)
        if record is None:  # another process evicted it
            self.forget(held.variant_id)
        elif meta is None:
            logger.warning("variant %s: unreadable metadata, dropped from the store", held.variant_id)
            self.discard(held.variant_id)
        else:
            self._put(meta, has_system=has_system(record))
            self.tokens.learn(meta.chunk_id, token_ids(record))
        return meta

    def _learn_tokens(self, chunk_ids: Collection[ChunkId]) -> None:
        """Makes the ids of these chunks known, where a held variant's record has them."""
        self.of_chunks([key for key in chunk_ids if key not in self.tokens.known()])

    def _put(self, meta: VariantMeta, *, has_system: bool = False) -> None:
        if not isinstance(self._by_id.get(meta.variant_id), VariantMeta):
            self.tokens.hold(meta)
            if has_system:
                self._with_system.add(meta.variant_id)
        self._maybe_approximate.pop(meta.variant_id, None)
        self._update(meta)

    def _put_known(self, known: KnownVariant) -> None:
        self._maybe_approximate[known.variant_id] = None
        self._update(known)

    def _update(self, meta: VariantMeta | KnownVariant) -> None:
        self._by_id[meta.variant_id] = meta
        self._by_chunk.setdefault(meta.chunk_id, {})[meta.variant_id] = meta


def _twin_id(meta: VariantMeta, fidelity: Fidelity) -> VariantId:
    return make_variant_id(meta.chunk_id, meta.prefix_ids, fidelity)


def _frequencies(hints: Mapping[str, Any]) -> dict[str, float]:
    """The sound ones of the `f_r` that `save_hints` noted."""
    values = hints.get("frequency_reuse")
    items = values.items() if isinstance(values, dict) else ()
    return {key: float(value) for key, value in items if is_frequency(value)}
