"""Which planned loads are worth beginning, and how long a load, or what another process computes, may be waited for
before computing is the better choice (CacheCraft sec. 3.5). Reads no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ccjax.policy._checks import check_count, check_mass
from ccjax.types import VariantId

LEAST_WAIT_S = 0.5
"""Waits up to this long are always allowed. A busy machine holds a sound read up for some tenths of a second (a disk
that wakes or writes, a thread that is not scheduled), and to give it up costs a new plan and all layers done so far."""

UNMEASURED_WAIT_S = 5.0
"""Bound while nothing was computed yet: about what 200 tokens of a model of 1B parameters take on a few CPU cores."""


STORE_S = 1.0
"""What another process may take to store a chunk once it is computed: copy, write, commit."""


def longest_load_wait_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """The longest wait, in seconds, for the stored KV of chunks of `num_tokens` in all that load side by side.

    CacheCraft sec. 3.5: a chunk-cache that is not in place when its request runs is computed from the text instead. So
    the wait ends once computing would have been done, `num_tokens seconds_per_token`, but not before `LEAST_WAIT_S`.

    Args:
      seconds_per_token: what a computed token takes here, None while unknown: then `UNMEASURED_WAIT_S`.

    Raises:
      ValueError: no tokens, or a time that is negative or not finite.
    """
    check_count("num_tokens", num_tokens)
    if seconds_per_token is None:
        return UNMEASURED_WAIT_S
    check_mass("seconds_per_token", seconds_per_token)
    return max(LEAST_WAIT_S, num_tokens * seconds_per_token)


def longest_shared_wait_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """The longest wait, in seconds, for chunks of `num_tokens` in all that another process said it computes.

    It began no later than we saw that it did, so after the time that computing takes (`longest_load_wait_s`) it only
    has to store them. A wait for nothing thus costs at most what computing costs then, and `STORE_S`.

    Raises:
      ValueError: as `longest_load_wait_s`.
    """
    return longest_load_wait_s(num_tokens, seconds_per_token) + STORE_S


def claim_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """How many seconds a process that computes chunks of `num_tokens` in all should be believed to be alive: twice what
    others wait for it, so that one which is half as fast as it expects does not lose its claim to a second one.

    Raises:
      ValueError: as `longest_load_wait_s`.
    """
    return 2.0 * longest_shared_wait_s(num_tokens, seconds_per_token)


LEAVE_FACTOR, RETURN_FACTOR = 1.25, 0.8
"""A load is given up where it is waited for 1.25 times as long as computing its chunk takes; once loads were given up,
one is chosen again below 0.8 times. Between the two things stay as they are: estimates swing by that much."""

EXPLORE_EVERY = 16
"""Of so many plans in a row that give up loads, one keeps its cheapest: what is never read is never measured again."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A variant that a plan reuses from a slow tier: seconds to load it, and to compute in its place (ValueError where
    one is negative or not finite)."""

    variant_id: VariantId
    load_s: float
    compute_s: float

    def __post_init__(self) -> None:
        check_mass("load_s", self.load_s)
        check_mass("compute_s", self.compute_s)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadHabit:
    """What earlier plans decided: `num_given_up` of them in a row gave up loads."""

    num_given_up: int = 0

    @property
    def explores(self) -> bool:
        """True when the next plan should keep a load for the sake of measuring it."""
        return self.num_given_up > 0 and self.num_given_up % EXPLORE_EVERY == 0

    def after(self, gave_up: bool) -> LoadHabit:
        """The habit after one more plan; what is only explored was given up, too."""
        return LoadHabit(self.num_given_up + 1 if gave_up else 0)


def loads_to_give_up(loads: Sequence[PlannedLoad], hidden_s: float, habit: LoadHabit) -> frozenset[VariantId]:
    """The variants whose chunks are better computed than loaded, decided one after another in the given order.

    What is computed anyway hides `hidden_s` seconds of loading; the first loads have that. A load that would be waited
    for longer than its chunk takes to compute is given up, and the chunk, computed instead, hides loads that follow: so
    even from a tier that is slower than computing, some chunks load unseen behind others.

    The papers are silent on this: CacheCraft sec. 3.5 gives up what is late, CacheBlend's controller chooses a device
    before there is a request.

    Args:
      loads: of one plan, in prompt order.
      hidden_s: seconds of computing, at least 0, that the plan has whatever is given up.

    Raises:
      ValueError: `hidden_s` is negative or not finite.
    """
    check_mass("hidden_s", hidden_s)
    factor = RETURN_FACTOR if habit.num_given_up else LEAVE_FACTOR
    given_up = []
    for load in loads:
        if load.load_s - hidden_s > factor * load.compute_s:
            given_up.append(load.variant_id)
            hidden_s += load.compute_s
        else:
            hidden_s = max(0.0, hidden_s - load.load_s)
    return frozenset(given_up)


def load_to_explore(loads: Sequence[PlannedLoad], given_up: frozenset[VariantId], habit: LoadHabit) -> VariantId | None:
    """The one of the given up loads to begin all the same, the quickest; None where nothing is due to be explored, or a
    load that was not given up measures the tier anyway."""
    if not habit.explores or len(given_up) < len(loads):
        return None
    return min(loads, key=lambda load: (load.load_s, load.variant_id)).variant_id if loads else None
