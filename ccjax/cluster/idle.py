"""Measures how much of this machine's CPU time is unused."""

from __future__ import annotations

from collections.abc import Callable

import psutil


def idle_cpus(seconds: float, wait: Callable[[float], object]) -> float:
    """Number of idle CPUs of the whole machine over `seconds`: 0.5 is half of one. `wait` passes the time.

    The kernel counts in hundredths of a second, so less than 0.1 s is imprecise.
    """
    psutil.cpu_times_percent()
    wait(seconds)
    spent = psutil.cpu_times_percent()
    return (spent.idle + getattr(spent, "iowait", 0.0)) / 100 * (psutil.cpu_count() or 1)
