"""How long a load, or what another process computes, may be waited for before computing is the better choice
(CacheCraft sec. 3.5). Reads no clock."""

from __future__ import annotations

from ccjax.policy._checks import check_count, check_mass

LEAST_WAIT_S = 0.5
"""Waits up to this long are always allowed. A busy machine holds a sound read up for some tenths of a second (a disk
that wakes or writes, a thread that is not scheduled), and to give it up costs a new plan and all layers done so far."""

UNMEASURED_WAIT_S = 5.0
"""Bound while nothing was computed yet: about what 200 tokens of a model of 1B parameters take on a few CPU cores."""


STORE_S = 1.0
"""What another process may take to store a chunk once it is computed: copy, write, commit."""


def longest_load_wait_s(num_tokens: int, seconds_per_token: float | None) -> float:
    """The longest wait, in seconds, for the stored KV of a chunk of `num_tokens`.

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
