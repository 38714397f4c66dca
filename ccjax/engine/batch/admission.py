"""One request's way to a prefill: a plan, the KV that it reuses, another plan where some of that cannot be had. Knows no
other request, no page and no step."""

from __future__ import annotations

import time

from ccjax.engine.cached_prefill import CachedPrefill, Prefilled
from ccjax.engine.contexts import LayerLoader
from ccjax.engine.plan_rows import PrefillOutcome
from ccjax.engine.prompts import Prompt
from ccjax.engine.reads import LoadFailedError, Patience
from ccjax.types import PrefillPlan, ReuseMode, VariantId
from store.errors import ShardNotFoundError
from store.tickets import LoadTicket


class Admission:
    """Not thread-safe. `settle`, `open`, then `prefilled` once all ran; `close` at the end, whatever happened.

    Attributes:
      plan: of the last `settle`.
      ticket: of `open`; None where nothing is reused at all (mode `off`).
    """

    def __init__(self, prefill: CachedPrefill, prompt: Prompt, mode: ReuseMode) -> None:
        self._prefill = prefill
        self.prompt = prompt
        self.mode: ReuseMode = mode
        self.ticket: LoadTicket | None = None
        self._loader: LayerLoader | None = None
        self._failed: set[VariantId] = set()
        self._lossy: set[str] = set()
        self._patience = Patience(prefill.rates.seconds_per_token)
        self._given_up: frozenset[VariantId] = frozenset()
        self._plan_s = self._waited_s = 0.0
        self._planned_at = 0.0
        self._disk_bytes = self._preloaded_bytes = 0
        self.plan = self.settle()

    @property
    def collects(self) -> bool:
        """True if what is computed should be kept."""
        return self.mode != "off" and not self._prefill.read_only

    def settle(self) -> PrefillPlan:
        """The plan as things are now, without what failed before."""
        started = time.perf_counter()
        if self.mode == "off":
            self.plan = self._prefill.plan(self.prompt, self.mode, {})
        else:
            self.plan, self._given_up = self._prefill.loads.settle(
                lambda without: self._prefill.plan(
                    self.prompt,
                    self.mode,
                    self._prefill.usable(self.prompt, self._failed | without, lossy=self._lossy),
                )
            )
        self._planned_at = time.perf_counter()
        self._plan_s += self._planned_at - started
        return self.plan

    def open(self) -> LoadTicket | None:
        """Pins what the plan reuses, which may be planned anew for that."""
        while self.mode != "off":
            loads = self._prefill.loads
            self._disk_bytes = loads.disk_bytes(self.plan)
            self._preloaded_bytes = self._disk_bytes - loads.unread_bytes(self.plan)
            self.ticket = self._prefill.pin(self.plan)
            if not self.ticket.missing and self._prefill.is_as_planned(self.ticket, self.plan):
                break
            # Since it was planned, an exact copy went, or all of one.
            missing = {VariantId(key): ShardNotFoundError("no tier holds it any more") for key in self.ticket.missing}
            self._lossy.update(self.ticket.lossy)
            self.fail(LoadFailedError(missing))
        return self.ticket

    def load(self, shared: frozenset[int]) -> LayerLoader | None:
        """The source of all that the plan reuses besides the segments in `shared`, reading already; or None."""
        wanted = {
            segment.variant_id: segment.num_tokens
            for index, segment in enumerate(self.plan.segments)
            if segment.variant_id is not None and index not in shared
        }
        if not wanted or self.ticket is None:
            return None
        self._patience.expect(wanted)
        self._loader = self._prefill.loader(self.ticket, self.plan, self._patience, skip=shared)
        return self._loader.__enter__()

    def fail(self, error: LoadFailedError) -> None:
        """What `error` names cannot be read; unpins, and plans without it."""
        self._failed.update(error.causes)
        if self._loader is not None:
            self._waited_s += self._loader.waited_s
            self._prefill.leave_out(error, self._loader.waited_s)
        else:
            self._prefill.leave_out(error, 0.0)
        self.close()
        self.settle()

    def prefilled(self, outcome: PrefillOutcome) -> Prefilled:
        """What report and capture need of a prefill that is through. Reading is over; what it reused stays pinned."""
        if self._loader is not None:
            self._loader.__exit__()
            outcome.loaded_bytes, outcome.load_wait_s = self._loader.loaded_bytes, self._loader.waited_s
            self._loader = None
        outcome.load_wait_s += self._waited_s
        return Prefilled(
            self.prompt,
            self.plan,
            outcome,
            self.ticket,
            None if self.ticket is None else self.ticket.read_layers,
            self._plan_s,
            self._planned_at,
            len(self._failed),
            self._preloaded_bytes,
            self._prefill.loads.load_s(self.plan, self._disk_bytes) or 0.0,
            len(self._given_up),
        )

    def close(self, *, ok: bool = True) -> None:
        """Ends reading and unpins. May be repeated."""
        if self._loader is not None:
            self._loader.__exit__()
            self._loader = None
        if self.ticket is not None:
            ticket, self.ticket = self.ticket, None
            self._prefill.unpin(ticket, ok=ok)
