"""Inputs of the strategies besides the stored variants: the chunks of a prompt, and settings."""

from __future__ import annotations

import dataclasses

from ccjax.policy._checks import check_count, check_mass, check_ratio
from ccjax.policy.focus import check_focus_rule
from ccjax.types import ChunkId, ChunkSlice, SegmentRole


@dataclasses.dataclass(frozen=True, slots=True)
class PromptChunk:
    """One segment of a prompt, as the policy sees it. `source`: as in `Segment`."""

    chunk_id: ChunkId
    num_tokens: int
    role: SegmentRole = "passage"
    source: ChunkSlice | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Settings for planning, checked on construction (ValueError naming the field).

    Attributes:
      strategy: a name of `ccjax.policy.strategies`, checked by the planner.
      alpha: CacheCraft eq. 12, scales how much is recomputed; at least 0.
      recompute_ratio: in mode `bounded`, the share of every approximately reused chunk to recompute, instead of CFO.
      max_deviation: strategy `auto`, in mode `bounded` without `recompute_ratio`: the largest deviation of KV that is
        not recomputed (`VariantMeta.token_deviations`), so that each prompt gets as many tokens recomputed as it needs.
      recompute_cap: strategy `auto`, without `recompute_ratio`: the largest share of a prompt's approximately reused
        tokens to recompute.
      run_tokens: strategy `auto`: chunks with known deviations are recomputed in runs of so many tokens, counted from
        where its reused part begins; with runs of a page the other pages can be read in place.
      fast_ratio: in mode `fast`, the largest share of an approximately reused chunk to recompute.
      focus_window: CacheCraft alg. 1 w, in layers; None disables the focus cut.
      focus_rule: which gap rule alg. 1 uses (`ccjax.policy.focus`).
      num_layers: layers of the model.
      fixes_positions: rotate reused keys to their positions in the new prompt. False leaves them where they were
        computed, only to measure what that costs (CacheCraft table 3).
    """

    strategy: str = "auto"
    alpha: float = 1.0
    recompute_ratio: float | None = None
    max_deviation: float | None = None
    recompute_cap: float = 0.15
    run_tokens: int = 1
    fast_ratio: float = 0.05
    focus_window: int | None = None
    focus_rule: str = "entropy"
    num_layers: int = 32
    fixes_positions: bool = True

    def __post_init__(self) -> None:
        check_mass("alpha", self.alpha)
        if self.recompute_ratio is not None:
            check_ratio("recompute_ratio", self.recompute_ratio)
        if self.max_deviation is not None:
            check_mass("max_deviation", self.max_deviation)
        check_ratio("recompute_cap", self.recompute_cap)
        check_count("run_tokens", self.run_tokens)
        check_ratio("fast_ratio", self.fast_ratio)
        if self.focus_window is not None:
            check_count("focus_window", self.focus_window)
        check_focus_rule("focus_rule", self.focus_rule)
        check_count("num_layers", self.num_layers)
