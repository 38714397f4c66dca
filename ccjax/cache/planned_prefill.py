"""Prepares the prefill of one request: plans it, pins and loads the KV it reuses, and plans again if some of that KV is
unavailable."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

from ccjax.cache.causes import KnownChunks, causes_of
from ccjax.cache.contexts import LayerLoader
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.prefix_runs import CutPrompt
from ccjax.cache.reads import LoadFailedError, WaitLimit
from ccjax.cache.shared.prefill import SharedPrefill
from ccjax.policy.contract import ReuseContract
from ccjax.policy.strategies import adapts_to_loading
from ccjax.prompts import Prompt
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.plan_rows import PrefillOutcome
from ccjax.store.errors import ShardNotFoundError
from ccjax.store.tickets import LoadTicket
from ccjax.types import ChunkId, ComputeCause, PrefillPlan, VariantId, VariantMeta


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A finished prefill, as its report and capture need it.

    Attributes:
      asked: the prompt as it was assembled.
      prompt: the prompt as it was planned: begins with stored runs.
      ticket: None if reuse was off.
      causes: of each segment of the plan, why it was computed; None if it was reused.
      shared: None if no other process was involved.
      prepared: passages that were prepared for this prompt.
      keeps_chunks: what was computed is stored chunk by chunk.
      preloaded_bytes, load_s, given_up_loads: as in `ReuseReport`.
    """

    asked: Prompt
    prompt: Prompt
    plan: PrefillPlan
    result: PrefillOutcome
    ticket: LoadTicket | None
    plan_s: float
    planned_at_s: float
    failed_loads: int
    causes: tuple[ComputeCause | None, ...]
    preloaded_bytes: int = 0
    load_s: float = 0.0
    given_up_loads: int = 0
    shared: SharedPrefill | None = None
    prepared: frozenset[ChunkId] = frozenset()
    keeps_chunks: bool = True


