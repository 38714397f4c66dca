"""The reuse strategies by exact name. Knows none of them from inside: to add one, write its file and list it here."""

from __future__ import annotations

from types import MappingProxyType

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
      ValueError: no such strategy; the message lists those there are.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy: wanted one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name]
