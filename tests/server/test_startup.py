"""scripts/serve.py as users run it: a process of its own, its arguments, its errors, its end."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ccjax.engine import Engine
from ccjax.engine.loading import DEMO_CORPUS, DEMO_MODEL
from scripts.serving.values import num_bytes
from tests.conftest import ROOT
from tests.server import patience

READY_S = 120


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own: nothing is written to the user's caches."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/serve.py"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(arguments: list[str], environment: dict[str, str]) -> str:
    """The last line on stderr of a start that must fail."""
    with start(arguments, environment) as process:
        output, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 2, errors
    assert output == "" and "Traceback" not in errors
    lines = [line for line in errors.splitlines() if not line.startswith(("usage", " ", "Loading weights"))]
    assert len(lines) == 1, errors
    return lines[0]


@contextlib.contextmanager
def serving(arguments: list[str], environment: dict[str, str]) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A ready server: its URL, its final line, its process, which is ended if it has not ended."""
    with start([*arguments, "--port", "0"], environment) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                assert selector.select(READY_S), "no final line"
            line = process.stdout.readline()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found is not None, line + process.stderr.read()
            yield found[0], line, process
        finally:
            process.kill()


def test_help_is_quick_and_names_every_flag(environment: dict[str, str]) -> None:
    started = time.monotonic()
    with start(["--help"], environment) as process:
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
    assert time.monotonic() - started < 5  # importing jax alone would take most of that on a busy machine
    for flag in (
        "--model",
        "--store",
        "--strategy",
        "--docs",
        "--max-queue",
        "--request-timeout-s",
        "--no-warmup",
        "--api-key",
    ):
        assert flag in output
    code = (
        "import sys; import scripts.serve as s; s.parser(); sys.exit('jax' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 0


@pytest.mark.parametrize(
    "text, wanted",
    [("0", 0), ("1073741824", 2**30), ("2GiB", 2**31), ("1.5k", 1500), ("500MB", 5 * 10**8), ("3 ti", 3 * 2**40)],
)
def test_sizes(text: str, wanted: int) -> None:
    assert num_bytes(text) == wanted


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "1.2.3", "ten", "1i"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2GiB"):
        num_bytes(text)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "no-such-model"], ["--model", "demo", "no-such-model"]),
        (["--strategy", "magic"], ["--strategy", "cachecraft", "magic"]),
        (["--alpha", "-1"], ["--alpha", "-1"]),
        (["--ranking-layers", "0-1"], ["--ranking-layers", "0,1", "0-1"]),
        (["--ranking-layers", "0,99"], ["--ranking-layers", "layers below", "99"]),
        (["--max-model-len", "999999"], ["--max-model-len", "1024", "999999"]),
        (["--host-cache-bytes", "4000TiB"], ["--host-cache-bytes", "memory"]),
        (["--attention", "abacus"], ["--attention", "abacus"]),
        (["--eviction-policy", "mru"], ["--eviction-policy", "saved_seconds", "'mru'"]),
        (["--dtype", "float8"], ["--dtype", "bfloat16", "float8"]),
        (["--disk-kv-dtype", "int4"], ["--disk-kv-dtype", "int8", "int4"]),
        (["--disk-compression", "lz4"], ["--disk-compression", "zstd", "lz4"]),
        (["--docs", "/no/such/folder"], ["--docs", "directory", "/no/such/folder"]),
        (["--embedder", "/no/such/encoder", "--docs", "."], ["--embedder", "/no/such/encoder"]),
        (["--store", "carrier-pigeon://coop"], ["--store", "carrier-pigeon"]),
        (["--reuse", "sometimes"], ["--reuse", "bounded", "sometimes"]),
        (["--top-k", "0"], ["--top-k", "1", "0"]),
        (["--store", "file:///tmp/never", "--store-index", "redis://:hidden@"], ["--store-index: wanted redis://"]),
        (["--store-index", "sqlite:///tmp/never.db"], ["--store-index: wanted a store"]),
        (["--store-refresh-interval-s", "-1"], ["--store-refresh-interval-s", "positive", "-1"]),
        (["--host", "no.such.host.invalid"], ["--host", "no.such.host.invalid"]),
        (["--port", "70000"], ["--port", "65535", "70000"]),
        (["--max-queue", "0"], ["--max-queue", "positive", "0"]),
        (["--flow-share", "0"], ["--flow-share", "above 0", "0"]),
        (["--request-timeout-s", "-1"], ["--request-timeout-s", "positive", "-1"]),
        (["--stall-timeout-s", "0"], ["--stall-timeout-s", "above 0", "0"]),
        (["--host-cache-bytes", "2XB"], ["--host-cache-bytes", "2GiB", "2XB"]),
        (["--modell", "x"], ["--modell"]),
    ],
)
def test_bad_arguments_end_with_one_line(
    tiny_model: Path, environment: dict[str, str], arguments: list[str], words: list[str]
) -> None:
    defaults = ["--model", str(tiny_model), "--port", "0", "--no-warmup"]
    line = refusal([*defaults, *arguments], environment)
    assert line.startswith("serve.py: error: ")
    for word in words:
        assert word in line


