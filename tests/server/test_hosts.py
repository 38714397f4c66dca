"""scripts/serve.py with one model on two processes: answers, shutdown, and the effect of killing one."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from ccjax.server import ServerSettings
from tests.conftest import ROOT
from tests.server import patience
from tests.server.conftest import StartServer
from tests.server.patience import READY_S
from tests.server.test_startup import (
    DOCUMENTS,
    ONE_SEAT,
    Refusal,
    chat,
    kept,
    refusal,
)
from tests.server.test_startup import environment as usual
from tests.server.test_startup import serving as alone
from tests.store.servers import free_port

__all__ = ["kept", "refusal", "usual"]
CHAT = "/v1/chat/completions"
ASKED = chat(documents=DOCUMENTS, max_tokens=4, reuse="exact")
_DEVICES = "--xla_force_host_platform_device_count="


@pytest.fixture
def environment(usual: dict[str, str]) -> dict[str, str]:
    """The environment of processes with a device each."""
    flags = [flag for flag in usual.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    return usual | {"XLA_FLAGS": " ".join([f"{_DEVICES}1", *flags])}


@contextlib.contextmanager
def serving(environment: dict[str, str], arguments: list[str]) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """The URL of a ready server and its processes, the answering one first."""
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


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, start_server: StartServer) -> tuple[str, dict[str, Any]]:
    """The store of an earlier server in this process, and its answer to `ASKED`."""
    store = f"file://{tmp_path_factory.mktemp('single') / 'store'}"
    with start_server(ServerSettings(), max_model_len=128, tenant_salt="", store=store) as server:
        return store, patience.post(f"{server.url}{CHAT}", json=ASKED).json()


def test_single_process_group_reuses_kv_stored_by_another_server(
    tiny_model: Path, environment: dict[str, str], kept: list[str], single: tuple[str, dict[str, Any]]
) -> None:
    store, *answers = single
    arguments = ["--model", str(tiny_model), *ONE_SEAT, *kept, "--store", store, "--store-refresh-interval-s", "0"]
    group = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "1", "--process-id", "0"]
    with alone([*arguments, *group], environment) as (url, _, process):
        answers.append(patience.post(f"{url}{CHAT}", json=ASKED).json())
        process.send_signal(signal.SIGTERM)
        assert process.wait(READY_S) == 0
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert {entry["tier"] for entry in answers[1]["reuse"]["per_document"]} == {"disk"}


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=READY_S)
    return process.returncode, errors


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_both_processes_serve_requests_and_exit_if_one_is_killed(
    environment: dict[str, str], tiny_model: Path, kept: list[str], single: tuple[str, dict[str, Any]], killed: int
) -> None:
    """Their answers are those of a server on one device."""
    wanted = single[1]["choices"][0]["message"]
    bodies = [{**ASKED, "reuse": reuse} for reuse in ("off", "exact", "exact")]
    with serving(environment, [*small(tiny_model), *kept]) as (url, processes):
        answers = [patience.post(f"{url}{CHAT}", json=body).json() for body in bodies]
        assert [answer["choices"][0]["message"] for answer in answers] == [wanted] * 3
        assert answers[-1]["reuse"]["reused_tokens"] > 0
        processes[killed].kill()
        code, errors = ended(processes[1 - killed])
        assert code != 0
        if killed == 1:  # the leader itself sees it: JAX, which would miss a follower after 100 s only, aborts
            assert code == 1 and "process 1 has gone" in errors, errors


def test_both_processes_end_on_a_signal(environment: dict[str, str], tiny_model: Path, kept: list[str]) -> None:
    with serving(environment, [*small(tiny_model), *kept]) as (_, processes):
        processes[0].terminate()
        assert [ended(process)[0] for process in processes] == [0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as ray is imported
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
        (
            ["--cluster", "ray", "--num-processes", "2"],
            ["--num-processes", "divisor of --tensor-parallel-size 1"],
        ),
    ],
)
def test_incompatible_options_are_refused(refusal: Refusal, arguments: list[str], words: list[str]) -> None:
    line = refusal(["--port", "0", *arguments])
    assert all(word in line for word in words), line


def test_tensor_parallel_size_not_covering_all_devices_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, refusal: Refusal
) -> None:
    """As in each of two processes."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    line = refusal([*small(tiny_model), "--port", "0"])
    assert f"--tensor-parallel-size: wanted {jax.device_count()}, the devices of all 2 processes" in line
