"""Settings of an engine, fixed for its lifetime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ccjax.config.base import KEYWORD_ONLY, Described, SettingsModel
from ccjax.config.values import FilePath, FolderPath, Layers, NumBytes, OrNone, Share
from ccjax.policy.eviction import DEFAULT_POLICY, POLICIES
from ccjax.policy.focus import FOCUS_RULES
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import STRATEGIES, get_strategy

if TYPE_CHECKING:  # type checkers do not know registered names
    EvictionPolicy = FocusRule = Strategy = str
else:
    EvictionPolicy = Literal[tuple(sorted(POLICIES))]
    FocusRule = Literal[tuple(FOCUS_RULES)]
    Strategy = Literal[tuple(STRATEGIES)]

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
Quantization = Literal["int8", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
Loading = Literal["layerwise", "alg2", "sync"]
Unprepared = Literal["prepare", "compute"]

_UNLIMITED = 1 << 30
_PLANNER, _SCHEDULER = PlannerSettings(), SchedulerSettings(num_pages=1)  # for their defaults
_STRATEGY_HELP = (
    "How chunks are reused: "
    + "; ".join(f"{strategy.summary} ({strategy.name!r})" for strategy in STRATEGIES.values())
    + "."
)
_INDEX_URL = Described("a URL such as 'redis://HOST:PORT/DB'", "URL")


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("wanted 'default', 'none' or a text file")
    return text


class ModelSettings(SettingsModel):
    """The model and the devices it is split over."""

    model_config = ConfigDict(title="model")

    dtype: Dtype = "float32"
    """Type of weights, activations and stored KV."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of devices to split the model over."""
    quantization: Quantization | None = None
    """Store the weights of matrix products in 8 bits with a scale per output channel, quantised while loading; KV stays
    in `dtype`."""
    tokenizer: FolderPath | None = None
    """Directory with tokenizer files to use instead of the model's own."""
    attention: str | None = None
    """Implementation of attention, for prefill and decode; without it the platform's default."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus answer in tokens; without it the model's own limit, at most 8,192."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of each device's memory, TPUs included, that the model may take; what weights and steps leave of it becomes
    `device_cache_bytes`, unless that is given. Without it 0.9; a CPU's memory is only divided where this is given."""
    device_memory_bytes: NumBytes | None = Field(default=None, ge=1)
    """Memory of each device, such as 80GB; without it as reported by the device or, for a CPU, the machine."""
    system_prompt: str | None = None
    """System message of requests without one; without it a built-in one beside documents."""


class ReuseSettings(SettingsModel):
    """How stored KV is reused in a prompt."""

    model_config = ConfigDict(title="reuse")

    strategy: Strategy = Field(default=_PLANNER.strategy, description=_STRATEGY_HELP)
    recompute_ratio: Annotated[float | None, KEYWORD_ONLY] = Field(default=None, ge=0, le=1)
    """Share of tokens to recompute, instead of CacheCraft eq. 12."""
    max_deviation: Annotated[float | None, KEYWORD_ONLY] = Field(default=None, ge=0)
    """Recompute the tokens whose measured deviation of KV is larger than this, as many as there are, instead of a share
    (strategy "auto")."""
    focus_window: Annotated[int | None, OrNone, KEYWORD_ONLY] = Field(default=_PLANNER.focus_window, ge=1)
    """CacheCraft alg. 1: layers after which unfocused passages are dropped; none never drops them."""
    frame: Annotated[str, AfterValidator(_not_empty), Described("'default', 'none' or a text file")] = "default"
    """Text behind which the default strategy prepares passages, after the instructions: "default" (two
    fixed passages), "none", or a text file in which blank lines separate passages."""
    unprepared: Unprepared = "prepare"
    """What a request does with passages that are not prepared yet: "prepare" them behind the frame first, side by side,
    or "compute" them in its own context and leave preparing them to idle time."""


