"""How fast this machine was while an engine answered: fitted to the traces of its answers."""

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
      scale: times by which packs took longer than profiled ones of the same pieces, when another one had just run.
      head_s: what the output head and the draw of the first token took of that, in profiled seconds.
      host_work: what came on top of them.
      num_fitted: packs that say so: such as ended a prompt, of which it is known how the others took part.
    """

    scale: float
    head_s: float
    host_work: HostWork
    num_fitted: int


class _Pack(NamedTuple):
    """Some prefills' tokens that ran together.

    Attributes:
      ended_s: None where no prompt ended.
      pieces: None where it is not known how many tokens each of them had.
      num_begun, num_ended: prefills of which it was the first pack, the last.
      arrived_s: when the first came of those that began in it; None without any.
    """

    started_s: float
    ended_s: float | None
    pieces: tuple[SimulatedPiece, ...] | None
    num_begun: int
    num_ended: int
    arrived_s: float | None


def fit(prefills: Sequence[Prefill], costs: GridCosts, batched_tokens: int) -> Speed:
    """The speed of a machine while it did these, in packs of so many tokens at most.

    Raises:
      ValueError: fewer than four packs say something, or all of these came after a pause, or none.
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
            "wanted packs in which prompts end, some after a pause and some not, "
            f"got {len(rows)}, {len(before)} and {len(behind)}"
        )
    import scipy.optimize  # half a second, which only fitting needs

    weights, _ = scipy.optimize.nnls(np.asarray(rows), np.asarray(taken))
    scale, pack_s, piece_s, wake_s = weights.tolist()
    if not scale:
        raise ValueError("wanted packs that take longer the more they compute, got others")
    wanted = np.asarray(rows) @ weights
    jitter = np.asarray(taken) / wanted
    # Drawn for packs of any size, scaled to the total time of these.
    jitter *= sum(taken) / wanted.sum() / jitter.mean()
    before_s = statistics.fmean(before)
    after_s = max(0.0, statistics.fmean(behind) - before_s)
    apart_s = max(0.0, statistics.fmean(one.ttft_s - (one.ended_s - one.arrived_s) for one in prefills))
    host_work = HostWork(before_s, after_s, pack_s, piece_s, wake_s, apart_s, tuple(jitter.tolist()))
    head_s = statistics.median(one.ended_s - one.layers_s for one in prefills)
    return Speed(scale, head_s / scale, host_work, len(rows))


def _packs(prefills: Sequence[Prefill], batched_tokens: int) -> Iterator[_Pack]:
    """All packs in order. A prompt that ends in one has all that is left of it there; one that goes on has the rest of
    the pack, if it is the only such one."""
    members: dict[float, list[int]] = {}
    for number, one in enumerate(prefills):
        for started_s in one.packs_s:
            members.setdefault(started_s, []).append(number)
    left: dict[int, int | None] = {number: one.new for number, one in enumerate(prefills)}
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
                one = prefills[number]
                pieces.append(SimulatedPiece(size, one.cached + one.new - was_left + size, number in ending))
        begun = [prefills[number] for number in numbers if prefills[number].packs_s[0] == started_s]
        yield _Pack(
            started_s,
            max((prefills[number].ended_s for number in ending), default=None),
            tuple(pieces) if len(pieces) == len(numbers) else None,
            len(begun),
            len(ending),
            min((one.arrived_s for one in begun), default=None),
        )
