"""The speed of this machine while an engine answered, fitted to the traces of its answers."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ccjax.requests import Response
from scripts.simulation.costs import GridCosts, SimulatedPiece
from scripts.simulation.replica import HostWork


@dataclasses.dataclass(frozen=True)
class Prefill:
    """One request on the engine's clock, seconds.

    Attributes:
      cached, new: tokens of its prompt that were reused, and that ran.
      arrived_s: its arrival.
      packs_s: starts of its packs.
      layers_s, ended_s: end of its last layer, and time of its first token.
      ttft_s: time to first token, as measured by the client.
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
        """Builds it from an answer with a trace."""
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
    """The fitted speed of a machine.

    Attributes:
      scale: factor by which packs took longer than profiled ones of the same pieces, directly after another pack.
      head_s: part of that for the output head and sampling the first token, in profiled seconds.
      host_work: times besides the packs.
      num_fitted: packs that were fitted: those in which a prompt ended and whose pieces are all known.
    """

    scale: float
    head_s: float
    host_work: HostWork
    num_fitted: int


class _Pack(NamedTuple):
    """Pieces of prefills that ran together.

    Attributes:
      ended_s: None if no prompt ended in it.
      pieces: None if the number of tokens of each is unknown.
      num_begun, num_ended: prefills that began and that ended in it.
      arrived_s: earliest arrival of those that began in it; None if there are none.
    """

    started_s: float
    ended_s: float | None
    pieces: tuple[SimulatedPiece, ...] | None
    num_begun: int
    num_ended: int
    arrived_s: float | None


def fit(prefills: Sequence[Prefill], costs: GridCosts, batched_tokens: int) -> Speed:
    """Fits the speed of a machine to prefills in packs of at most this many tokens.

    Raises:
      ValueError: fewer than four packs can be fitted, or all or none of them ran after a pause.
    """
    before, behind, rows, taken = [], [], [], []
    free_s: float | None = -math.inf
    has_ended_one = False
    for pack in _packs(prefills, batched_tokens):
        is_awake = free_s is None or pack.arrived_s is None or pack.arrived_s < free_s
        if pack.num_begun == 1 and pack.arrived_s is not None and not is_awake:
            before.append(pack.started_s - pack.arrived_s)
        elif pack.num_begun < 2 and free_s is not None and has_ended_one:
            behind.append(pack.started_s - free_s)
        if pack.ended_s is not None and pack.pieces is not None:
            rows.append((costs.pack_s(pack.pieces), 1.0, len(pack.pieces) - 1.0, float(not is_awake)))
            taken.append(pack.ended_s - pack.started_s)
        free_s = pack.ended_s
        has_ended_one = pack.num_ended == 1
    if len(rows) < 4 or not before or not behind:
        raise ValueError(
            "wanted packs in which prompts end, both after a pause and without one, "
            f"got {len(rows)}, {len(before)} and {len(behind)}"
        )
    import scipy.optimize  # takes half a second, and only fitting needs it

    weights, _ = scipy.optimize.nnls(np.asarray(rows), np.asarray(taken))
    scale, pack_s, piece_s, wake_s = weights.tolist()
    if not scale:
        raise ValueError("wanted packs that take longer if they compute more tokens, got others")
    wanted = np.asarray(rows) @ weights
    jitter = np.asarray(taken) / wanted
    # Used for packs of any size, so scaled to the total time of these.
    jitter *= sum(taken) / wanted.sum() / jitter.mean()
    before_s = statistics.fmean(before)
    after_s = max(0.0, statistics.fmean(behind) - before_s)
    apart_s = max(0.0, statistics.fmean(prefill.ttft_s - (prefill.ended_s - prefill.arrived_s) for prefill in prefills))
    host_work = HostWork(before_s, after_s, pack_s, piece_s, wake_s, apart_s, tuple(jitter.tolist()))
    head_s = statistics.median(prefill.ended_s - prefill.layers_s for prefill in prefills)
    return Speed(scale, head_s / scale, host_work, len(rows))


def _packs(prefills: Sequence[Prefill], batched_tokens: int) -> Iterator[_Pack]:
    """All packs in order. A prompt that ends in a pack has all its remaining tokens there; if only one prompt continues
    after the pack, it has the rest of the pack's tokens."""
    members: dict[float, list[int]] = {}
    for number, prefill in enumerate(prefills):
        for started_s in prefill.packs_s:
            members.setdefault(started_s, []).append(number)
    left: dict[int, int | None] = {number: prefill.new for number, prefill in enumerate(prefills)}
    for started_s, numbers in sorted(members.items()):
        ending = [number for number in numbers if prefills[number].packs_s[-1] == started_s]
        going_on = [number for number in numbers if number not in ending]
        sizes = {number: left[number] for number in ending}
        for number in going_on:
            known = [size for size in sizes.values() if size is not None]
            rest = batched_tokens - sum(known)
            is_known = len(going_on) == 1 and len(known) == len(sizes) and rest > 0
            sizes[number] = rest if is_known else None
        pieces = []
        for number, size in sizes.items():
            was_left = left[number]
            left[number] = None if size is None or was_left is None else was_left - size
            if size is not None and was_left is not None:
                prefill = prefills[number]
                pieces.append(SimulatedPiece(size, prefill.cached + prefill.new - was_left + size, number in ending))
        begun = [prefills[number] for number in numbers if prefills[number].packs_s[0] == started_s]
        yield _Pack(
            started_s,
            max((prefills[number].ended_s for number in ending), default=None),
            tuple(pieces) if len(pieces) == len(numbers) else None,
            len(begun),
            len(ending),
            min((prefill.arrived_s for prefill in begun), default=None),
        )