class CacheSettings(SettingsModel):
    """Where chunk-caches are stored, how long they last, and who shares them."""

    model_config = ConfigDict(title="cache")

    device_cache_bytes: NumBytes | None = Field(default=None, ge=0)
    """Device memory for the KV of running requests and of chunk-caches, allocated at start, over all devices; 0
    allocates what requests usually need and caches no chunks there. Without it what `gpu_memory_utilization` leaves,
    and 0 on a CPU."""
    host_cache_bytes: NumBytes | None = Field(default=None, ge=1)
    """Host memory for chunk-caches, such as 2GiB; without it a quarter of the machine's."""
    disk_cache_bytes: NumBytes | None = Field(default=None, ge=1)
    """Limit on the size of the store; without it no limit."""
    preload_bytes: Annotated[NumBytes | None, KEYWORD_ONLY] = Field(default=None, ge=0)
    """Additional host memory for KV that queued requests will need from the store; 0 disables preloading, to free pages
    of the device, too; without it an eighth of `host_cache_bytes`, at least 256 MiB."""
    store: Annotated[str, Described("a URL such as 'file:///path'", "URL")] | None = None
    """URL of the persistent chunk store: file:///var/cache/ccjax, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX, with
    ?endpoint=http://HOST:PORT&region=NAME for servers other than AWS; credentials are found as the clouds' own tools
    find them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Without it chunk-caches are in memory only."""
    store_optional: Annotated[bool, KEYWORD_ONLY] = True
    """Start also while the bucket of the store does not answer: with a warning, without its chunk-caches, and with
    another try at every refresh."""
    store_index: Annotated[str, _INDEX_URL] | None = Field(default=None, repr=False)
    """URL of an index shared by the processes on the store, so that each learns at once what others store, erase and
    compute: sqlite:///PATH.db on one host, redis://[[USER]:PASSWORD@]HOST:PORT/DB or rediss:// on several. Without it
    they list the store periodically."""
    disk_kv_dtype: Literal["auto", "int8"] = "auto"
    """Format of KV in the store: unchanged, or in 8 bits, which is read back as approximate and never used in mode
    exact."""
    tenant_salt: str = Field(default="", repr=False)
    """Separates the chunk-caches of tenants that share a store."""
    read_only: bool = False
    """Reuse what is in the store and add nothing to it."""
    share_computation: Annotated[bool | None, KEYWORD_ONLY] = None
    """Wait for chunks that another process on the same store is computing, at most as long as computing them here would
    take plus a second, instead of computing them too; without it where there is a `store_index`."""
    order_after_s: Annotated[float | None, KEYWORD_ONLY] = Field(default=None, ge=0)
    """Offer the work of requests that stay queued to idle processes, through `store_index`."""
    eviction_policy: Annotated[EvictionPolicy, KEYWORD_ONLY] = DEFAULT_POLICY
    """Which chunk variants a full tier evicts first."""
    pin_share: Annotated[Share, KEYWORD_ONLY] = 0.5
    """Largest share of each tier's budget, and of `max_variants`, for pinned documents."""
    prefill_profile: Annotated[FilePath | None, KEYWORD_ONLY] = None
    """File written by scripts/profile_prefill.py, with times for eviction; without it `prefill_profile.json` beside the
    model, if it exists."""


class BatchSettings(SettingsModel):
    """How many requests run at once, and in which order."""

    model_config = ConfigDict(title="batch")

    max_num_seqs: int = Field(default=_SCHEDULER.max_num_seqs, ge=1)
    """Most requests that run at once; others are queued."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens computed together in prefills, fewer where that takes more than half a second; longer prompts are
    split into pieces. Without it 1,024 on a CPU, 8,192 on devices with memory of their own, less if it is short."""
    max_queue: int | None = Field(default=None, ge=1)
    """Most queued requests; more are refused."""
    reorder_window: Annotated[int, KEYWORD_ONLY] = Field(default=_SCHEDULER.reorder_window, ge=1)
    """Among this many queued requests of a user, the one with the most cached tokens per computed one goes first
    (RAGCache sec. 5.2); 1 for the order of arrival."""
    flow_share: Annotated[float, KEYWORD_ONLY] = Field(default=_SCHEDULER.flow_share, gt=0)
    """A user may queue up to this many times the number of free queue slots."""
    max_decode_gap_ms: Annotated[float | None, KEYWORD_ONLY] = Field(default=None, ge=0)
    """Longest delay between two tokens of an answer that another request's prefill may cause, at least one layer of it;
    without it 200, or three decode steps where that is longer."""
    max_retries: Annotated[int, KEYWORD_ONLY] = Field(default=2, ge=0)
    """How often a request whose step failed on the device is retried, in steps of its own."""

    def scheduler_settings(
        self, num_pages: int, page_tokens: int, *, batched_tokens: int, context_tokens: int
    ) -> SchedulerSettings:
        """The settings for the scheduler, over a pool of this many pages and packs of at most this many computed tokens
        and this much context."""
        return SchedulerSettings(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_num_batched_tokens=batched_tokens,
            max_num_context_tokens=context_tokens,
            max_num_seqs=self.max_num_seqs,
            max_decode_gap_s=None if self.max_decode_gap_ms is None else self.max_decode_gap_ms / 1e3,
            max_queue=_UNLIMITED if self.max_queue is None else self.max_queue,
            flow_share=self.flow_share,
            reorder_window=self.reorder_window,
        )


