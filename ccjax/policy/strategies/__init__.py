"""The reuse strategies by name. To add one, write its module and list it here and in `ccjax.policy.settings`."""

from __future__ import annotations

from types import MappingProxyType

from ccjax.policy.hkvd import DEFAULT_RATIO
from ccjax.policy.reuse import cache_fix_overhead
from ccjax.policy.settings import PlannerSettings, check_strategy
from ccjax.policy.strategies import (
    auto,
    cacheblend,
    cachecraft,
    deviation,
    full,
    h2o,
    legolink,
    prefix,
    random_tokens,
    reuse,
    set_cache,
)
from ccjax.policy.strategies.base import Strategy

STRATEGIES: MappingProxyType[str, Strategy] = MappingProxyType(
    {
        "full": full.decide,
        "prefix": prefix.decide,
        "set": set_cache.decide,
        "reuse": reuse.decide,
        "auto": auto.decide,
        "cachecraft": cachecraft.decide,
        "cacheblend": cacheblend.decide,
        "deviation": deviation.decide,
        "legolink": legolink.decide,
        "h2o": h2o.decide,
        "random": random_tokens.decide,
    }
)


def get_strategy(name: str) -> Strategy:
    """The strategy of that exact name.

    Raises:
      ValueError: no such strategy; the message lists the existing ones.
    """
    check_strategy(name)
    return STRATEGIES[name]


_NEVER_RECOMPUTES = ("full", "prefix", "set", "reuse")


def expected_share(settings: PlannerSettings, cci: float) -> float:
    """The share of a variant with that CCI, in [0, 1], that a later use in mode `bounded` is expected to recompute
    behind an unknown prefix (CacheCraft eq. 12 with beta' = 0, or its replacement)."""
    if settings.strategy in _NEVER_RECOMPUTES:
        return 0.0
    if settings.recompute_ratio is not None:
        return settings.recompute_ratio
    if settings.strategy == "cacheblend":
        return DEFAULT_RATIO
    share = cache_fix_overhead(cci, 0.0, settings.alpha)
    return min(share, settings.recompute_cap) if settings.strategy == "auto" else share
