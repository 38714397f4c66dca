"""Decides which planned loads to start, and how long to wait for a load, or for what another process computes, before
computing instead (CacheCraft sec. 3.5). Reads no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ccjax.policy._checks import check_count, check_mass
from ccjax.types import VariantId

LEAST_WAIT_S = 0.5
"""Waits up to this long are always allowed. A busy machine delays a normal read by some tenths of a second (a disk that
wakes or writes, a thread that is not scheduled), and giving up costs a new plan and all layers done so far."""

UNMEASURED_WAIT_S = 5.0
"""Limit before anything was measured: about what 200 tokens of a model of 1B parameters take on a few CPU cores."""


STORE_S = 1.0
"""Time another process may take to store a computed chunk: copy, write, commit."""


def longest_load_wait_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """Longest wait, in seconds, for the stored KV of chunks of `num_tokens` in all, loaded concurrently.

    CacheCraft sec. 3.5: a chunk-cache that is not available when its request runs is computed from the text instead. So
    the wait ends once computing would have been done, `num_tokens seconds_per_token`, but not before `LEAST_WAIT_S`.

    Args:
      seconds_per_token: measured time per computed token; None while unknown (then `UNMEASURED_WAIT_S`).

    Raises:
      ValueError: no tokens, or a time that is negative or not finite.
    """
    check_count("num_tokens", num_tokens)
    if seconds_per_token is None:
        return UNMEASURED_WAIT_S
    check_mass("seconds_per_token", seconds_per_token)
    return max(LEAST_WAIT_S, num_tokens * seconds_per_token)


def longest_shared_wait_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """Longest wait, in seconds, for chunks of `num_tokens` in all that another process has claimed.

    That process began before we saw its claim, so after the computing time (`longest_load_wait_s`) it only has to store
    them. Waiting in vain thus costs at most the computing time plus `STORE_S`.

    Raises:
      ValueError: as `longest_load_wait_s`.
    """
    return longest_load_wait_s(num_tokens, seconds_per_token) + STORE_S


def claim_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """Duration of a claim, in seconds, of a process that computes chunks of `num_tokens` in all: twice what others wait
    for it, so that a process half as fast as it expects does not lose its claim.

    Raises:
      ValueError: as `longest_load_wait_s`.
    """
    return 2.0 * longest_shared_wait_s(num_tokens, seconds_per_token)


LEAVE_FACTOR, RETURN_FACTOR = 1.25, 0.8
"""A load is abandoned if waiting for it takes 1.25 times as long as computing its chunk; after loads were abandoned,
one is chosen again below 0.8 times. The hysteresis absorbs the noise of the estimates."""

SHORT_WAIT_S = 0.01
"""Loads are not abandoned for waits of less than this in all: threads that wait for each other take as long."""

EXPLORE_EVERY = 16
"""One in this many consecutive plans that abandon loads keeps its cheapest: what is never read is never measured
again."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A variant that a plan loads over a link: seconds to load it, and to compute its chunk instead (ValueError if one
    is negative or not finite)."""

    variant_id: VariantId
    load_s: float
    compute_s: float

    def __post_init__(self) -> None:
        check_mass("load_s", self.load_s)
        check_mass("compute_s", self.compute_s)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadHabit:
    """Outcome of earlier plans: the last `num_given_up` of them abandoned loads."""

    num_given_up: int = 0

    @property
    def explores(self) -> bool:
        """True if the next plan should keep a load in order to measure it."""
        return self.num_given_up > 0 and self.num_given_up % EXPLORE_EVERY == 0

    def after(self, gave_up: bool) -> LoadHabit:
        """The habit after one more plan; a load kept only for measuring counts as abandoned."""
        return LoadHabit(self.num_given_up + 1 if gave_up else 0)


def loads_to_give_up(loads: Sequence[PlannedLoad], hidden_s: float, habit: LoadHabit) -> frozenset[VariantId]:
    """The variants whose chunks are better computed than loaded, decided one after another in the given order.

    Computation hides loading: `hidden_s` seconds are available to the first loads. A load that would take longer to
    wait for than its chunk takes to compute is abandoned; computing that chunk then hides later loads, so that even
    over a link slower than computing some chunks load for free.

    The papers do not cover this: CacheCraft sec. 3.5 abandons late loads, CacheBlend's controller chooses a device
    before there is a request.

    Args:
      loads: of one plan, in prompt order.
      hidden_s: seconds of computing, at least 0, that the plan needs in any case.

    Raises:
      ValueError: `hidden_s` is negative or not finite.
    """
    check_mass("hidden_s", hidden_s)
    factor = RETURN_FACTOR if habit.num_given_up else LEAVE_FACTOR
    given_up, waits_s = [], 0.0
    for load in loads:
        if load.load_s - hidden_s > factor * load.compute_s:
            given_up.append(load.variant_id)
            waits_s += load.load_s - hidden_s
            hidden_s += load.compute_s
        else:
            hidden_s = max(0.0, hidden_s - load.load_s)
    return frozenset(given_up) if waits_s >= SHORT_WAIT_S else frozenset()


def load_to_explore(loads: Sequence[PlannedLoad], given_up: frozenset[VariantId], habit: LoadHabit) -> VariantId | None:
    """The fastest of the abandoned loads, to start it all the same; None if no measurement is due, or a kept load
    measures the tier anyway."""
    if not habit.explores or len(given_up) < len(loads):
        return None
    return min(loads, key=lambda load: (load.load_s, load.variant_id)).variant_id if loads else None
