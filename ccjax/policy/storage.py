"""Chooses where KV may be stored so that loading it hides behind recomputing (CacheBlend sec. 5.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ccjax.policy._checks import check_count, check_mass, check_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """A place for KV: bytes per second that one request reads from it, and its price per GB and month in any currency;
    checked on construction (ValueError naming the field)."""

    name: str
    bytes_per_s: float
    price: float

    def __post_init__(self) -> None:
        check_mass("bytes_per_s", self.bytes_per_s)
        check_mass("price", self.price)


USUAL = (
    Storage("host memory", 10e9, 2.0),
    Storage("a local SSD", 1e9, 0.08),
    Storage("a bucket", 0.1e9, 0.023),
)
"""Typical rates, and US list prices of large clouds in 2026: their order is what matters."""


def least_rate(bytes_per_token: int, seconds_per_token: float, recompute_ratio: float) -> float | None:
    """Bytes per second from which loading hides behind recomputing: for any number of tokens `T_load = bytes / rate` is
    at most `T_recompute = ratio T_prefill`. None if nothing is recomputed, so that no load is hidden.

    Raises:
      ValueError: an argument is out of range.
    """
    check_count("bytes_per_token", bytes_per_token)
    check_mass("seconds_per_token", seconds_per_token)
    check_ratio("recompute_ratio", recompute_ratio)
    hidden_s = recompute_ratio * seconds_per_token
    return bytes_per_token / hidden_s if hidden_s else None


def cheapest_hidden(places: Iterable[Storage], rate: float) -> Storage | None:
    """The cheapest place that reads `rate` bytes per second or more, of equal prices the fastest; None if none does."""
    fast = [place for place in places if place.bytes_per_s >= rate]
    return min(fast, key=lambda place: (place.price, -place.bytes_per_s, place.name), default=None)
