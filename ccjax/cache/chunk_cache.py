"""The chunk-cache of an engine: what is stored of chunks, and what prompts reuse and add."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.device_preload import DevicePreloader
from ccjax.cache.documents.document_cache import DocumentCache
from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.documents.pins import DocumentPins
from ccjax.cache.prefill_capture import PrefillCapture
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.queue_preload import Preloader
from ccjax.cache.rates import Rates
from ccjax.cache.run_capture import RunCapture
from ccjax.cache.shared.index_updater import VariantIndexUpdater
from ccjax.cache.variants import VariantIndex
from ccjax.config import EngineConfig
from ccjax.loading.model import LoadedModel
from ccjax.loading.prefill_profile import KeptProfile, profile_of
from ccjax.policy.eviction import make_policy
from ccjax.runner.budgets import host_cache_bytes
from ccjax.runner.device import Device
from ccjax.store.spec import StoreIdentity
from ccjax.store.throttle import ThrottledLink
from ccjax.store.tiered import TieredStore

_LEAST_PRELOAD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class ChunkCache:
    """The parts of a chunk-cache; except for `preloader` guarded by the batch loop.

    Attributes:
      identity: the model and tenant whose KV it is.
      rates, costs: measured rates of loading and computing, and what a variant saves by them.
      planner, capture: what a prefill reuses, and what is kept of it.
      runs: what is kept of whole prompts and answers; None where chunks are kept as prompts had them.
      preloader: reads what queued requests will need.
      device_preloader: copies it to the device; None without a device tier, or without preloading.
      documents, pins: documents as units.
      frame: the passages that others are prepared behind.
      updater: applies what other processes change in the store.
    """

    identity: StoreIdentity
    rates: Rates
    costs: MeasuredCosts
    store: TieredStore
    variants: VariantIndex
    planner: PrefillPlanner
    capture: PrefillCapture
    runs: RunCapture | None
    preloader: Preloader
    device_preloader: DevicePreloader | None
    documents: DocumentCache
    pins: DocumentPins
    frame: PassageFrame
    updater: VariantIndexUpdater

    @classmethod
    def open(
        cls,
        loaded: LoadedModel,
        device: Device,
        config: EngineConfig,
        frame: PassageFrame,
        expected_share: Callable[[float], float],
        *,
        disk_link: ThrottledLink | None = None,
        device_link: ThrottledLink | None = None,
    ) -> ChunkCache:
        """Opens the store, its index of variants, and what works on them.

        Args:
          expected_share: as for `VariantIndex`.
          disk_link, device_link: throttle reads from the disk tier, and copies of stored KV to the device.

        Raises:
          StoreIdentityError, StoreUnavailableError: the store has another format version, or cannot be opened.
        """
        rates = Rates()
        profile = profile_of(loaded.fingerprint, loaded.directory, config.prefill_profile)
        grid = None if profile is None else profile.grid
        if grid is None and make_policy(config.eviction_policy).needs_profile:
            grid = KeptProfile(loaded.fingerprint, config.tensor_parallel_size).read()
        costs = MeasuredCosts(rates, grid)
        identity = StoreIdentity(loaded.fingerprint, config.tenant_salt)
        store = TieredStore.open(
            config.store,
            kv_spec=device.pool.kv_spec,
            identity=identity,
            host_bytes=host_cache_bytes(config),
            disk_bytes=config.disk_cache_bytes,
            device=device.pool if device.has_tier else None,
            kv_dtype=config.disk_kv_dtype,
            on_read=rates.on_disk_read(disk_link),
            index=config.store_index,
            read_only=config.read_only,
            is_optional=config.store_optional,
        )
        variants = VariantIndex(
            store,
            costs,
            policy=config.eviction_policy,
            max_variants=config.max_variants,
            expected_share=expected_share,
        )
        planner = PrefillPlanner(device.model, store, variants, rates, config, frame, device.pool, device_link)
        capture = PrefillCapture(device.model, store, variants, planner, config)
        runs = None
        if frame.documents and config.stores_chunks:
            runs = RunCapture(variants)
        preload_bytes = config.preload_bytes
        if preload_bytes is None:
            preload_bytes = max(host_cache_bytes(config) // 8, _LEAST_PRELOAD_BYTES)
        preloader = Preloader(store, budget_bytes=preload_bytes, must_wait=lambda: planner.is_reading)
        to_device = None
        if device.has_tier and preload_bytes:
            waiting = {"link": device_link, "must_wait": lambda: planner.is_loading}
            to_device = DevicePreloader(store, variants, device.pool, **waiting)
        documents = DocumentCache(capture.unprepared, variants, store)
        pins = DocumentPins(variants, store, max_variants=config.max_variants, share=config.pin_share)
        variants.spare(pins)
        if not config.read_only:
            documents.tend_erasures()
        updater = VariantIndexUpdater(store.change_feed, variants)
        return cls(
            identity,
            rates,
            costs,
            store,
            variants,
            planner,
            capture,
            runs,
            preloader,
            to_device,
            documents,
            pins,
            frame,
            updater,
        )
