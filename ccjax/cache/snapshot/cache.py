"""The source and target of snapshots: a store and its index, of a running engine or opened without a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.cache.variants import VariantIndex
from ccjax.policy.eviction import DEFAULT_POLICY, POLICIES
from ccjax.store.spec import KVSpec, StoreIdentity
from ccjax.store.tiered import TieredStore


@dataclasses.dataclass(frozen=True)
class IndexedStore:
    """A store, its index, and the identity that owns them.

    Attributes:
      model: the model's name, for display; `identity` decides.
      max_variants: limit of variants in the index after a restore; None for no limit.
      exclusive: `with exclusive():` no other thread uses `variants`, which is not thread-safe.
    """

    store: TieredStore
    variants: VariantIndex
    identity: StoreIdentity
    model: str
    max_variants: int | None = None
    exclusive: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@contextlib.contextmanager
def open_cache(
    url: str, *, kv_spec: KVSpec, identity: StoreIdentity, model: str, disk_bytes: int | None = None
) -> Iterator[IndexedStore]:
    """The cache at a store URL, for use without a model and without host memory for KV. When the block ends, restored
    variants and their `f_r` are on disk.

    Raises:
      ValueError, StoreUnavailableError, StoreIdentityError: as `TieredStore.open`.
    """
    with TieredStore.open(url, kv_spec=kv_spec, identity=identity, host_bytes=0, disk_bytes=disk_bytes) as store:
        policy = _policy_of(store.read_hints().get("eviction"))
        variants = VariantIndex(store, MeasuredCosts(Rates()), policy=policy, max_variants=None)
        before = len(variants)
        yield IndexedStore(store, variants, identity, model)
        store.flush()
        if len(variants) != before:
            variants.save_hints()


def _policy_of(eviction: Any) -> str:
    """The policy of the server that saved this state, so that saving again keeps the state."""
    name = eviction.get("policy") if isinstance(eviction, dict) else None
    return name if isinstance(name, str) and name in POLICIES else DEFAULT_POLICY
