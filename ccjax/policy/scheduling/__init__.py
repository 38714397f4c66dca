"""Continuous batching: who prefills, who decodes, who waits, who gives pages back.

A *pack* is pieces of prompts that run together through all layers, one layer a step. Between two layers one decode step
of all running answers may run. One thread owns the scheduler and the pool, and calls, over and over:

1. `add` for each request that came, `remove` for each that was cancelled. `AdmissionQueueFullError`: 429,
   `retry_after_s` says when. `NeverFitsError`: 400. What a removed request holds is free at once; if it is in the pack that runs, its rows
   go on as padding that writes nowhere.
2. `expire`: the answers that come too late; they are removed already, each is named once.
3. `next_pack`. Carry out, in this order: `preempted` (give back the pages, keep the tokens drawn), `admitted` (draw all
   pages of the prompt and of the tokens drawn so far, pin the shared ones). `pieces` are the pack; without any, nothing
   is to be prefilled.
4. For each layer: run it, do 1 and 2, then ask `after_layer` once; if True, a decode step (6).
5. `pack_done`, once the first tokens are drawn: it names those who have one. `remove` those whose answer ends there.
6. A decode step, also whenever there is no pack and `num_decoding` is not 0: `expire`, `next_decode`; carry out
   `preempted` (those in the pack as in 1), draw a page for each of `draws`, run `request_ids`; `decode_done`; `remove`
   those whose answer ends. The scheduler counts tokens, but only the engine ends an answer. Likewise a step for each of
   `decoding_alone`, between two packs.
7. With neither pack nor decoding: wait for a request, or until the next deadline. If `num_waiting` is not 0 then, what
   keeps the first in line out is held by nobody that is scheduled: free it.

A preempted request comes again by itself, with the answer so far behind its prompt. If a plan fails (a chunk cannot be
loaded), call `replan`. If what was admitted must wait for something outside, `hold` it, and `replan` later. If a step
fails, `remove` whom it failed for, or `replan` whom it is tried again for, then `pack_done` or `decode_done` as ever;
`set_alone` keeps steps apart, so that one request's failures become nobody else's. Of n answers to one prompt, n - 1
are added (`after` the first one) once that has its first token, as requests that share its pages and compute one token;
`share` tells that its prompt's pages are not its own any more. Pages of a prompt that no admitted request reads are
free ones, with `shared_pages` to say so; if they are taken, `replan` those that wait.

Always true, for `free_pages` that are: no more pages are drawn than are free; no more than `max_num_seqs` are admitted
and `max_num_batched_tokens` computed in a pack; nobody is preempted for the sake of somebody less important (priority,
then arrival); of those with the most important priority the oldest that is admitted is never preempted, so all of them
end; two requests in the same situation are treated the same, in every process.
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
