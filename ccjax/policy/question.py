"""Chooses tokens to recompute by the question's attention to them.

The question runs once over the reused KV as it is; the tokens that it attends to most are then computed in their new
context, before it runs again. Needs nothing that was measured earlier, so it suits passages that were seen in one
prompt only. (InfoFlow KV and ProphetKV choose by the same signal.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ccjax.types import PrefillPlan


def with_early(plan: PrefillPlan, start: int, end: int) -> PrefillPlan:
    """The plan with tokens `[start, end)` as part of the question, if it chooses tokens and no more than it has itself,
    and if they are computed anyway: what is reused may be other requests', too, and is not written."""
    around = (
        segment for segment in plan.segments if segment.start < end and start < segment.start + segment.num_tokens
    )
    is_computed = all(segment.action == "compute" for segment in around)
    num_chosen = sum(len(plan.segments[index].recompute_offsets) for index in plan.chosen_by_question)
    if start == end or not is_computed or end - start + plan.segments[-1].num_tokens > num_chosen:
        return plan
    return dataclasses.replace(plan, early_question=(start, end))


def revise(plan: PrefillPlan, received: Sequence[float]) -> PrefillPlan:
    """The plan with as many tokens to recompute, in all `plan.chosen_by_question` together, as before: those with the
    most attention of the question; ties by position.

    Args:
      received: softmax mass that the question puts on each token of the prompt, summed over its tokens, layers and
        heads.

    Raises:
      ValueError: there is not one number for each token of the prompt, or a mass is NaN.
    """
    if len(received) != plan.num_tokens:
        raise ValueError(f"received: wanted {plan.num_tokens} masses, one for each token, got {len(received)}")
    if any(math.isnan(mass) for mass in received):
        raise ValueError("received: wanted numbers, got NaN")
    segments = {index: plan.segments[index] for index in plan.chosen_by_question}
    ranked = sorted(
        (-received[segment.start + offset], index, offset)
        for index, segment in segments.items()
        for offset in range(segment.num_tokens)
    )
    chosen: dict[int, list[int]] = {index: [] for index in segments}
    for _, index, offset in ranked[: sum(len(segment.recompute_offsets) for segment in segments.values())]:
        chosen[index].append(offset)
    revised = [
        dataclasses.replace(segment, recompute_offsets=tuple(sorted(chosen[index]))) if index in chosen else segment
        for index, segment in enumerate(plan.segments)
    ]
    return dataclasses.replace(plan, segments=tuple(revised), chosen_by_question=())
