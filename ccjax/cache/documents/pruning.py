"""Removes from the cache passages that are in no collection of documents any more."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

from ccjax.cache.document_registry import DocumentRegistry
from ccjax.cache.variants import VariantIndex
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DISK
from ccjax.types import ChunkId


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed: passages, the variants of them or computed behind them, and the variants' bytes on disk."""

    passages: int
    variants: int
    num_bytes: int


def prune(variants: VariantIndex, registry: DocumentRegistry, store: TieredStore, keep: Collection[ChunkId]) -> Pruned:
    """Removes from every tier all variants of passages that are not in `keep`, and all whose KV depends on one.

    Passages are chunks that a retriever cut from a document; documents sent with requests stay, and so do pinned ones.
    Reads the record of every variant, some 50 us each.

    Raises:
      OSError: the disk cannot be listed, or a note cannot be deleted.
    """
    links = collections.defaultdict(list)
    for name, link in registry.links():
        links[link.chunk_id].append((name, link))
    stays = registry.pinned_chunks().keys() | set(keep)
    gone = {
        chunk_id: [name for name, _ in found]
        for chunk_id, found in links.items()
        if chunk_id not in stays and all(link.passage_id is not None for _, link in found)
    }
    variants.load_all_records()
    covered = [
        variant_id for variant_id in variants.ids() if not variants.origin_of(variant_id).seen.isdisjoint(gone.keys())
    ]
    num_bytes = sum(store.charge_bytes(DISK, variant_id) or 0 for variant_id in covered)
    for variant_id in covered:
        variants.discard(variant_id)
    for names in gone.values():
        registry.forget_links(names)
    if covered:
        store.renew_catalog()
    return Pruned(len(gone), len(covered), num_bytes)
