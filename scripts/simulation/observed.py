"""How fast this machine was while an engine answered: fitted to the traces of its answers. Knows no queue, no cache and
no cost model but a measured grid."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from ccjax.engine.requests import Response
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.simulation.replica import HostWork


@dataclasses.dataclass(frozen=True)
class Prefill:
    """One request on the engine's clock, seconds.

    Attributes:
      cached, new: tokens of its prompt that were taken over, and that ran.
      arrived_s: when it came.
      packs_s: when the packs began that it ran in, one or several.
      layers_s, ended_s: when its last layer was through, and its first token was there.
      ttft_s: to its first token, as the client saw it.
    """

    cached: int
    new: int
    arrived_s: float
    packs_s: tuple[float, ...]
    layers_s: float
    ended_s: float
    ttft_s: float

    @classmethod
    def of(cls, response: Response, ttft_s: float) -> Prefill:
        """Of an answer with a trace."""
        report, trace = response.reuse, response.trace
        assert trace is not None
        layers = [span for span in trace.spans if span.kind == "layer"]
        new = report.computed_tokens + report.recomputed_tokens
        return cls(
            report.prompt_tokens - new,
            new,
            trace.arrived_s,
            tuple(span.start_s for span in layers if span.layer == 0),
            layers[-1].end_s,
            trace.token_s[0],
            ttft_s,
        )


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a machine did.

    Attributes:
      scale: times by which prefills took longer than profiled ones of the same sizes, when another one had just run.
      head_s: what the output head and the draw of the first token took of that, in profiled seconds.
      host_work: what came on top of them.
      num_fitted: prefills that say so: such as shared no pack.
    """

    scale: float
    head_s: float
    host_work: HostWork
    num_fitted: int


def fit(prefills: Sequence[Prefill], grid: PrefillGrid, batched_tokens: int) -> Speed:
    """The speed of a machine while it did these, in packs of so many tokens at most.

    Raises:
      ValueError: fewer than four shared no pack with others; all of these came after a pause, or none.
    """
    num_in = collections.Counter(start_s for one in prefills for start_s in one.packs_s)
    alone = [one for one in prefills if all(num_in[start_s] == 1 for start_s in one.packs_s)]
    before, behind, rows, taken = [], [], [], []
    head_s = statistics.median(one.ended_s - one.layers_s for one in alone) if alone else 0.0
    for one in alone:
        started_s, num_packs = one.packs_s[0], len(one.packs_s)
        free_s = max((other.ended_s for other in prefills if other.ended_s <= started_s), default=-math.inf)
        is_awake = one.arrived_s < free_s
        (behind if is_awake else before).append(started_s - max(one.arrived_s, free_s))
        rows.append((_profiled_s(one, grid, batched_tokens), num_packs, float(not is_awake)))
        taken.append(one.ended_s - started_s + (num_packs - 1) * head_s)  # the profile has the head in every pack
    if len(alone) < 4 or not before or not behind:
        found = f"got {len(before)} and {len(behind)}"
        raise ValueError(f"wanted prefills alone in their packs, some after a pause and some not, {found}")
    (scale, pack_s, wake_s), _ = scipy.optimize.nnls(np.asarray(rows), np.asarray(taken))
    if not scale:
        raise ValueError("wanted prefills that take longer the more they compute, got others")
    wanted = np.asarray(rows) @ (scale, pack_s, wake_s)
    jitter = np.asarray(taken) / wanted
    jitter *= sum(taken) / wanted.sum() / jitter.mean()  # drawn for packs of any size, they take what these took in all
    before_s = statistics.fmean(before)
    after_s = max(0.0, statistics.fmean(behind) - before_s)
    apart_s = max(0.0, statistics.fmean(one.ttft_s - (one.ended_s - one.arrived_s) for one in prefills))
    host_work = HostWork(before_s, after_s, float(pack_s), float(wake_s), apart_s, tuple(jitter.tolist()))
    return Speed(float(scale), head_s / float(scale), host_work, len(alone))


def _profiled_s(one: Prefill, grid: PrefillGrid, batched_tokens: int) -> float:
    """What its packs take by the profile: all but the last are full."""
    sizes = [batched_tokens] * (len(one.packs_s) - 1)
    sizes.append(one.new - sum(sizes))
    return sum(grid.prefill_s(one.cached + sum(sizes[:at]), size) for at, size in enumerate(sizes))
