"""Shared by benchmarks: machine and versions of a run, its stages, data and passages, statistics of times."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median as median
from typing import TYPE_CHECKING, Any

from ccjax.cli.progress import bars
from ccjax.evaluation.environment import environment as environment
from ccjax.loading.model import DEMO_CORPUS
from ccjax.types import Document

if TYPE_CHECKING:
    import numpy as np

    from ccjax.text import Tokenizer

Say = Callable[[str], None]
"""Shows which stage a run is at."""


class BenchmarkError(Exception):
    """A benchmark cannot be carried out; the message is one line for the user."""


def data_folder(given: Path | None) -> Path:
    """The folder of real traces and texts: as given, as in the environment, or beside the checkout."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(given or os.environ.get("CCJAX_TEST_DATA") or beside)


def existing(path: Path) -> Path:
    """A file of the data folder.

    Raises:
      BenchmarkError: it does not exist.
    """
    if not path.exists():
        raise BenchmarkError(f"wanted {path}, which does not exist; set --data or CCJAX_TEST_DATA")
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; raises as `existing`."""
    return [json.loads(line) for line in existing(path).read_text("utf-8").splitlines()]


def corpus_passages(tokenizer: Tokenizer, count: int, num_tokens: int) -> list[Document]:
    """Passages of about `num_tokens` tokens each: different pieces of the shipped corpus, as long as it lasts."""
    text = " ".join(path.read_text("utf-8") for path in sorted(DEMO_CORPUS.iterdir()))
    ids = tokenizer.encode(text, allow_special=False)
    ids *= -(-count * num_tokens // len(ids))
    return [Document(tokenizer.decode(ids[n * num_tokens : (n + 1) * num_tokens])) for n in range(count)]


@contextlib.contextmanager
def stages() -> Iterator[Say]:
    """A display of the stages of a run."""
    with bars(is_quiet=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process; "RssAnon" is the private part, without mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields[field].split()[0])


def spread(seconds: Sequence[float] | np.ndarray, scale: float = 1e3) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, interpolated as numpy does; None without samples."""
    import numpy as np

    if not len(seconds):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    values = np.asarray(seconds) * scale
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
