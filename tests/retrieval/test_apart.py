"""What is called in processes of their own: each call begins anew, and none harms the next."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import ccjax.retrieval.apart as apart
import ccjax.retrieval.pdf as reader
from ccjax.retrieval.apart import Apart
from tests.conftest import ROOT
from tests.polling import wait_until
from tests.retrieval.pdfs import BOMBS, block, pdf

LIMITS = {"most_memory": 1 << 30, "most_seconds": 20}
OS = "__import__('os')."


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that were started and fork."""
    processes: list[subprocess.Popen[bytes]] = []
    start: Any = subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> Any:
        processes.append(start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(apart.subprocess, "Popen", recorded)
    yield processes
    for process in processes:
        process.kill()


def evaluated(call: Apart, expression: str) -> Any:
    return call(expression.encode(), **LIMITS)


def test_each_call_has_a_process_of_its_own_and_all_are_forked_by_one(started: list[Any]) -> None:
    call = Apart("builtins", "eval", idle_seconds=600)
    pids = f"[{OS}getpid(), {OS}getppid(), {OS}environ.setdefault('OWN', str({OS}getpid()))]"
    own = [evaluated(call, pids) for _ in "abc"]
    assert len({pid for pid, _, _ in own}) == 3 and all(kept == str(pid) for pid, _, kept in own)
    assert {parent for _, parent, _ in own} == {started[0].pid} and len(started) == 1


def test_many_files_are_read_by_one_process_also_behind_one_that_is_refused(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_read_apart", Apart(reader.__name__, "read_here", idle_seconds=600))
    monkeypatch.setattr(reader, "_MOST_MEMORY", 300 << 20)
    monkeypatch.setattr(reader, "_MOST_SECONDS", 3)
    for name in ("one", "two", "three"):
        assert reader.read_pdf(pdf([block([f"This is page {name}."])]))[1] == f"This is page {name}."
        with pytest.raises(ValueError, match="^too large"):
            reader.read_pdf(BOMBS["fax"])
    assert len(started) == 1


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (f"{OS}abort()", "ended with -6"),
        (f"{OS}_exit(3)", "ended with 3"),
        ("int('x')", "invalid literal"),
        ("[0][1]", "IndexError: list index"),
        ("__import__('sys').exit(0)", "SystemExit: 0"),
        ("len(bytearray(1 << 31))", "over 1024 MB of memory"),
        ("{*()}", "TypeError: .* not JSON"),
        ("(lambda f: f(f))(lambda f: f(f))", "RecursionError"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_call_is_answered(expression: str, reason: str) -> None:
    call = Apart("builtins", "eval")
    with pytest.raises(ValueError, match=reason):
        evaluated(call, expression)
    assert evaluated(call, "1 + 1") == 2


def test_a_process_that_ends_is_replaced_once_and_then_the_content_cannot_be_read_now(started: list[Any]) -> None:
    call = Apart("builtins", "eval", idle_seconds=600)
    assert evaluated(call, "1") == 1
    started[0].kill()
    started[0].wait()
    assert evaluated(call, "2") == 2 and len(started) == 2
    with pytest.raises(OSError, match="^the process that reads it ended$"):
        evaluated(call, f"{OS}kill({OS}getppid(), 9)")
    assert evaluated(call, "3") == 3


def test_what_a_parser_prints_is_no_reply() -> None:
    call = Apart("builtins", "eval")
    assert evaluated(call, "print('x' * 100_000, flush=True)") is None
    assert evaluated(call, "'y' * 100_000") == "y" * 100_000


def test_one_that_waits_for_nothing_ends_and_another_is_started(started: list[Any]) -> None:
    call = Apart("builtins", "eval", idle_seconds=0.01)
    for number in range(2):
        assert evaluated(call, f"{number}") == number
        wait_until(lambda: started[-1].poll() is not None)
    assert len(started) == 2


def test_a_fork_of_the_caller_has_its_own() -> None:
    code = """
import os
from ccjax.retrieval.apart import Apart
call = Apart("builtins", "eval", idle_seconds=600)
ask = lambda text: call(text.encode(), most_memory=1 << 30, most_seconds=20)
parents = [ask("__import__('os').getppid()")]
begin, end = os.pipe()
if not os.fork():
    os.write(end, str(ask("__import__('os').getppid()")).encode())
    os._exit(0)
parents += [int(os.read(begin, 99)), ask("__import__('os').getppid()")]
print(parents[0] == parents[2] != parents[1])
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n", ended.stderr
