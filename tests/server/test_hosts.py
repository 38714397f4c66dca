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
from tests.server.test_startup import READY_S, environment, refusal
from tests.server.test_startup import serving as alone
from tests.store.servers import free_port

__all__ = ["environment"]
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Which tool does Yara Ames own?"}], "max_tokens": 8}


@contextlib.contextmanager
def serving(environment: dict[str, str]) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """The URL of a ready server and its processes, the one that answers first."""
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--no-warmup", "--tensor-parallel-size", "2", *group]
    one_device = environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, "--process-id", str(number), "--port", "0"], env=one_device, **pipes)
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


def test_a_group_of_one_is_a_server_like_any_other(environment: dict[str, str]) -> None:
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "1", "--process-id", "0"]
    one_device = environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    with alone(["--no-warmup", *group], one_device) as (url, _, process):
        answer = patience.post(f"{url}{CHAT}", json=BODY).json()
        assert "mallet" in answer["choices"][0]["message"]["content"]
        process.terminate()
        assert process.wait(READY_S) == 0


def ended(process: subprocess.Popen[str], timeout_s: float = READY_S) -> tuple[int, str]:
    _, errors = process.communicate(timeout=timeout_s)
    return process.returncode, errors


def test_both_answer_together_and_end_together(environment: dict[str, str]) -> None:
    with serving(environment) as (url, processes):
        for reuse in ("off", "exact", "exact"):
            answer = patience.post(f"{url}{CHAT}", json={**BODY, "reuse": reuse}).json()
            assert "mallet" in answer["choices"][0]["message"]["content"]
        assert answer["reuse"]["reused_tokens"] > 0
        processes[0].terminate()
        assert [ended(process)[0] for process in processes] == [0, 0]


@pytest.mark.parametrize("killed", [0, 1])
def test_where_one_is_killed_the_other_ends(environment: dict[str, str], killed: int) -> None:
    with serving(environment) as (url, processes):
        assert patience.post(f"{url}{CHAT}", json=BODY).status_code == 200
        processes[killed].kill()
        code, errors = ended(processes[1 - killed], 60)  # JAX itself would miss a host after 100 s
        assert code != 0
        if killed == 1:
            assert "process 1 has gone" in errors


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
        (["--cluster", "ray", "--num-processes", "2"], ["--num-processes", "divisor of --tensor-parallel-size 1"]),
    ],
)
def test_what_does_not_fit_together_is_refused(
    environment: dict[str, str], arguments: list[str], words: list[str]
) -> None:
    line = refusal(["--port", "0", *arguments], environment)
    assert all(word in line for word in words), line


def test_a_split_that_leaves_devices_out_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    one_device = environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--no-warmup", "--port", "0", *group, "--process-id"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(number)], env=one_device, **pipes) for number in range(2)]
    for process in processes:
        code, errors = ended(process)
        assert code == 2 and "--tensor-parallel-size: wanted 2, the devices of all 2 processes" in errors, errors