def test_a_port_in_use_is_named(tiny_model: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = refusal(["--model", str(tiny_model), "--port", port], environment)
    assert "--port" in line and f"127.0.0.1:{port}" in line and "in use" in line


def test_a_store_of_another_format_is_named(tiny_model: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    store = tmp_path / "store"
    Engine.from_pretrained(tiny_model, store=f"file://{store}").close()
    file = store / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 999}))
    line = refusal(["--model", str(tiny_model), "--port", "0", "--store", f"file://{store}"], environment)
    assert "--store" in line and "999" in line


def test_a_folder_without_documents_is_named(tiny_model: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "blank.txt").write_text(" ")
    arguments = ["--model", str(tiny_model), "--port", "0", "--embedder", "lexical", "--docs", str(docs)]
    with start(arguments, environment) as process:
        _, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 2 and "Traceback" not in errors
    assert re.search(r"serve.py: error: --docs: .*blank.txt.*empty", errors)


def test_it_warms_up_answers_and_ends_when_told(tiny_model: Path, docs_dir: Path, environment: dict[str, str]) -> None:
    arguments = ["--model", str(tiny_model), "--docs", str(docs_dir), "--embedder", "lexical", "--chunk-tokens", "40"]
    arguments += ["--max-model-len", "128", "--top-k", "1", "--host-cache-bytes", "1MiB", "--system-prompt", "Answer."]
    arguments += ["--served-model-name", "house", "--max-num-seqs", "2"]
    with serving(arguments, environment) as (url, line, process):
        assert re.search(rf"house over \d+ passages of 5 documents on {url} .*curl -s {url}/v1/chat", line)
        assert patience.get(f"{url}/ready").json() == {"status": "ready", "model": "house"}
        messages = [{"role": "user", "content": "Who bakes bread?"}]
        body = {"messages": messages, "max_tokens": 40, "stream": True, "seed": 1, "temperature": 1.0}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)  # the answer that runs is finished first
            rest = list(lines)
        assert "data: [DONE]" in rest and '"finish_reason":"' in rest[-4]
        assert '"id":"dino.md#' in rest[-4]
        assert process.wait(30) == 0
        assert process.stdout is not None and process.stdout.read() == ""
        assert process.stderr is not None
        errors = process.stderr.read()
        assert "Traceback" not in errors
        for stage in ("Loading weights", "Reading documents", "Embedding passages", "Compiling"):
            assert stage in errors
    cache = Path(environment["XDG_CACHE_HOME"]) / "ccjax"
    assert any((cache / "compile").iterdir()) and any((cache / "index").iterdir())


def chat(**fields: object) -> dict:
    return {"messages": [{"role": "user", "content": "Who bakes bread?"}], "ignore_eos": True, **fields}


ONE_SEAT = ["--no-warmup", "--max-model-len", "512", "--max-num-seqs", "1", "--no-repair"]


