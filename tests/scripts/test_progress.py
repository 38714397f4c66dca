"""Bars on a terminal; lines elsewhere: one a stage, and at most one every five seconds."""

from __future__ import annotations

import io
import sys

import pytest
from rich.progress import Progress

from ccjax.cli.progress import EVERY_S, Lines, Stages, bars


class Log:
    """What was written, and a clock that is set by hand."""

    def __init__(self, *, in_bytes: bool = False) -> None:
        self.now_s, self.lines = 100.0, []
        self.shown = Lines(get_time=lambda: self.now_s, write=self.lines.append, in_bytes=in_bytes)


def test_stage_is_logged_at_once_and_then_every_five_seconds() -> None:
    log = Log()
    stages = Stages(log.shown, {"read": "Reading documents"})
    for done in range(121):
        log.now_s = 100 + done / 10
        stages("read", done, 120)
    stages("embed", 0, 7)
    stages("empty", 0, 0)
    stages.close()
    log.now_s = 500
    stages("read", 0, 120)  # a refresh of a server that is long ready
    stages("cluster", 0, 1)
    assert log.lines == [
        "[0 s] Reading documents\n",
        "[5 s] Reading documents: 50 of 120\n",
        "[10 s] Reading documents: 100 of 120\n",
        "[12 s] Embed\n",
        "[12 s] Empty: 1 of 1\n",
    ]


def test_lines_of_several_tasks_share_the_interval() -> None:
    log = Log()
    tasks = [log.shown.add_task(name, total=3) for name in ("first", "second")]
    log.now_s += EVERY_S
    for task in tasks:
        log.shown.advance(task)
    assert log.lines == ["[0 s] first\n", "[0 s] second\n", "[5 s] first: 1 of 3\n"]


def test_numbered_descriptions_count_as_one_stage() -> None:
    log = Log()
    task = log.shown.add_task("", total=None)
    for number in range(50):
        log.now_s += 1.0
        log.shown.update(task, description=f"pass {number}")
    assert len(log.lines) == 10 and log.lines[:2] == ["[1 s] pass 0\n", "[6 s] pass 5\n"]
    log.shown.update(task, description="the end")
    assert log.lines[-1] == "[50 s] the end\n"


def test_progress_line_shows_bytes_and_fields() -> None:
    log = Log(in_bytes=True)
    task = log.shown.add_task("Saving", total=3_000_000_000, speed="")
    log.now_s += EVERY_S
    log.shown.update(task, completed=1_500_000_000, speed="30 MB/s")
    assert log.lines[-1] == "[5 s] Saving: 1.5 GB of 3.0 GB, 30 MB/s\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_plain_lines_are_used_without_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with bars() as shown:
        shown.advance(shown.add_task("Loading weights", total=2))
    assert isinstance(shown, Progress) and isinstance(shown, Lines) != is_terminal
    assert "Loading weights" in stream.getvalue()
    assert ("\x1b" in stream.getvalue()) == is_terminal
    if not is_terminal:
        assert stream.getvalue() == "[0 s] Loading weights\n"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with bars(is_quiet=True) as shown:
        shown.advance(shown.add_task("requests", total=2))
    assert capsys.readouterr() == ("", "")
