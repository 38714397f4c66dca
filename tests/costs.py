"""What tests cost, by folder and by cause: `make test ARGS="-p tests.costs --costs build/costs"` writes it down, and
`python -m tests.costs build/costs` prints the table of docs/testing.md.

Seconds of tracing and compiling are those that jax reports, in all threads; "children" is the processor time of
processes that a test started and waited for, its own imports of jax among it.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_EVENTS = {
    "jaxpr_trace": "tracing",
    "jaxpr_to_mlir": "lowering",
    "backend_compile": "compiling",
}
COLUMNS = ("tests", "wall", "own", "children", "tracing", "lowering", "compiling", "compiled", "sleeping")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FOLDER", help="where what each test cost is written")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--costs")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.pluginmanager.register(_Costs(folder / f"{worker}.jsonl"))


class _Costs:
    """Writes a line for each test of a process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: collections.Counter[str] = collections.Counter()
        self._is_listening = False
        sleep = time.sleep

        def counted(seconds: float) -> None:
            if threading.current_thread() is threading.main_thread():
                self._seconds["sleeping"] += seconds
            sleep(seconds)

        time.sleep = counted

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._listen()
        before = self._now()
        result = yield
        self._listen()
        row = {name: round(value - before.get(name, 0.0), 3) for name, value in self._now().items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"test": item.nodeid, **row}) + "\n")
        return result

    def _listen(self) -> None:
        """From when a test has imported jax."""
        if self._is_listening or "jax" not in sys.modules:
            return
        import jax.monitoring

        def heard(event: str, seconds: float, **_: object) -> None:
            for part, name in _EVENTS.items():
                if part in event:
                    self._seconds[name] += seconds
                    self._seconds["compiled"] += name == "compiling"

        jax.monitoring.register_event_duration_secs_listener(heard)
        self._is_listening = True

    def _now(self) -> dict[str, float]:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "wall": time.monotonic(),
            "own": own.ru_utime + own.ru_stime,
            "children": children.ru_utime + children.ru_stime,
            **self._seconds,
        }


def table(folder: Path, depth: int = 2) -> str:
    """Markdown: the most expensive first, by the first `depth` parts of a test file's path."""
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in folder.glob("*.jsonl"):
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            name = "/".join(row.pop("test").partition("::")[0].split("/")[:depth])
            for one in (name, "all"):
                sums[one].update(row | {"tests": 1})
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, cost in sorted(sums.items(), key=lambda item: -item[1]["own"] - item[1]["children"]):
        lines.append(f"| {name} | {' | '.join(f'{cost[column]:,.0f}' for column in COLUMNS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2))
