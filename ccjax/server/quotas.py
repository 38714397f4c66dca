"""Per-tenant quotas from a file: concurrent requests and tokens per minute."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ccjax.engine import Response
from ccjax.errors import ConfigError, QuotaError


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None for no limit.

    Attributes:
      requests: concurrent requests, queued ones included.
      tokens_per_minute: of prompts and answers, cached or not.
    """

    requests: int | None = None
    tokens_per_minute: int | None = None


class QuotaTicket:
    """One request counted against its tenant's quota. Thread-safe."""

    def __init__(self, owner: _Owner) -> None:
        self._owner = owner
        self._is_taken = True

    def charge(self, num_tokens: int) -> None:
        """Charges tokens, possibly below zero: the next requests then wait for the balance to recover."""
        with self._owner.lock:
            self._owner.tokens -= num_tokens

    def leave(self, response: Response | None = None) -> None:
        """Ends the request, with its response if there is one; further calls do nothing."""
        with self._owner.lock:
            self._owner.num_requests -= self._is_taken
            if self._is_taken and response is not None:
                self._owner.tokens -= response.num_answer_tokens
            self._is_taken = False


class Quotas:
    """The quotas of all tenants. Thread-safe.

    The token balance refills continuously, up to one minute's worth. A request is accepted while the balance is
    positive; its prompt is charged when it is accepted, its answer when it is complete, since its length is unknown
    before.

    Args:
      path: a TOML file: `[default]` for all tenants, `[tenants.NAME]` with overrides for one; None for no limits.
      clock: monotonic seconds.

    Raises:
      ConfigError: it cannot be read, or contains unknown settings.
    """

    def __init__(self, path: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._default, self._tenants = (Quota(), {}) if path is None else _read(Path(path))
        self._clock = clock
        self._lock = threading.Lock()
        self._owners: dict[str, _Owner] = {}

    def enter(self, tenant: str, name: str) -> QuotaTicket:
        """Admits one more request.

        Args:
          tenant: its tenant, "" for none.
          name: identifies it if it has no tenant; the default quota applies.

        Raises:
          QuotaError: the quota is used up.
        """
        quota = self._tenants.get(tenant, self._default)
        with self._lock:
            now_s = self._clock()
            self._forget_idle(now_s)
            owner = self._owners.setdefault(f"tenant {tenant}" if tenant else f"key {name}", _Owner(quota, now_s))
        with owner.lock:
            owner.fill(now_s)
            if quota.requests is not None and owner.num_requests >= quota.requests:
                raise QuotaError(f"quota: wanted at most {quota.requests} requests at a time", 1.0)
            if quota.tokens_per_minute is not None and owner.tokens <= 0:
                wait_s = (1.0 - owner.tokens) * 60.0 / quota.tokens_per_minute
                raise QuotaError(f"quota: wanted at most {quota.tokens_per_minute} tokens a minute", wait_s)
            owner.num_requests += 1
        return QuotaTicket(owner)

    def _forget_idle(self, now_s: float) -> None:
        """Occasionally drops tenants with a full balance and no requests, so that rotating keys leave nothing
        behind."""
        if len(self._owners) > 1024:
            self._owners = {name: owner for name, owner in self._owners.items() if not owner.is_idle(now_s)}


class _Owner:
    """Usage of one tenant, guarded by `lock`."""

    def __init__(self, quota: Quota, now_s: float) -> None:
        self.lock = threading.Lock()
        self.num_requests = 0
        self._most = math.inf if quota.tokens_per_minute is None else float(quota.tokens_per_minute)
        self.tokens = self._most
        self._filled_s = now_s

    def fill(self, now_s: float) -> None:
        """Refills the balance for the time since the last call."""
        gained = 0.0 if math.isinf(self._most) else self._most * (now_s - self._filled_s) / 60.0
        self.tokens = min(self._most, self.tokens + gained)
        self._filled_s = now_s

    def is_idle(self, now_s: float) -> bool:
        """True if it is in the same state as a new one."""
        with self.lock:
            self.fill(now_s)
            return not self.num_requests and self.tokens == self._most


def _read(path: Path) -> tuple[Quota, dict[str, Quota]]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"quota_file: cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"quota_file: {path}: {error}") from None
    tenants = values.pop("tenants", {})
    default = values.pop("default", {})
    if values or not isinstance(tenants, dict):
        got = ", ".join(values) or f"{tenants!r:.80}"
        raise ConfigError(f"quota_file: {path}: wanted [default] and [tenants.NAME] only, got {got}")
    base = _quota(path, "default", default, Quota())
    return base, {name: _quota(path, f"tenants.{name}", fields, base) for name, fields in tenants.items()}


def _quota(path: Path, where: str, fields: Any, base: Quota) -> Quota:
    known = [field.name for field in dataclasses.fields(Quota)]
    if not isinstance(fields, dict) or not fields.keys() <= set(known):
        raise ConfigError(f"quota_file: {path}, {where}: wanted {', '.join(known)}, got {fields!r:.80}")
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"quota_file: {path}, {where}.{name}: wanted a positive integer, got {value!r:.80}")
    return dataclasses.replace(base, **fields)
