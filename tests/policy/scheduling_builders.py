"""A small scheduler, and packs and steps that finish at once. Contains no assertions."""

from __future__ import annotations

from ccjax.policy.scheduling import Scheduler, SchedulerSettings, StepCosts

COSTS = StepCosts(token_s=0.001, decode_step_s=0.01)


def build(*works, **changes):
    """A scheduler with these sequences in its queue."""
    values = {"num_pages": 100, "page_tokens": 4, "max_num_batched_tokens": 100, "reserve_pages": 0}
    scheduler = Scheduler(SchedulerSettings(**{**values, **changes}))
    for work in works:
        scheduler.add(work)
    return scheduler


def start(scheduler, free_pages=100, now_s=0.0, costs=COSTS):
    """Runs the next pack at once and returns it."""
    pack = scheduler.next_pack(now_s, free_pages, costs)
    scheduler.pack_done(now_s)
    return pack


def decode(scheduler, free_pages=100, now_s=0.0, costs=COSTS):
    """Runs the next decode step at once and returns it."""
    step = scheduler.next_decode(free_pages, costs)
    scheduler.decode_done(now_s)
    return step


def admitted(scheduler, free_pages=100):
    return start(scheduler, free_pages).admitted
