"""Traces a request on demand: how each of its tokens was obtained, and where its time went."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ccjax.cache.planned_prefill import Prefilled
from ccjax.cache.prefill_planner import FindVariants
from ccjax.engine.report import reuse_by_segment
from ccjax.prompts import Prompt
from ccjax.requests import RequestTrace, SegmentTrace, Span
from ccjax.types import PlannedSegment, PrefillPlan, VariantId


class Tracer:
    """Records the trace of one request. `load` may be called from any thread, the rest from the loop's thread only."""

    def __init__(self, num_layers: int, variants: FindVariants, full_prefill_s: Callable[[int], float | None]) -> None:
        """
        Args:
          variants: returns the variants of chunks, without waiting for the engine.
          full_prefill_s: estimates the seconds of a full prefill of this many tokens.
        """
        self._num_layers = num_layers
        self._variants = variants
        self._estimate = full_prefill_s
        self._spans: list[Span] = []
        self._token_s: list[float] = []
        self._segments: tuple[SegmentTrace, ...] = ()
        self._full_prefill_s: float | None = None
        self._has_new_sizes = False

    def load(self, layer: int, start_s: float, end_s: float) -> None:
        """Records that the KV of a layer was read and merged."""
        self._spans.append(Span("load", layer, start_s, end_s))

    def layers(self, end_s: Sequence[float], *, has_new_sizes: bool) -> None:
        """Records the layers of a pack, those of a first pass of questions before the others: the first ran from
        `end_s[0]` to `end_s[1]`, and so on. Ignored after the first token, when layers run for other answers."""
        if self._token_s:
            return
        pairs = zip(end_s, end_s[1:], strict=False)
        self._spans += [Span("layer", count % self._num_layers, *span) for count, span in enumerate(pairs)]
        self._has_new_sizes |= has_new_sizes

    def prefilled(self, prefilled: Prefilled) -> None:
        """Records the finished prefill."""
        metas = self._variants(prefilled.prompt.stored_ids)
        ccis = {meta.variant_id: meta.cci for known in metas.values() for meta in known}
        self._segments = tuple(_segments(prefilled, ccis, self._num_layers))
        self._full_prefill_s = self._estimate(prefilled.plan.num_tokens)

    def token(self, now_s: float) -> None:
        """Records the time of a token of an answer."""
        self._token_s.append(now_s)

    def finish(self, arrived_s: float, started_s: float) -> RequestTrace:
        """Returns the trace."""
        return RequestTrace(
            self._segments,
            self._num_layers,
            arrived_s,
            started_s,
            tuple(self._token_s),
            tuple(self._spans),
            self._full_prefill_s,
            self._has_new_sizes,
        )


def _segments(prefilled: Prefilled, ccis: Mapping[VariantId, float], num_layers: int) -> list[SegmentTrace]:
    """What was planned, in prompt order; stored runs are cut where the segments of the prompt begin."""
    return [part for trace in _planned(prefilled, ccis, num_layers) for part in _cut(trace, prefilled.asked)]


def _cut(trace: SegmentTrace, asked: Prompt) -> Iterator[SegmentTrace]:
    """The parts of what is reused unchanged in which different segments of the prompt stand."""
    if trace.reused_tokens < len(trace.token_ids):
        yield trace
        return
    start = 0
    for segment in asked.segments:
        first, start = start, start + len(segment.chunk.token_ids)
        first, end = max(first - trace.start, 0), min(start - trace.start, len(trace.token_ids))
        if first < end:
            yield dataclasses.replace(
                trace,
                role=segment.role,
                start=trace.start + first,
                token_ids=trace.token_ids[first:end],
                reused_tokens=end - first,
                document_id=segment.chunk.document_id,
                title=segment.chunk.title,
            )


def _planned(prefilled: Prefilled, ccis: Mapping[VariantId, float], num_layers: int) -> list[SegmentTrace]:
    plan, prompt, result = prefilled.plan, prefilled.prompt, prefilled.result
    traces = []
    parts = zip(plan.segments, prompt.chunks, reuse_by_segment(prefilled), strict=False)
    for index, (segment, chunk, told) in enumerate(parts):
        offsets = _recomputed(segment, result.not_recomputed)
        runs = num_layers
        if index in result.partly_recomputed:
            runs = _least_layers(plan) if result.focus_cut_layer is None else result.focus_cut_layer
        traces.append(
            SegmentTrace(
                role=segment.role,
                action=segment.action,
                start=segment.start,
                token_ids=chunk.token_ids,
                reused_tokens=told.reused_tokens,
                recomputed_tokens=told.recomputed_tokens,
                computed_tokens=told.computed_tokens,
                recomputed_offsets=offsets,
                recomputed_layers=runs if offsets else 0,
                tier=told.tier,
                cfo=told.cfo,
                cci=None if segment.variant_id is None else ccis.get(segment.variant_id),
                exact=told.exact,
                focused=told.focused,
                document_id=told.document_id,
                title=told.title,
                cause=told.cause,
            )
        )
    last = plan.segments[-1]
    if last.chunk_id is None:
        traces.append(
            SegmentTrace(
                role=last.role,
                action="compute",
                start=last.start,
                token_ids=prompt.question,
                reused_tokens=0,
                recomputed_tokens=0,
                computed_tokens=last.num_tokens,
                exact=last.fidelity == "exact",
                cause="question",
            )
        )
    return traces


def _least_layers(plan: PrefillPlan) -> int:
    """Layers that each token runs through that was kept by the first choice by deviation (CacheBlend sec. 4.3); later
    choices drop some of these tokens."""
    counts = plan.hkvd_counts_by_layer
    drops = (layer for layer in range(1, len(counts)) if counts[layer] < counts[layer - 1])
    return next(drops, len(counts) - 1) + 1


def _recomputed(segment: PlannedSegment, not_recomputed: Sequence[np.ndarray]) -> tuple[int, ...]:
    """In-chunk offsets of the recomputed tokens. `not_recomputed`: prompt offsets of the tokens that deviation did not
    choose."""
    if not not_recomputed:
        return segment.recompute_offsets
    left = {int(offset) - segment.start for offsets in not_recomputed for offset in offsets}
    return tuple(offset for offset in segment.recompute_offsets if offset not in left)
