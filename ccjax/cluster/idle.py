"""How much of this machine's CPUs nobody uses."""

from __future__ import annotations

from collections.abc import Callable

import psutil


def idle_cpus(seconds: float, wait: Callable[[float], object]) -> float:
    """CPUs that did nothing for `seconds`, in all of the machine: 0.5 is half of one. `wait` is what passes the time.

    The kernel counts in hundredths of a second, so that less than 0.1 s tells little.
    """
    psutil.cpu_times_percent()
    wait(seconds)
    spent = psutil.cpu_times_percent()
    return (spent.idle + getattr(spent, "iowait", 0.0)) / 100 * (psutil.cpu_count() or 1)
