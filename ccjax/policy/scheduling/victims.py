"""Chooses the sequences to preempt so that a more important one can be admitted."""

from __future__ import annotations

from collections.abc import Collection

from ccjax.policy.scheduling.sequence import ScheduledSequence
from ccjax.policy.scheduling.work import SchedulerSettings


def victims_for(
    head: ScheduledSequence,
    wanted: int,
    free_pages: int,
    admitted: Collection[ScheduledSequence],
    settings: SchedulerSettings,
) -> list[ScheduledSequence] | None:
    """The admitted sequences to preempt for `head`, which takes `wanted` free pages, least important first; None if
    that does not free enough."""

    def reserve(sequence: ScheduledSequence) -> int:
        return min(settings.reserve_pages, sequence.growth_pages)

    wanted += reserve(head) + sum(map(reserve, admitted))
    num_free_slots = settings.max_num_seqs - len(admitted)
    victims: list[ScheduledSequence] = []
    lesser = [r for r in admitted if r.work.priority > head.work.priority and not r.is_complete]
    for victim in sorted(lesser, key=lambda r: r.rank, reverse=True):
        if wanted <= free_pages and num_free_slots:
            break
        victims.append(victim)
        free_pages += victim.own_pages
        wanted -= reserve(victim)
        num_free_slots += 1
    return victims if wanted <= free_pages and num_free_slots else None
