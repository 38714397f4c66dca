"""A `scripts/serve.py` process for the serving benchmark, and its /metrics."""

from __future__ import annotations

import collections
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from scripts.benchmarks.common import BenchmarkError

_ROOT = Path(__file__).resolve().parents[2]
_READY_S = 3600.0
"""Compiling every size for the first time takes minutes, on a busy machine many."""
_END_S = 60.0


@contextlib.contextmanager
def serving(arguments: Sequence[str], on_progress: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """Runs a server on a free port; yields its URL once it is ready, and ends it afterwards.

    Args:
      arguments: flags of `scripts/serve.py`.
      on_progress: called with the server's progress while it loads.

    Raises:
      BenchmarkError: it did not start; the message ends with its last output.
    """
    command = [sys.executable, str(_ROOT / "scripts/serve.py"), *arguments, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield _ready_url(process, log, on_progress)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _ready_url(process: subprocess.Popen[str], log: IO[str], on_progress: Callable[[str], None]) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda out: lines.append(out.readline()), args=(process.stdout,), daemon=True)
    reader.start()
    deadline = time.monotonic() + _READY_S
    while reader.is_alive() and time.monotonic() < deadline:
        reader.join(1.0)
        on_progress(f"start the server, {_READY_S - (deadline - time.monotonic()):.0f} s")
    found = re.search(r"http://[^\s]+:\d+", lines[0]) if lines else None
    if found is None:
        log.seek(0)
        words = log.read().strip().splitlines()[-5:]
        raise BenchmarkError("the server did not start: " + (" | ".join(words) or "no output"))
    return found[0]


def scrape(url: str) -> dict[str, float]:
    """The samples of /metrics by name, labels summed up."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=60.0, trust_env=False).text
    values: dict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
    return dict(values)


class Watch:
    """Scrapes a server every `interval_s` on a thread of its own while the context lasts.

    Attributes:
      samples: (seconds since the start, resident bytes, compilations) so far.
    """

    def __init__(self, url: str, interval_s: float) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._url, self._interval_s = url, interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._start = time.monotonic()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        import httpx

        while True:
            with contextlib.suppress(httpx.HTTPError):  # too busy to answer
                found = scrape(self._url)
                memory = found.get("process_resident_memory_bytes", 0.0)
                self.samples.append((time.monotonic() - self._start, memory, found.get("ccjax_compilations_total", 0)))
            if self._stopping.wait(self._interval_s):
                return
