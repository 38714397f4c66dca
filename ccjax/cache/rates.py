"""Load and compute rates of this machine, measured while it serves, and estimates from them."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ccjax.store.arrays import OnRead
from ccjax.store.usage import DISK, HOST

_NUM_SAMPLES = 32
_LEAST_BURSTS = 5
_LONGEST_BURST_S = 1.0
_LOST_AFTER_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Linear cost of `n` bytes or tokens: `fixed_s + n * unit_s` seconds."""

    fixed_s: float
    unit_s: float

    def seconds(self, count: int) -> float:
        """Seconds for `count` bytes or tokens; 0 for none."""
        return self.fixed_s + count * self.unit_s if count else 0.0


class Rates:
    """The engine's measurements so far; each estimate is None until there is a measurement. Thread-safe.

    Attributes:
      compute: rate of tokens that run through the model.
      tiers: tier -> rate of bytes loaded from it. "disk" is the read alone, with the queueing and parallel reads that
        occurred; "host" is the merge into a context and its way to the device, over all layers, which KV from disk goes
        through as well.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.compute = ComputeRate()
        self.tiers = {HOST: LoadRate(clock), DISK: LoadRate(clock)}

    def load_s(self, tier: str, num_bytes: int) -> float | None:
        """Seconds to load `num_bytes` from "host" or "disk" while no other load runs."""
        cost = self.tiers[tier].cost
        return None if cost is None else cost.seconds(num_bytes)

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds of a prefill that runs `num_tokens` through all layers."""
        cost = self.compute.cost
        return None if cost is None else cost.seconds(num_tokens)

    @property
    def seconds_per_token(self) -> float | None:
        """Marginal seconds of one more token in a prefill."""
        cost = self.compute.cost
        return None if cost is None else cost.unit_s

    def on_disk_read(self, link: OnRead | None = None) -> OnRead:
        """A callback for `TieredStore.open` that measures disk reads, after `link` if given."""
        rate = self.tiers[DISK]
        return rate if link is None else lambda read, num_bytes: rate(link(read, num_bytes), num_bytes)

    def load_behind_s(self, num_bytes: int, disk_bytes: int) -> float | None:
        """CacheCraft's Tload of a plan: reading `disk_bytes` overlaps with merging all `num_bytes`, so the slower one
        counts. A rate that was never measured is left out; None if neither was."""
        parts = (self.load_s(HOST, num_bytes), self.load_s(DISK, disk_bytes))
        known = [seconds for seconds in parts if seconds is not None]
        return max(known, default=None)


class ComputeRate:
    """Prefill time by computed tokens, fitted to the last 32 prefills. Thread-safe."""

    def __init__(self) -> None:
        self._samples = _Samples()

    @property
    def cost(self) -> Cost | None:
        """The fit; None until a run was measured."""
        return self._samples.cost

    def like_s(self, num_tokens: int) -> float | None:
        """Seconds of a run of `num_tokens`, from recent runs of half to twice as many tokens; None if there are none.
        `cost` extrapolates instead: from runs of 11 tokens it overestimated a run of 250 by a factor of eight."""
        return self._samples.like(num_tokens)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds a run of `num_tokens` through all layers."""
        self._samples.add(num_tokens, seconds)


class LoadRate:
    """Load time of one tier by bytes, fitted to its last 32 bursts. Thread-safe; a `store.arrays.OnRead`.

    A burst lasts while at least one read is in flight, and counts the bytes read meanwhile: parallel reads share a
    link, so the time of a single read says little. A burst is split after one second. The fit is robust: a few delayed
    bursts do not move it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bursts = _Samples()
        self._under_way: dict[object, float] = {}
        self._burst_start = 0.0
        self._burst_bytes = 0

    def __call__(self, read: Any, num_bytes: int) -> Any:
        """Measures a read that begins now; returns `read`."""
        key = self.begin()
        read.add_done_callback(lambda done: self.end(key, 0 if _is_failure(done) else num_bytes))
        return read

    def begin(self) -> object:
        """Notes that a read begins; returns the key to pass to `end`."""
        key = object()
        with self._lock:
            now = self._clock()
            # A read that hangs must not keep one burst open forever.
            self._under_way = {other: at for other, at in self._under_way.items() if now - at < _LOST_AFTER_S}
            if not self._under_way:
                self._burst_start, self._burst_bytes = now, 0
            self._under_way[key] = now
        return key

    def end(self, key: object, num_bytes: int) -> None:
        """Notes that a read ended after `num_bytes`, 0 if it failed."""
        with self._lock:
            if self._under_way.pop(key, None) is None:
                return
            self._burst_bytes += num_bytes
            now = self._clock()
            seconds = now - self._burst_start
            if self._under_way and seconds < _LONGEST_BURST_S:
                return
            if self._burst_bytes:
                self._bursts.add(self._burst_bytes, seconds)
            self._burst_start, self._burst_bytes = now, 0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Adds a whole burst: `num_bytes` that arrived, or were still outstanding, after `seconds`."""
        self._bursts.add(num_bytes, seconds)

    @property
    def cost(self) -> Cost | None:
        """The fit; None until a burst was measured."""
        return self._bursts.cost

    @property
    def is_settled(self) -> bool:
        """True once enough bursts were measured that one outlier does not dominate the fit."""
        return len(self._bursts) >= _LEAST_BURSTS


class _Samples:
    """The last (count, seconds) samples and the line fitted to them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: collections.deque[tuple[int, float]] = collections.deque(maxlen=_NUM_SAMPLES)
        self._fitted: Cost | None = None

    def __len__(self) -> int:
        return len(self._recent)

    def like(self, count: int) -> float | None:
        with self._lock:
            near = [count * seconds / other for other, seconds in self._recent if count <= 2 * other <= 4 * count]
        return statistics.median(near) if near else None

    def add(self, count: int, seconds: float) -> None:
        # Waits are measured on other threads and subtracted, so the time of a short run may come out negative.
        if seconds <= 0.0:
            return
        with self._lock:
            self._recent.append((count, seconds))
            self._fitted = None

    @property
    def cost(self) -> Cost | None:
        with self._lock:
            if self._fitted is None and self._recent:
                self._fitted = fit(tuple(self._recent))
            return self._fitted


def fit(samples: Sequence[tuple[int, float]]) -> Cost:
    """Fits a line to (count, seconds) by Siegel's repeated medians, which tolerate outliers in just under half of the
    samples: the median over samples of the median slope to the others, then the median intercept. Where the result is
    not plausible (all counts equal, slope not positive, negative intercept), `fixed_s` is 0 and `unit_s` the median of
    seconds / count.

    Raises:
      ValueError: no samples.
    """
    if not samples:
        raise ValueError("samples: wanted at least one, got none")
    medians = []
    for count, seconds in samples:
        slopes = [(other_s - seconds) / (other - count) for other, other_s in samples if other != count]
        if slopes:
            medians.append(statistics.median(slopes))
    if medians:
        slope = statistics.median(medians)
        fixed_s = statistics.median(seconds - slope * count for count, seconds in samples)
        if slope > 0.0 and fixed_s >= 0.0:
            return Cost(fixed_s, slope)
    return Cost(0.0, statistics.median(seconds / count for count, seconds in samples))


def _is_failure(read: Any) -> bool:
    return read.cancelled() or read.exception() is not None