class PlannedPrefill:
    """The plan and the loads of one prefill. Not thread-safe.

    Call `make_plan`, `claim`, `pin`, `start_loading`, then `prefilled`, in this order; always call `close` at the end.

    Attributes:
      plan: the current plan; None before the first `make_plan`.
      prepared: passages that were prepared for it, or could not be.
    """

    def __init__(
        self,
        planner: PrefillPlanner,
        prompt: Prompt,
        contract: ReuseContract,
        *,
        num_last: int | None = None,
        takes_approximate_runs: bool = True,
        is_shared: bool = False,
        is_cancelled: IsCancelled | None = None,
        on_load: Callable[[int, float, float], None] | None = None,
    ) -> None:
        """
        Args:
          num_last: number of last tokens to compute; what is before them may be reused from stored runs, and the
            prompt will be stored as such. None: it is reused and stored chunk by chunk.
          takes_approximate_runs: among the stored runs approximate ones count.
          is_shared: coordinate with other processes on the store which of them computes what
            (`ccjax.cache.shared.prefill`).
          is_cancelled: when it returns True, waiting for loads ends with PrefillCancelledError.
          on_load: the `on_layer` of the `LayerLoader`.
        """
        self._is_cancelled = is_cancelled
        self._on_load = on_load
        self.prompt = prompt
        self.contract = contract
        self._num_last = None if contract.mode == "off" else num_last
        self.keeps_chunks = num_last is None
        self._takes_approximate_runs = takes_approximate_runs and contract.mode != "exact"
        self._cut = CutPrompt(prompt)
        self.plan: PrefillPlan | None = None
        self.prepared: set[ChunkId] = set()
        self._planner = planner
        is_claimed = is_shared and contract.mode != "off" and self.keeps_chunks
        self._shared = planner.shared() if is_claimed else None
        self._ticket: LoadTicket | None = None
        self._end_protection: Callable[[], None] | None = None
        self._loader: LayerLoader | None = None
        self._failed: set[VariantId] = set()
        self._failed_chunks: set[ChunkId] = set()
        self._known = KnownChunks()
        self._lossy: set[str] = set()
        self._wait_limit = WaitLimit(planner.rates.seconds_per_token)
        self._given_up: frozenset[VariantId] = frozenset()
        self._plan_s = self._waited_s = self._planned_at_s = 0.0
        self._disk_bytes = self._preloaded_bytes = 0

    @property
    def collects(self) -> bool:
        """True if the computed KV should be stored."""
        return self.contract.mode != "off" and not self._planner.read_only

    @property
    def in_place(self) -> frozenset[VariantId]:
        """The variants of the plan whose pages on the device can be read in place; empty before `pin`."""
        return frozenset(map(VariantId, () if self._ticket is None else self._ticket.in_place))

    def make_plan(self) -> PrefillPlan:
        """Plans with the variants available now, except those that failed before, and returns the plan."""
        started, mode, settings = time.perf_counter(), self.contract.mode, self.contract.settings
        if mode == "off":
            self.plan = self._planner.plan(self.prompt, mode, {})
        else:
            if self._num_last is not None:
                self._cut = self._planner.behind_runs(
                    self.prompt,
                    mode,
                    self._num_last,
                    failed=self._failed,
                    with_approximate=self._takes_approximate_runs,
                )
            usable = self._usable()
            self.plan, self._given_up = self._planner.loads.plan_loads(
                lambda without: self._planner.plan(
                    self._cut.prompt, mode, self._usable(without) if without else usable, settings
                ),
                adapts_ratio=mode == "bounded" and adapts_to_loading(settings),
            )
            self._known = self._planner.known(self._cut.prompt, usable, self._given_up)
        self._planned_at_s = time.perf_counter()
        self._plan_s += self._planned_at_s - started
        return self.plan

    def claim(self) -> bool:
        """Claims what the plan computes, so that other processes need not; plans again if new variants have appeared.

        Returns False if it is better to wait for what another process computes: wait until `is_wait_over`, then call
        `make_plan` and `claim` again.
        """
        assert self.plan is not None
        while self._shared is not None:
            agreement = self._shared.claim(self.plan, self._usable())
            if agreement != "plan":
                return agreement == "go"
            self.make_plan()
        return True

    def is_wait_over(self) -> bool:
        """True once there is nothing left to wait for from other processes."""
        return self._shared is None or self._shared.is_wait_over()

    def unprepared(self) -> dict[ChunkId, Prompt]:
        """Prompts that prepare passages of the plan which are not in `prepared`, by the chunk that another request may
        be computing for the same purpose: the passage, or the frame's last one while the frame is not stored."""
        if self.contract.mode not in ("bounded", "fast"):
            return {}
        assert self.plan is not None
        prepared = self._planner.prepared
        found = prepared.unprepared(self.prompt, self._cut.prompt, self.plan)
        new = [prompt for prompt in found if prompt.chunks[-1].chunk_id not in self.prepared]
        return {prompt.chunks[-1 if prepared.has_frame(prompt) else -2].chunk_id: prompt for prompt in new}

    def protect(self) -> None:
        """Until `pin` or `close`, nothing that the plan reuses, and no passage that is prepared for it, is evicted for
        what others store. May be repeated, for another plan."""
        assert self.plan is not None
        self._unprotect()
        self._end_protection = self._planner.protect(self.prompt, self.plan)

    def pin(self) -> PrefillPlan:
        """Pins what the plan reuses, after `claim`. Plans again if a variant is no longer available as planned; returns
        the plan that is pinned."""
        assert self.plan is not None
        self._planned_at_s = time.perf_counter()  # it may have been planned long before, in the queue
        while self.contract.mode != "off":
            loads = self._planner.loads
            self._disk_bytes = loads.disk_bytes(self.plan)
            self._preloaded_bytes = self._disk_bytes - loads.unread_bytes(self.plan)
            self._ticket = self._planner.pin(self.plan)
            if not self._ticket.missing and self._planner.is_as_planned(self._ticket, self.plan):
                break
            # Since planning, the exact copy of a variant, or all of its copies, disappeared.
            self._lossy.update(self._ticket.lossy)
            missing = {VariantId(key): ShardNotFoundError("no tier holds it any more") for key in self._ticket.missing}
            self.replan_without(LoadFailedError(missing))
        self._unprotect()
        return self.plan

    def start_loading(self, shared: frozenset[int]) -> LayerLoader | None:
        """Starts loading all that the plan reuses except the segments in `shared`; None if nothing is to be loaded."""
        assert self.plan is not None
        wanted: collections.Counter[VariantId] = collections.Counter()
        for index, segment in enumerate(self.plan.segments):
            if segment.variant_id is not None and index not in shared:
                wanted[segment.variant_id] += segment.num_tokens
        if not wanted:
            return None
        assert self._ticket is not None
        self._wait_limit.expect(wanted)
        self._loader = self._planner.loader(
            self._ticket,
            self.plan,
            self._wait_limit,
            skip=shared,
            is_cancelled=self._is_cancelled,
            on_layer=self._on_load,
        )
        return self._loader.__enter__()

    def replan_without(self, error: LoadFailedError) -> None:
        """Unpins, and plans again without the variants that `error` names, which cannot be read."""
        waited_s = 0.0 if self._loader is None else self._loader.waited_s
        self.close(ok=bool(waited_s))  # what was read completely and without errors may stay in memory
        self._failed.update(error.causes)
        assert self.plan is not None
        failed = (segment.chunk_id for segment in self.plan.segments if segment.variant_id in error.causes)
        self._failed_chunks.update(filter(None, failed))
        self._waited_s += waited_s
        self._planner.leave_out(error, waited_s)
        self.make_plan()

    def prefilled(self, outcome: PrefillOutcome, plan: PrefillPlan) -> Prefilled:
        """Returns what report and capture need of a finished prefill, `plan` as it was revised meanwhile. Ends loading;
        what was reused stays pinned."""
        self.plan = plan
        if self._loader is not None:
            self._loader.__exit__()
            outcome.loaded_bytes, outcome.load_wait_s = self._loader.loaded_bytes, self._loader.waited_s
            self._loader = None
        known = dataclasses.replace(self._known, failed=frozenset(self._failed_chunks))
        shared_s = 0.0 if self._shared is None else self._shared.waited_s
        outcome.load_wait_s += self._waited_s + shared_s
        return Prefilled(
            asked=self.prompt,
            prompt=self._cut.prompt,
            plan=self.plan,
            result=outcome,
            ticket=self._ticket,
            plan_s=self._plan_s,
            planned_at_s=self._planned_at_s,
            failed_loads=len(self._failed),
            causes=causes_of(plan, self.contract.mode, known),
            preloaded_bytes=self._preloaded_bytes,
            load_s=self._planner.loads.load_s(self.plan, self._disk_bytes) or 0.0,
            given_up_loads=len(self._given_up),
            shared=self._shared,
            prepared=frozenset(self.prepared),
            keeps_chunks=self.keeps_chunks,
        )

    def close(self, *, ok: bool = True) -> None:
        """Ends loading and unpins; with `ok`, what was read may be promoted to a faster tier. May be repeated."""
        if self._loader is not None:
            self._loader.__exit__()
            self._loader = None
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._planner.unpin(ticket, ok=ok)
        self._unprotect()

    def release_claims(self) -> None:
        """Releases the claims of this process on what it computes. May be repeated."""
        if self._shared is not None:
            self._shared.release()
            self._shared = None

    def _unprotect(self) -> None:
        if self._end_protection is not None:
            self._end_protection()
            self._end_protection = None

    def _usable(self, without: frozenset[VariantId] = frozenset()) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        return self._planner.usable(
            self._cut.prompt, self._failed | without, lossy=self._lossy, asked=self.prompt, runs=self._cut.runs
        )
