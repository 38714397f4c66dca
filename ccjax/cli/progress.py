"""Progress of long commands on stderr: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, ProgressColumn, Task, TaskID

EVERY_S = 5.0


def bars(*columns: ProgressColumn, is_quiet: bool = False, in_bytes: bool = False) -> Progress:
    """Progress display on stderr: a bar per task on a terminal, else lines (`Lines`).

    Args:
      columns: of the bars; None for rich's own.
      is_quiet: show nothing.
      in_bytes: tasks count bytes.
    """
    console = Console(stderr=True)
    if is_quiet or console.is_terminal:
        return Progress(*columns, console=console, disable=is_quiet)
    return Lines(in_bytes=in_bytes)


class Lines(Progress):
    """Reports tasks in lines: one for each new description, else at most one every `EVERY_S` seconds.

    Descriptions that differ only in numbers count as one, so that counters ("pass 3") do not flood a log.
    """

    def __init__(
        self,
        *,
        in_bytes: bool = False,
        get_time: Callable[[], float] | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        """Args:
        get_time: the clock, in seconds.
        write: takes a line with its end; stderr by default."""
        super().__init__(console=Console(stderr=True), disable=True, auto_refresh=False, get_time=get_time)
        self._in_bytes = in_bytes
        self._write = write or (lambda line: print(line, end="", file=sys.stderr, flush=True))
        self._began_s = self._printed_s = self.get_time()
        self._known: set[str] = set()

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        """As of `Progress`."""
        task_id = super().add_task(description, *args, **kwargs)
        self._print(task_id)
        return task_id

    def update(self, task_id: TaskID, **changes: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As of `Progress`."""
        super().update(task_id, **changes)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As of `Progress`."""
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        with self._lock:
            task, now_s = self._tasks[task_id], self.get_time()
            stage = re.sub(r"\d+", "", task.description)
            if not task.description or (stage in self._known and now_s - self._printed_s < EVERY_S):
                return
            self._known.add(stage)
            self._printed_s = now_s
            self._write(f"[{now_s - self._began_s:.0f} s] {task.description}{self._how_far(task)}\n")

    def _how_far(self, task: Task) -> str:
        number = (lambda count: decimal(int(count))) if self._in_bytes else "{:,.0f}".format
        counts = ([number(task.completed)] if task.completed else []) + (
            [f"of {number(task.total)}"] if task.completed and task.total else []
        )
        parts = [" ".join(counts), *map(str, task.fields.values())]
        told = ", ".join(part for part in parts if part)
        return f": {told}" if told else ""


class Stages:
    """Shows (stage, done, total) as reported by the library: a bar per stage, from its first call on."""

    def __init__(self, shown: Progress, names: Mapping[str, str] | None = None) -> None:
        """`names`: display names of stages."""
        self.shown, self._names = shown, names or {}
        self._tasks: dict[str, TaskID] = {}
        self._closed = False

    def __call__(self, stage: str, done: int, total: int, **fields: Any) -> None:
        if self._closed:
            return
        # A stage may have nothing to do; without a total its bar would seem to run forever.
        done, total = done if total else 1, total or 1
        if stage not in self._tasks:
            self.shown.start()
            name = self._names.get(stage, stage.capitalize())
            self._tasks[stage] = self.shown.add_task(name, total=total, completed=done, **fields)
        self.shown.update(self._tasks[stage], completed=done, total=total, **fields)

    def close(self) -> None:
        """Leaves the bars as they are; what is reported later, such as each refresh of a server, is not shown."""
        self._closed = True
        if self._tasks:  # without any, rich would print an empty line
            self.shown.stop()
