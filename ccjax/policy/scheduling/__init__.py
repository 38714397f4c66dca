"""Continuous batching: decides which sequences prefill, decode, wait or are preempted.

A *pack* is a set of prompt pieces that run together through all layers, one layer per step. Between two layers, one
decode step of all running sequences may run. A single thread owns the scheduler and the page pool and calls, in a loop:

1. `add` for each new request, `remove` for each cancelled one. `AdmissionQueueFullError` maps to HTTP 429
   (`retry_after_s` says when to retry), `NeverFitsError` to 400. Removing a request frees what it holds at once; if it
   is in the running pack, its rows continue as padding that writes nowhere.
2. `expire`: returns the requests whose deadline has passed. They are already removed, and each is returned once.
3. `next_pack`. Carry out its fields in this order: `preempted` (free their pages, keep the tokens generated so far),
   `admitted` (allocate all pages for the prompt and the tokens generated so far, pin the shared pages). `pieces` is the
   pack; if it is empty, there is nothing to prefill.
4. For each layer: run it, repeat 1 and 2, then call `after_layer` once; if it returns True, run a decode step (6).
5. `pack_done`, once the first tokens are sampled: it returns the requests that have one. `remove` those that end there.
6. A decode step, also whenever there is no pack and `num_decoding` is not 0: `expire`, then `next_decode`; carry out
   `preempted` (for requests in the running pack as in 1), allocate a page for each of `allocating`, run
   `sequence_ids`, call `decode_done`, and `remove` the requests that end. The scheduler counts tokens, but only the
   engine ends a request. In the same way run one step for each of `decoding_alone`, between two packs.
7. With neither a pack nor decoding: wait for a request or the next deadline. If `num_waiting` is not 0 at that point,
   the pages that the head of the queue needs are held outside the scheduler: free them.

A preempted request is rescheduled automatically, with the tokens generated so far appended to its prompt. If a plan
fails (a chunk cannot be loaded), call `replan`. If an admitted request must wait for something external, `hold` it and
`replan` it later. If a step fails, `remove` the requests it failed for, or `replan` those to be retried, then call
`pack_done` or `decode_done` as usual; `set_alone` isolates a request so that its failures affect no other. Of n
sequences for one prompt, the other n - 1 are added (with `after` naming the first) once the first has its first token:
they share its pages and compute one token each. `share` reports that the pages of a prompt are shared from now on.
Prompt pages that no admitted request reads count as free, and `shared_pages` accounts for them; if they are taken,
`replan` the requests that wait for them.

Invariants, provided that `free_pages` is correct: no more pages are allocated than are free; at most `max_num_seqs`
sequences are admitted and `max_num_batched_tokens` computed per pack; nothing is preempted in favour of a less
important sequence (priority, then arrival); the oldest admitted sequence of the most important priority is never
preempted, so all of them finish; two sequences in the same situation are treated alike, in every process.
"""

from __future__ import annotations

from ccjax.policy.scheduling.scheduler import Scheduler
from ccjax.policy.scheduling.work import (
    AdmissionQueueFullError,
    DecodeStep,
    NeverFitsError,
    ScheduledPack,
    ScheduledPiece,
    SchedulerSettings,
    SequenceWork,
    StepCosts,
)

__all__ = [
    "AdmissionQueueFullError",
    "DecodeStep",
    "NeverFitsError",
    "ScheduledPack",
    "ScheduledPiece",
    "Scheduler",
    "SchedulerSettings",
    "SequenceWork",
    "StepCosts",
]