class QualitySettings(SettingsModel):
    """Keeps answers over reused KV close to those of a full prefill."""

    model_config = ConfigDict(title="quality")

    calibration: FilePath | None = None
    """File written by `ccjax calibrate`: how much mode bounded recomputes at least; without it `calibration.json`
    beside the model, if it exists."""
    shadow_ratio: Share = 0.0
    """Share of the answers with approximate reuse to compare with a full prefill in idle time."""
    shadow_target: Annotated[Share, KEYWORD_ONLY] = 0.9
    """Share of these that should be identical; while fewer are, more is recomputed."""


class PaperSettings(SettingsModel):
    """Parameters of the papers' experiments, which deployments need not change."""

    alpha: Annotated[float, KEYWORD_ONLY] = Field(default=_PLANNER.alpha, ge=0)
    """CacheCraft eq. 12: factor on the share of tokens to recompute."""
    ranking_layers: Annotated[Layers | None, KEYWORD_ONLY] = None
    """CacheCraft eq. 14: layers, such as 0,1, whose attention ranks a chunk's tokens; without it the mean of all."""
    focus_rule: Annotated[FocusRule, KEYWORD_ONLY] = _PLANNER.focus_rule
    """CacheCraft alg. 1: the gap rule, "entropy" as printed."""
    max_variants: Annotated[int | None, KEYWORD_ONLY] = Field(default=None, ge=1)
    """CacheCraft sec. 3.3: most chunk variants to keep, regardless of space; without it no limit."""
    cached_documents: Annotated[int | None, KEYWORD_ONLY] = Field(default=None, ge=1)
    """RAGCache's top-k': number of leading passages of a prompt to cache; without it all."""
    loading: Annotated[Loading, KEYWORD_ONLY] = "layerwise"
    """When the first layer of a prefill may run: once its own KV is loaded, once that of CacheCraft alg. 2's first
    layers is ("alg2"), or once all is ("sync")."""
    fixes_positions: Annotated[bool, KEYWORD_ONLY] = _PLANNER.fixes_positions
    """Rotate reused keys to their positions in the new prompt; off for comparison only (CacheCraft table 3)."""


class EngineConfig(PaperSettings, QualitySettings, BatchSettings, CacheSettings, ReuseSettings, ModelSettings):
    """All settings of `Engine.from_pretrained` besides the model; the defaults suit a laptop."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.device_cache_bytes and not self.fixes_positions:
            raise ValueError(f"fixes_positions: wanted True with device_cache_bytes, got {self.fixes_positions!r}")
        if self.store_index is not None and self.store is None:
            raise ValueError("store_index: wanted a store that it is the index of, got none")
        if self.order_after_s is not None and not self.has_index:
            raise ValueError("order_after_s: wanted a store_index, by which orders are placed, got none")
        return self

    @property
    def has_index(self) -> bool:
        """True if other processes on the store can receive orders."""
        return self.store_index is not None

    @property
    def stores_chunks(self) -> bool:
        """True if new chunk-caches are stored: the engine may write, and its strategy reuses something."""
        return not self.read_only and bool(get_strategy(self.strategy).needs)

    @property
    def shares_computation(self) -> bool:
        """True if chunks that another process is computing are waited for."""
        return self.has_index if self.share_computation is None else self.share_computation

    def planner_settings(self, num_layers: int = 1) -> PlannerSettings:
        """The settings for policy, for a model with this many layers."""
        return PlannerSettings(
            strategy=self.strategy,
            alpha=self.alpha,
            recompute_ratio=self.recompute_ratio,
            max_deviation=self.max_deviation,
            run_tokens=16 if self.device_cache_bytes else 1,  # of a page, where pages are kept
            focus_window=self.focus_window,
            focus_rule=self.focus_rule,
            num_layers=num_layers,
            fixes_positions=self.fixes_positions,
        )