def test_told_to_end_it_answers_all_it_took_and_refuses_the_rest(
    tiny_model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    arguments = ["--model", str(tiny_model), *ONE_SEAT, "--store", f"file://{tmp_path / 'store'}"]
    with (
        serving(arguments, environment) as (url, _, process),
        concurrent.futures.ThreadPoolExecutor(3) as pool,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        running = pool.submit(client.post, "/v1/chat/completions", json=chat(max_tokens=440, reuse="off"))
        wait_for(client, "ccjax_num_requests_running 1.0")
        documents = [{"text": "Dino bakes bread in Naples, every morning."}]
        in_line = [
            pool.submit(client.post, "/v1/chat/completions", json=chat(max_tokens=4, documents=documents))
            for _ in range(2)
        ]
        wait_for(client, "ccjax_num_requests_waiting 2.0")
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while client.get("/ready").status_code == 200:
            assert time.monotonic() < deadline
        assert client.get("/ready").json() == {"status": "shutting down"}
        for refused in (
            patience.post(f"{url}/v1/chat/completions", json=chat(max_tokens=1)),  # a connection of its own
            client.post("/v1/completions", json={"prompt": "x"}),
        ):
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
            assert int(refused.headers["retry-after"]) >= 1
        assert not running.done()
        assert client.get("/health").status_code == 200
        assert [answer.result().status_code for answer in (running, *in_line)] == [200] * 3
        assert running.result().json()["usage"]["completion_tokens"] == 440
        assert process.wait(30) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    with Engine.from_pretrained(tiny_model, store=f"file://{tmp_path / 'store'}") as engine:
        assert engine.num_variants  # what was computed in the meantime was written out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_twice_it_ends_at_once(tiny_model: Path, environment: dict[str, str], number: signal.Signals) -> None:
    arguments = ["--model", str(tiny_model), *ONE_SEAT]
    with serving(arguments, environment) as (url, _, process), concurrent.futures.ThreadPoolExecutor(9) as pool:
        slow = [
            pool.submit(httpx.post, f"{url}/v1/chat/completions", json=chat(max_tokens=440), timeout=600)
            for _ in range(8)
        ]
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_for(client, "ccjax_num_requests_waiting 7.0")
            process.send_signal(number)
            deadline = time.monotonic() + 30
            while client.get("/ready").status_code == 200:
                assert time.monotonic() < deadline
            assert process.poll() is None and not any(answer.done() for answer in slow)
            process.send_signal(number)
            assert process.wait(20) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
        assert [answer.result().status_code for answer in slow] == [503] * 8


def wait_for(client: httpx.Client, line: str) -> None:
    """Until the metrics have a line."""
    deadline = time.monotonic() + 60
    while line not in client.get("/metrics").text.splitlines():
        assert time.monotonic() < deadline, f"never {line}"
        time.sleep(0.01)


def test_it_ends_while_it_still_loads(tiny_model: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with start(["--model", str(tiny_model), "--port", str(port)], environment) as process:  # a warm-up of a minute
        deadline = time.monotonic() + READY_S
        ready = None
        while time.monotonic() < deadline and (ready is None or ready.json().get("stage") != "compile"):
            with contextlib.suppress(httpx.TransportError):
                ready = patience.get(f"http://127.0.0.1:{port}/ready")
            time.sleep(0.1)
        assert ready is not None and ready.status_code == 503 and ready.json()["status"] == "loading"
        refused = patience.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        assert patience.get(f"http://127.0.0.1:{port}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and output == "" and "Traceback" not in errors


def test_a_store_serves_a_second_run(tiny_model: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "documents": [{"text": "Dino bakes bread in Naples, every morning."}],
        "max_tokens": 4,
        "reuse": "exact",
    }
    arguments = ["--model", str(tiny_model), "--no-warmup", "--store", f"file://{tmp_path / 'store'}"]
    arguments += ["--max-model-len", "128", "--no-repair", "--store-refresh-interval-s", "0"]
    answers = []
    for _ in range(2):
        with serving(arguments, environment) as (url, _, process):
            answers.append(patience.post(f"{url}/v1/chat/completions", json=body, timeout=60).json())
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert {entry["tier"] for entry in answers[1]["reuse"]["per_document"]} == {"disk"}


@pytest.mark.skipif(
    not (DEMO_MODEL / "config.json").exists() or not DEMO_CORPUS.is_dir(), reason="the demo model is not built yet"
)
def test_the_demo_runs_without_any_argument(environment: dict[str, str]) -> None:
    with serving(["--no-warmup", "--embedder", "lexical"], environment) as (url, line, _):
        assert "demo over" in line
        messages = [{"role": "user", "content": "What is in the documents?"}]
        answer = patience.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 8}, timeout=60)
        assert answer.status_code == 200 and answer.json()["documents"]


def test_the_memory_plan_alone_needs_no_weights_and_no_port(environment: dict[str, str]) -> None:
    model = ["--print-memory-plan", "--dtype", "bfloat16", "--device-memory-bytes", "80GB", "--model"]
    with start([*model, "random:llama3-8b", "--gpu-memory-utilization", "0.9"], environment) as process:
        output, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 0 and errors == ""
    assert re.search(r"weights +16,060\.5 +8\.03 billion parameters", output)
    assert re.search(r"left +8,000\.0 +of 80\.0 GB: as given", output)
    with start([*model, "random:llama3-70b"], environment) as process:
        output, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 2 and "left             -" in output
    assert errors.startswith("serve.py: error: --model: wanted 147.2 GB of each device")
    assert "what fits: tensor_parallel_size 2" in errors


def test_a_start_prints_the_memory_plan(environment: dict[str, str]) -> None:
    with serving(["--no-docs", "--no-warmup", "--gpu-memory-utilization", "0.2"], environment) as (_, _, process):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert re.search(r"Memory of the device, MB:\n +weights +6\.5 +1\.62 million parameters\n", errors)
    assert "the machine's memory without host_cache_bytes" in errors
