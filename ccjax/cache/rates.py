"""How fast this machine loads and computes, measured while it works: `load_s` and `compute_s` say what something would
take."""

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
    """What `n` bytes or tokens take: `fixed_s + n unit_s` seconds."""

    fixed_s: float
    unit_s: float

    def seconds(self, count: int) -> float:
        """Seconds for so many; none take no time."""
        return self.fixed_s + count * self.unit_s if count else 0.0


class Rates:
    """What the engine measured so far; each estimate is None until there is a measurement. Thread-safe.

    Attributes:
      compute: of tokens that run through the model.
      tiers: tier -> of bytes loaded from it. "disk" is the read alone, queues and parallel reads included as they came;
        "host" is the merging into a context, which what comes from disk goes through as well.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.compute = ComputeRate()
        self.tiers = {HOST: LoadRate(clock), DISK: LoadRate(clock)}

    def load_s(self, tier: str, num_bytes: int) -> float | None:
        """Seconds to load `num_bytes` from "host" or "disk", with nothing else on the way."""
        cost = self.tiers[tier].cost
        return None if cost is None else cost.seconds(num_bytes)

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds of a prefill that runs `num_tokens` through all layers."""
        cost = self.compute.cost
        return None if cost is None else cost.seconds(num_tokens)

    @property
    def seconds_per_token(self) -> float | None:
        """What one more token in a prefill takes."""
        cost = self.compute.cost
        return None if cost is None else cost.unit_s

    def on_disk_read(self, link: OnRead | None = None) -> OnRead:
        """Measures reads of the disk, behind `link` where there is one; for `TieredStore.open`."""
        rate = self.tiers[DISK]
        return rate if link is None else lambda read, num_bytes: rate(link(read, num_bytes), num_bytes)

    def load_behind_s(self, num_bytes: int, disk_bytes: int) -> float | None:
        """CacheCraft's Tload of a plan: `disk_bytes` are read while what is there is merged, `num_bytes` in all, so the
        slower of the two counts; what was never measured is left out, None if that is all."""
        parts = (self.load_s(HOST, num_bytes), self.load_s(DISK, disk_bytes))
        known = [seconds for seconds in parts if seconds is not None]
        return max(known, default=None)


class ComputeRate:
    """How long prefills take, fitted to the last 32 by how many tokens they computed. Thread-safe."""

    def __init__(self) -> None:
        self._samples = _Samples()

    @property
    def cost(self) -> Cost | None:
        """The fit; None until a run was measured."""
        return self._samples.cost

    def like_s(self, num_tokens: int) -> float | None:
        """Seconds of a run of so many tokens, judged by those of half to twice as many alone, as `cost` is not: runs of
        11 tokens told a server eight times what one of 250 took. None where there was none lately."""
        return self._samples.like(num_tokens)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds a run of so many tokens through all layers."""
        self._samples.add(num_tokens, seconds)


class LoadRate:
    """How fast bytes come from one tier, fitted to its last 32 bursts. Thread-safe; a `store.arrays.OnRead`.

    A burst lasts while at least one read is under way, and counts the bytes that came meanwhile: reads side by side
    share a link, so the time that one of them took says little. After a second the next burst begins. The fit is
    robust: bursts that something else held up do not move it while they are few.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bursts = _Samples()
        self._under_way: dict[object, float] = {}
        self._burst_start = 0.0
        self._burst_bytes = 0

    def __call__(self, read: Any, num_bytes: int) -> Any:
        """Measures a read that begins now; `read` itself comes back."""
        key = self.begin()
        read.add_done_callback(lambda done: self.end(key, 0 if _is_failure(done) else num_bytes))
        return read

    def begin(self) -> object:
        """Notes that a read begins; what comes back goes to `end`."""
        key = object()
        with self._lock:
            now = self._clock()
            # A read that hangs must not make all time from then on look like one burst.
            self._under_way = {other: at for other, at in self._under_way.items() if now - at < _LOST_AFTER_S}
            if not self._under_way:
                self._burst_start, self._burst_bytes = now, 0
            self._under_way[key] = now
        return key

    def end(self, key: object, num_bytes: int) -> None:
        """Notes that a read ended with so many bytes, 0 if it failed."""
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
        """Adds a whole burst: bytes that came, or are still to come, after so many seconds."""
        self._bursts.add(num_bytes, seconds)

    @property
    def cost(self) -> Cost | None:
        """The fit; None until a burst was measured."""
        return self._bursts.cost

    @property
    def is_settled(self) -> bool:
        """True once so many bursts were measured that a single odd one does not decide."""
        return len(self._bursts) >= _LEAST_BURSTS


class _Samples:
    """The last (count, seconds), and the line through them. Thread-safe."""

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
        # Waits are measured on other threads and taken off, which may leave less than nothing of a short run.
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
    """The line through (count, seconds) by Siegel's repeated medians, which not quite half of the samples can be wild
    without moving: for each sample the median slope to the others, of those the median, then the median intercept.
    Where that is no sensible line (counts all alike, noise), nothing is fixed and the unit takes the median of
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
