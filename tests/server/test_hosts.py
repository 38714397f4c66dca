"""scripts/serve.py on two processes that hold one model: answers, the end, and what happens when one is killed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.server import patience
from tests.server.test_startup import READY_S, Refusal, kept, refusal, refusal_by_process
from tests.server.test_startup import environment as usual
from tests.server.test_startup import serving as alone
from tests.store.servers import free_port

__all__ = ["kept", "refusal", "usual"]
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Which tool does Yara Ames own?"}], "max_tokens": 8}
_DEVICES = "--xla_force_host_platform_device_count="
DEMO = ["--model", "demo", "--no-warmup", "--embedder", "lexical"]


@pytest.fixture
def environment(usual: dict[str, str]) -> dict[str, str]:
    """Of processes with a device each."""
    flags = [flag for flag in usual.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    return usual | {"XLA_FLAGS": " ".join([f"{_DEVICES}1", *flags])}


@contextlib.contextmanager
def serving(environment: dict[str, str], arguments: list[str]) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """The URL of a ready server and its processes, the one that answers first."""
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--tensor-parallel-size", "2", *group, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, "--process-id", str(number), "--port", "0"], env=environment, **pipes)
        for number in range(2)
    ]
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:  # gloo's come first
            if found := re.search(r"http://[\d.]+:\d+", line):
                break
        else:
            raise AssertionError(processes[0].communicate()[1])
        yield found[0], processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def small(model: Path) -> list[str]:
    return ["--no-warmup", "--model", str(model), "--max-model-len", "128"]


def test_a_group_of_one_is_a_server_like_any_other(
    environment: dict[str, str], tiny_model: Path, kept: list[str]
) -> None:
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "1", "--process-id", "0"]
    with alone([*small(tiny_model), *kept, *group], environment) as (url, _, process):
        assert patience.post(f"{url}{CHAT}", json=BODY).status_code == 200
        process.terminate()
        assert process.wait(READY_S) == 0


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=READY_S)
    return process.returncode, errors


def test_both_answer_together_and_end_together(environment: dict[str, str]) -> None:
    with serving(environment, DEMO) as (url, processes):
        for reuse in ("off", "exact", "exact"):
            answer = patience.post(f"{url}{CHAT}", json={**BODY, "reuse": reuse}).json()
            assert "mallet" in answer["choices"][0]["message"]["content"]
        assert answer["reuse"]["reused_tokens"] > 0
        processes[0].terminate()
        assert [ended(process)[0] for process in processes] == [0, 0]


@pytest.mark.parametrize("killed", [0, 1])
def test_where_one_is_killed_the_other_ends(
    environment: dict[str, str], tiny_model: Path, kept: list[str], killed: int
) -> None:
    with serving(environment, [*small(tiny_model), *kept]) as (url, processes):
        assert patience.post(f"{url}{CHAT}", json=BODY).status_code == 200
        processes[killed].kill()
        code, errors = ended(processes[1 - killed])
        assert code != 0
        if killed == 1:  # the leader itself sees it: JAX, which would miss a follower after 100 s only, aborts
            assert code == 1 and "process 1 has gone" in errors, errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-processes", "2"], ["--num-processes", "--coordinator-address"]),
        (["--process-id", "1"], ["--process-id", "--coordinator-address"]),
        (["--coordinator-address", "127.0.0.1:1", "--num-processes", "2"], ["--process-id", "0 to", "None of 2"]),
        (
            ["--coordinator-address", "127.0.0.1:1", "--num-processes", "2", "--process-id", "2"],
            ["--process-id", "2 of 2"],
        ),
        (
            ["--cluster", "ray", "--coordinator-address", "127.0.0.1:1"],
            ["--coordinator-address", "--cluster ray"],
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(refusal: Refusal, arguments: list[str], words: list[str]) -> None:
    line = refusal(["--port", "0", *arguments])
    assert all(word in line for word in words), line


def test_processes_that_cannot_share_the_devices_are_refused(environment: dict[str, str]) -> None:
    line = refusal_by_process(["--port", "0", "--cluster", "ray", "--num-processes", "2"], environment)
    assert "--num-processes" in line and "divisor of --tensor-parallel-size 1" in line


def test_a_split_that_leaves_devices_out_is_refused(environment: dict[str, str], tiny_model: Path) -> None:
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    arguments = [*small(tiny_model), "--port", "0", *group, "--process-id"]
    command = [sys.executable, str(ROOT / "scripts/serve.py"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(number)], env=environment, **pipes) for number in range(2)]
    for process in processes:
        code, errors = ended(process)
        assert code == 2 and "--tensor-parallel-size: wanted 2, the devices of all 2 processes" in errors, errors
