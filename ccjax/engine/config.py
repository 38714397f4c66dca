"""Settings of an engine, fixed for its life. Knows no device and reads no environment."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ccjax.errors import ConfigError
from ccjax.models.llama3.quantized import WEIGHT_FORMATS
from ccjax.policy.eviction import DEFAULT_POLICY, POLICIES
from ccjax.policy.planner import PlannerSettings
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.store.encryption import StoreCipher
from ccjax.store.formats import COMPRESSIONS, KV_DTYPES
from ccjax.store.signing import StoreKeys
from ccjax.store.spec import StoreIdentity

_COUNTS = ("host_cache_bytes", "disk_cache_bytes", "max_variants", "cached_documents")
_BATCH = ("max_num_batched_tokens", "max_num_seqs", "max_queue", "reorder_window")
_NO_LIMIT = 1 << 30
DTYPES = ("float32", "bfloat16")

Loading = Literal["layerwise", "alg2", "sync"]
LOADINGS: tuple[Loading, ...] = ("layerwise", "alg2", "sync")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Everything that `Engine.from_pretrained` takes besides the model; each default suits a laptop.

    Attributes:
      dtype: of weights, activations and stored KV: "float32" (best on CPU) or "bfloat16" (accelerators).
      tensor_parallel_size: devices that the model is split over, the first so many (`ccjax.models.llama3.sharding`).
      quantization: of the weights of products, rounded as they load: "int8" or "fp8" with a scale per output channel,
        or None. Embedding, norms and `lm_head` stay in `dtype`, and so does KV.
      tokenizer: directory with other tokenizer files than the model's own; None takes those.
      attention: implementation of `ccjax.kernels.attention.attention` and of decode's, which beside tokamax is the
        platform's own; None takes the platform's own for both.
      store: URL of the lasting chunk store, such as "file:///var/cache/ccjax" or "s3://bucket/prefix"; None keeps
        chunk-caches in memory only.
      store_index: URL of what the processes on one `store` share besides, so that each knows at once what the others
        stored, erased and compute: "sqlite:///var/cache/ccjax-index.db" on one host, "redis://HOST:PORT/DB" on several
        (`store.index.open_index`). It may be lost, or away, at any time; without it the store is listed now and then.
      strategy: how chunks are reused: "auto" (as much is recomputed as by "cachecraft", where KV was seen to change
        with the context), "cachecraft", "cacheblend" (the tokens whose KV deviates most, 15 % or
        `recompute_ratio`), "reuse" (naive), "set" (the longest prefix in any order), "prefix" (exact prefixes only),
        "full" (never); or with as much recomputed as "cachecraft" would, "legolink" (the head of each chunk), "random"
        (drawn tokens), "h2o" (the most attended tokens), "deviation" ("auto" without its common budget).
      alpha: CacheCraft eq. 12, scales the share of tokens that is recomputed.
      recompute_ratio: forces that share, 0 to 1, in place of CacheCraft eq. 12.
      max_deviation: strategy "auto": recomputes the tokens whose KV was seen to deviate more, as many as these are,
        instead of that share; None leaves it to the share.
      calibration: file that `ccjax calibrate` wrote; None takes `calibration.json` beside the model, if it is there.
        What it showed is the least that reuse recomputes in mode "bounded".
      prefill_profile: file that scripts/profile_prefill.py wrote; None takes `prefill_profile.json` beside the model,
        if it is there. Eviction then goes by what prefills cost here, by what of their prompt is cached.
      ranking_layers: layers, from 0, whose attention ranks the tokens of a new variant (CacheCraft eq. 14); None: the
        mean over all, as in the paper. Which of them find the tokens that reuse changes differs between models.
      fixes_positions: of reused keys; False is for comparison only (CacheCraft table 3) and goes without a device tier.
      focus_window: CacheCraft alg. 1 `w`; None never drops unfocused chunks: on SmolLM2 answers were no better with the
        cut at w = 3, nor came sooner.
      focus_rule: gap rule of alg. 1, "entropy" (as printed) or "largest_gap".
      max_model_len: longest prompt plus answer in tokens; None takes the model's own limit, at most 8,192.
      device_cache_bytes: device memory for the KV of running requests and of chunk-caches, all of it taken at once, on
        all devices (counted once where these outnumber the kv heads); 0 takes what requests usually need and caches no
        chunk there. What is cached there is kept in host memory as well, as far as that has room.
      gpu_memory_utilization: share of each device's memory that the model may take; what weights and steps leave of it
        becomes `device_cache_bytes`, unless that is given (`ccjax.engine.memory`). vLLM's name; it holds for TPUs, too.
      device_memory_bytes: memory of each device; None asks the device, or, for a CPU, the machine.
      max_num_batched_tokens: tokens that prefills compute together; longer ones are cut into pieces.
      max_num_seqs: requests that run at once; others wait in line.
      max_queue: requests that wait for that, those that came this moment included; more are refused. None for no limit.
      reorder_window: where more wait than find a seat, the one of a flow goes first that has most cached tokens per
        computed one, before at most so many that came earlier (RAGCache sec. 5.2); 1 for the order of arrival.
      flow_share: a flow (`Request.flow`) may have up to so many times as many requests in line as places are left, so
        that some are left for others.
      max_decode_gap_ms: longest time between two tokens of an answer that another request's prefill may cause, as far
        as that is possible: no layer of a prefill is broken off. None: 200, or three decode steps where that is longer.
      max_retries: how often an answer is tried again whose step failed, or took the device's memory along; 0 for never.
        Tried again it shares no step with others, so that one that makes steps fail ends nobody else's answer.
      host_cache_bytes, disk_cache_bytes: budgets of the other tiers; None for disk means no limit.
      disk_kv_dtype: how `store` keeps KV: "auto" (as it is), or in 8 bits, "int8" or "fp8", which is read back as
        approximate and never serves mode `exact`.
      disk_compression: "none" or "zstd"; changes no bit, pays for a slow link only.
      preload_bytes: KV that may be read from disk for requests in line, beside `host_cache_bytes`; 0 reads none.
      loading: when the first layer of a prefill may run: "layerwise" once its own KV is there, "alg2" once that of
        CacheCraft alg. 2's first layers is, "sync" once all is.
      read_only: reuse what the store holds and add nothing to it.
      share_computation: agree with other processes on the same store who computes which chunk; a request then waits for
        what another one is computing, no longer than computing it here would take and a second.
      order_after_s: what a request that waits longer in line will have to compute is ordered from whoever has time, by
        `store_index`; None for never. Those who have it call `Engine.compute_ahead`.
      eviction_policy: which variants leave a full tier, a name of `ccjax.policy.eviction.POLICIES`.
      max_variants: CacheCraft sec. 3.3 `N x M`: chunk variants kept before the least reused is dropped; None for as
        many as the budgets have room for.
      cached_documents: only the first so many documents of a prompt are kept, for long lists whose ends seldom recur
        (RAGCache's top-k'); None for all.
      pin_share: of each tier's budget, and of `max_variants`, what pinned documents may keep for themselves.
      shadow_ratio: share of the answers over approximate reuse that `Engine.check_one` compares with a full prefill, in
        idle time.
      shadow_target: share of these that should be full prefill's; while fewer are, reuse recomputes more.
      store_key_file: file of the secret keys, one a line, that seal what is written to `store` (the first one) and that
        what is read must be sealed with (any of them); None writes no seals and wants none (`store.signing`).
      encrypt_store: encrypts what is written to `store` by keys made of those, in place of seals (`store.encryption`).
      tenant_salt: separates the chunk-caches of tenants that share a store.
      frame: what passages are prepared behind, ahead of questions, besides directly behind the instructions: "default"
        (two fixed passages), "none", or a text file in which blank lines separate passages (`ccjax.engine.frame`).
        Strategies "auto" and "deviation" alone ask for it.
      system_prompt: used where a request brings no system message; None takes the built-in one.
    """

    dtype: str = "float32"
    tensor_parallel_size: int = 1
    quantization: str | None = None
    tokenizer: str | None = None
    attention: str | None = None
    store: str | None = None
    store_index: str | None = dataclasses.field(default=None, repr=False)  # may have a password
    strategy: str = "auto"
    alpha: float = 1.0
    recompute_ratio: float | None = None
    max_deviation: float | None = None
    calibration: str | None = None
    prefill_profile: str | None = None
    ranking_layers: tuple[int, ...] | None = None
    fixes_positions: bool = True
    focus_window: int | None = None
    focus_rule: str = "entropy"
    max_model_len: int | None = None
    device_cache_bytes: int = 0
    gpu_memory_utilization: float | None = None
    device_memory_bytes: int | None = None
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 32
    max_queue: int | None = None
    reorder_window: int = 32
    flow_share: float = 4.0
    max_decode_gap_ms: float | None = None
    max_retries: int = 2
    host_cache_bytes: int = 2 << 30
    disk_cache_bytes: int | None = None
    disk_kv_dtype: str = "auto"
    disk_compression: str = "none"
    eviction_policy: str = DEFAULT_POLICY
    max_variants: int | None = None
    cached_documents: int | None = None
    preload_bytes: int = 256 << 20
    loading: Loading = "layerwise"
    pin_share: float = 0.5
    read_only: bool = False
    share_computation: bool = False
    order_after_s: float | None = None
    shadow_ratio: float = 0.0
    shadow_target: float = 0.9
    store_key_file: str | None = None
    encrypt_store: bool = False
    tenant_salt: str = ""
    frame: str = "default"
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: wanted one of {DTYPES}, got {self.dtype!r}")
        if self.quantization is not None and self.quantization not in WEIGHT_FORMATS:
            raise ConfigError(f"quantization: wanted one of {tuple(WEIGHT_FORMATS)} or None, got {self.quantization!r}")
        for name, known in (("disk_kv_dtype", KV_DTYPES), ("disk_compression", COMPRESSIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: wanted one of {known}, got {getattr(self, name)!r}")
        for name in ("max_model_len", "tensor_parallel_size", "device_memory_bytes", *_COUNTS, *_BATCH):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}: wanted a positive integer, got {value!r}")
        if self.tensor_parallel_size is None:
            raise ConfigError("tensor_parallel_size: wanted a positive integer, got None")
        layers = self.ranking_layers
        if layers is not None:
            is_sequence = isinstance(layers, tuple | list) and len(layers) > 0
            if not is_sequence or not all(map(_is_layer, layers)) or len(set(layers)) < len(layers):
                raise ConfigError(f"ranking_layers: wanted one or more different layers from 0, got {layers!r}")
        gap_ms = self.max_decode_gap_ms
        if gap_ms is not None and (not _is_number(gap_ms) or not 0.0 <= gap_ms < math.inf):
            raise ConfigError(f"max_decode_gap_ms: wanted a number of at least 0, got {self.max_decode_gap_ms!r}")
        for name in ("share_computation", "fixes_positions", "encrypt_store"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: wanted True or False, got {getattr(self, name)!r}")
        if self.device_cache_bytes and not self.fixes_positions:
            raise ConfigError(f"fixes_positions: wanted True with device_cache_bytes, got {self.fixes_positions!r}")
        if self.eviction_policy not in POLICIES:
            raise ConfigError(f"eviction_policy: wanted one of {sorted(POLICIES)}, got {self.eviction_policy!r}")
        for name in ("device_cache_bytes", "preload_bytes", "max_retries"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}: wanted an integer of at least 0, got {value!r}")
        share = self.gpu_memory_utilization
        if share is not None and (not _is_number(share) or not 0.0 < share <= 1.0):
            raise ConfigError(f"gpu_memory_utilization: wanted a share above 0, at most 1, got {share!r}")
        if not _is_number(self.flow_share) or not 0.0 < self.flow_share < math.inf:
            raise ConfigError(f"flow_share: wanted a number above 0, got {self.flow_share!r}")
        if self.loading not in LOADINGS:
            raise ConfigError(f"loading: wanted one of {LOADINGS}, got {self.loading!r}")
        for name in ("pin_share", "shadow_ratio", "shadow_target"):
            if not _is_number(getattr(self, name)) or not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}: wanted a share from 0 to 1, got {getattr(self, name)!r}")
        if not isinstance(self.frame, str) or not self.frame:
            raise ConfigError(f"frame: wanted 'default', 'none' or a text file, got {self.frame!r}")
        if self.store is not None and not isinstance(self.store, str):
            raise ConfigError(f"store: wanted a URL such as 'file:///path', got {self.store!r}")
        if self.store_index is not None and (not isinstance(self.store_index, str) or self.store is None):
            got = "none" if self.store is None else type(self.store_index).__name__
            wanted = "a store that it is the index of" if self.store is None else "a URL such as 'redis://HOST:PORT/DB'"
            raise ConfigError(f"store_index: wanted {wanted}, got {got}")
        if self.store_key_file is not None and self.store is None:
            raise ConfigError("store_key_file: wanted a store whose entries its keys seal, got none")
        if self.encrypt_store and self.store_key_file is None:
            raise ConfigError("encrypt_store: wanted a store_key_file, of whose keys it makes its own, got none")
        if self.order_after_s is not None:
            if not _is_number(self.order_after_s) or not 0.0 <= self.order_after_s < math.inf:
                raise ConfigError(f"order_after_s: wanted seconds of at least 0, got {self.order_after_s!r}")
            if self.store_index is None:
                raise ConfigError("order_after_s: wanted a store_index, by which orders are placed, got none")
        try:
            self.planner_settings()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def store_identity(self, model_fingerprint: str) -> StoreIdentity:
        """Whose variants an engine of these settings stores and reads; reads the key file.

        Raises:
          ConfigError: the key file cannot be read, or has no usable keys; a package that encrypts is missing; what is
            encrypted should be compressed.
        """
        if self.encrypt_store and self.disk_compression != "none":
            raise ConfigError(f"disk_compression: wanted 'none' with encrypt_store, got {self.disk_compression!r}")
        return identity_of(model_fingerprint, self.tenant_salt, self.store_key_file, self.encrypt_store)

    def planner_settings(self, num_layers: int = 1) -> PlannerSettings:
        """The part of the settings that policy decides by, for a model of so many layers."""
        return PlannerSettings(
            strategy=self.strategy,
            alpha=self.alpha,
            recompute_ratio=self.recompute_ratio,
            max_deviation=self.max_deviation,
            focus_window=self.focus_window,
            focus_rule=self.focus_rule,
            num_layers=num_layers,
            fixes_positions=self.fixes_positions,
        )

    def scheduler_settings(self, num_pages: int, page_tokens: int, context_tokens: int) -> SchedulerSettings:
        """The part of the settings that requests are scheduled by, over a pool of so many pages and packs of so long
        contexts."""
        return SchedulerSettings(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_context_tokens=context_tokens,
            max_num_seqs=self.max_num_seqs,
            max_decode_gap_s=None if self.max_decode_gap_ms is None else self.max_decode_gap_ms / 1e3,
            max_queue=_NO_LIMIT if self.max_queue is None else self.max_queue,
            flow_share=self.flow_share,
            reorder_window=self.reorder_window,
        )


def identity_of(
    model_fingerprint: str, tenant_salt: str, store_key_file: str | None, encrypt_store: bool = False
) -> StoreIdentity:
    """As `EngineConfig.store_identity`, for programs that have no engine."""
    try:
        keys = None if store_key_file is None else StoreKeys.of_file(store_key_file)
        cipher = StoreCipher(keys) if encrypt_store and keys is not None else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return StoreIdentity(model_fingerprint, tenant_salt, keys, cipher)


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
