"""Checks the budgets of the tiers against this machine, and their defaults."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from pathlib import Path

import jax

from ccjax.config import EngineConfig
from ccjax.errors import ConfigError
from ccjax.runner.pool import PAGE_TOKENS, num_pages
from ccjax.store.spec import KVSpec

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


_SPARE_PAGES = 64
"""Allowance for partly filled pages of a request: one for each segment of its prompt."""


_USUAL_HOST_BYTES = 2 << 30
_USUAL_HOST_SHARE = 4


def host_cache_bytes(config: EngineConfig) -> int:
    """The configured budget, or a quarter of the memory that this process may use, or 2 GiB if that is unknown."""
    if config.host_cache_bytes is not None:
        return config.host_cache_bytes
    memory = memory_bytes()
    return _USUAL_HOST_BYTES if memory is None else memory // _USUAL_HOST_SHARE


def check_budgets(config: EngineConfig, num_shards: int = 1) -> None:
    """Checks that no budget exceeds the available memory or disk space: otherwise the process would be killed, or the
    disk fill up, long after the start.

    Args:
      num_shards: number of devices that the kv heads are split over.

    Raises:
      ConfigError: names the budget, the available and the configured size.
    """
    device, memory = free_device_bytes(num_shards), memory_bytes()
    host, pool = host_cache_bytes(config), config.device_cache_bytes or 0
    if device is not None and pool > device:
        raise ConfigError(
            f"device_cache_bytes: wanted at most {device} (what the model leaves free on devices), got {pool}"
        )
    if memory is not None and host > memory:
        raise ConfigError(
            f"host_cache_bytes: wanted at most {memory} (the memory that this process may use), got {host}"
        )
    if device is None and memory is not None and pool + host > memory:
        raise ConfigError(
            f"device_cache_bytes: wanted at most {memory - host} (the memory that this process may "
            f"use, less host_cache_bytes: the device has none of its own), got {pool}"
        )
    disk = None if config.store is None else disk_bytes(config.store)
    if disk is not None and config.disk_cache_bytes is not None and config.disk_cache_bytes > disk:
        raise ConfigError(
            f"disk_cache_bytes: wanted at most {disk} (the size of the file system of {config.store}), "
            f"got {config.disk_cache_bytes}"
        )


def pool_bytes(config: EngineConfig, kv_spec: KVSpec, max_model_len: int, num_shards: int = 1) -> int:
    """Device memory for KV: the configured budget, or room for four of the longest requests, but at most a quarter of
    the free memory (and at least one such request).

    Args:
      num_shards: number of devices that the kv heads are split over.

    Raises:
      ConfigError: the configured budget is less than the longest request needs.
    """
    least = least_pool_bytes(kv_spec, max_model_len)
    if config.device_cache_bytes:
        if config.device_cache_bytes < least:
            raise ConfigError(
                f"device_cache_bytes: wanted at least {least}, what a request of {max_model_len} tokens "
                f"(max_model_len) needs, or 0, got {config.device_cache_bytes}"
            )
        return config.device_cache_bytes
    return usual_pool_bytes(least, free_device_bytes(num_shards) or memory_bytes())


def least_pool_bytes(kv_spec: KVSpec, max_model_len: int) -> int:
    """Bytes of the pages of a request of `max_model_len` tokens."""
    return kv_spec.num_bytes((num_pages(max_model_len) + _SPARE_PAGES) * PAGE_TOKENS)


def usual_pool_bytes(least: int, free: int | None) -> int:
    """The default size of the pool: `4 * least`, but at most a quarter of the free memory, and at least `least`."""
    return max(least, 4 * least if free is None else min(4 * least, free // 4))


def free_device_bytes(num_shards: int) -> int | None:
    """Free memory of `num_shards` devices like the first; None if the device has no memory of its own or does not
    report it."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return num_shards * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def memory_bytes() -> int | None:
    """Memory of this machine or the limit of this container, whichever is less; None if unknown."""
    found = [int(limit) for limit in map(_content, _CGROUP_LIMITS) if limit.isdecimal()]
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        pass
    return min(found, default=None)


def disk_bytes(url: str) -> int | None:
    """Size of the file system of a `file://` URL; None for other URLs."""
    usage = _file_system(url)
    return None if usage is None else usage.total


def file_system_used(url: str) -> float | None:
    """Share in use, by any files, of the space open to ordinary users on the file system of a `file://` URL; None for
    other URLs."""
    usage = _file_system(url)
    return None if usage is None else usage.used / (usage.used + usage.free)  # the rest is reserved


def _file_system(url: str) -> shutil._ntuple_diskusage | None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "file":
        return None
    path = Path(urllib.parse.unquote(parts.path))
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None  # opening the store will report the problem


def _content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
