"""Leases: a process declares, for some seconds, that it computes something.

Leases need only create-if-absent, which every root supports. `leases/KEY.EPOCH` contains the owner and the expiry; the
highest epoch counts. To acquire a free or expired lease, a process creates the next epoch, which succeeds for only one.
A lease is released by deleting it before it expires; leases that expired an hour ago are deleted at open.

Times are the wall clock of each host; clocks should differ by much less than the duration of a lease. Otherwise two
processes may hold one lease, or one of a dead process lasts longer: work is then done twice, or later. Stored data
never depends on leases, so they are advisory and not durable.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence

from ccjax.store.objects import Root, for_each

LEFT_OVER_S = 3600.0
"""Leases are deleted at open once they have been expired for this long."""

_NAME = re.compile(r"(.+)\.(\d{8})")


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A lease that this process holds until `expires_s` (wall clock, seconds). `epoch` is at least 1, or 0 for a lease
    of a shared index (`store.index`), which has no epochs."""

    key: str
    epoch: int
    holder: str
    expires_s: float


class Leases:
    """The leases of one namespace. Thread-safe; every method may raise OSError.

    Args:
      clock: time in seconds, shared by all processes.
    """

    def __init__(self, root: Root, namespace: str, clock: Callable[[], float] = time.time):
        self._root = root
        self._folder = f"{namespace}/leases"
        self._clock = clock
        self._is_ready = False

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        """Acquires leases on the first of `keys`, up to the first one held by another process. Processes must pass
        several keys in a common order, so that no two wait for each other."""
        if not self._is_ready:
            self._root.make_prefix(self._folder)
            self._is_ready = True
        latest = self._latest(keys)
        free = _leading(keys, lambda key: not self._is_live(latest.get(key)))
        held: list[Lease] = []
        for some in (free[:1], free[1:]):  # most races are lost at the first key, so try it alone
            won = for_each(self._root, lambda key: self._create(key, latest.get(key), seconds), some)
            held += filter(None, won)
            if not held:
                return []
        return self._checked(free, held)

    def held(self, keys: Collection[str]) -> frozenset[str]:
        """Those of `keys` with a live lease of any process."""
        return frozenset(key for key, lease in self._latest(keys).items() if self._is_live(lease))

    def release(self, lease: Lease) -> None:
        """Releases a lease; an expired one is kept, because another process may be creating the next epoch."""
        if self._is_live(lease):
            self._root.delete(self._key(lease.key, lease.epoch))

    def sweep(self) -> None:
        """Deletes leases left by killed processes."""
        now = self._clock()
        for name in self._root.names(self._folder):
            match = _NAME.fullmatch(name)
            lease = match and self._read(match[1], int(match[2]))
            if lease and lease.expires_s < now - LEFT_OVER_S:
                self._root.delete(self._key(lease.key, lease.epoch))

    # -- internals ---------------------------------------------------------------------------------------------

    def _key(self, key: str, epoch: int) -> str:
        return f"{self._folder}/{key}.{epoch:08d}"

    def _is_live(self, lease: Lease | None) -> bool:
        return lease is not None and self._clock() < lease.expires_s

    def _epochs(self, keys: Collection[str]) -> dict[str, list[int]]:
        """Key -> its existing epochs, for keys that have any."""
        wanted, found = set(keys), {}
        for name in self._root.names(self._folder):
            match = _NAME.fullmatch(name)
            if match and match[1] in wanted:
                found.setdefault(match[1], []).append(int(match[2]))
        return found

    def _latest(self, keys: Collection[str]) -> dict[str, Lease]:
        """Key -> its lease of the highest epoch, live or not."""
        newest = [(key, max(epochs)) for key, epochs in self._epochs(keys).items()]
        return {lease.key: lease for lease in for_each(self._root, lambda pair: self._read(*pair), newest)}

    def _read(self, key: str, epoch: int) -> Lease:
        """Reads a lease; returns one that expired long ago if it is gone or damaged."""
        try:
            raw = self._root.read(self._key(key, epoch)) or b""
            value = json.loads(raw)
            return Lease(key, epoch, str(value["holder"]), float(value["expires_s"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return Lease(key, epoch, "", 0.0)

    def _create(self, key: str, latest: Lease | None, seconds: float) -> Lease | None:
        epoch = 1 if latest is None else latest.epoch + 1
        lease = Lease(key, epoch, uuid.uuid4().hex, self._clock() + seconds)
        value = json.dumps({"holder": lease.holder, "expires_s": lease.expires_s}).encode()
        return lease if self._root.create(self._key(key, epoch), value, durable=False) else None

    def _checked(self, keys: Sequence[str], held: Sequence[Lease]) -> list[Lease]:
        """The leases to keep: those before the first lost key, or key with another live lease, which can exist if old
        leases were swept concurrently. Releases the others."""
        if not held:
            return []
        by_key = {lease.key: lease for lease in held}
        others = [
            (key, epoch)
            for key, epochs in self._epochs(by_key).items()
            for epoch in epochs
            if epoch != by_key[key].epoch
        ]
        rivals = for_each(self._root, lambda pair: self._read(*pair), others)
        contested = {rival.key for rival in rivals if self._is_live(rival)}
        kept = _leading(keys, lambda key: key in by_key and key not in contested)
        for_each(self._root, self.release, [lease for lease in held if lease.key not in kept])
        return [by_key[key] for key in kept]


def _leading(keys: Sequence[str], is_good: Callable[[str], bool]) -> list[str]:
    """`keys` before the first one for which `is_good` is False."""
    end = next((index for index, key in enumerate(keys) if not is_good(key)), len(keys))
    return list(keys[:end])
