"""`scripts/serve.py --cluster ray` as users run it, with access to its processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from tests.polling import wait_until
from tests.server import patience

READY_S = 240
REPLICA, GENERATOR = "ray::ServeReplica:ccjax:Replica", "ray::ServeReplica:ccjax-generator"
CHAT = "/v1/chat/completions"


@dataclasses.dataclass
class Load:
    """Status codes of requests, and how long each took."""

    statuses: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Serving:
    """A server that answers; of a cluster or alone.

    Attributes:
      log: everything that it and its children wrote to stderr.
    """

    url: str
    process: subprocess.Popen[str]
    log: Path

    def chat(self, question: str, **more) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "retrieval": False, **more}
        return httpx.post(f"{self.url}{CHAT}", json=body, timeout=120)

    def text(self, question: str, **more) -> str:
        answer = self.chat(question, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    def stream(self, question: str, **more) -> list[str]:
        """The lines of a streamed answer, without the empty ones."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "retrieval": False, **more}
        with httpx.stream("POST", f"{self.url}{CHAT}", json={**body, "stream": True}, timeout=120) as answer:
            assert answer.status_code == 200
            return [line.removeprefix("data: ") for line in answer.iter_lines() if line]

    def metrics(self, *, generators: bool = False) -> dict[tuple[str, ...], float]:
        """Value by (name, label values...), labels in order of their names; of all but the generators, or of these."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        chosen = (s for s in samples if ("generator" in s.labels) == generators)
        return {(s.name, *(value for _, value in sorted(s.labels.items()))): s.value for s in chosen}

    def total(self, name: str) -> float:
        """A metric over all replicas and labels."""
        return sum(value for (found, *_), value in self.metrics().items() if found == name)

    def running(self) -> int:
        """Number of replicas that answer, if none is starting or stopping; else 0."""
        counts = httpx.get(f"{self.url}/ready", timeout=60).json()["replicas"]
        return counts.get("running", 0) if len(counts) == 1 else 0

    def pids(self, title: str) -> list[int]:
        """Its descendants whose command line begins with this."""
        parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdecimal()}
        found = []
        for pid in parents:
            above = pid
            while above and above != self.process.pid:
                above = parents.get(above, 0)
            if above and _command(pid).startswith(title):
                found.append(pid)
        return sorted(found)

    def wait_for(self, num_replicas: int) -> None:
        wait_until(lambda: self.running() == num_replicas, timeout_s=READY_S)


QUICK = ("--no-warmup", "--no-prepare", "--port", "0")
DOCUMENTS = ("--docs", "demo", "--search", "lexical")


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, under: Sequence[str] = ()) -> Iterator[Serving]:
    """A server of the demo model that is ready; ended if it did not end by itself.

    Args:
      folder: for its caches and its log; servers with one folder share compiled steps.
      under: a command that runs it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"log-{time.monotonic_ns()}"
    command = [
        *under,
        sys.executable,
        str(ROOT / "scripts/serve.py"),
        "--model",
        "demo",
        *DOCUMENTS,
        *QUICK,
        *arguments,
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment(folder), stdout=subprocess.PIPE, stderr=errors, text=True)
    server = Serving("", process, log)
    try:
        server.url, _ = patience.final_line(process, log)
        yield server
    finally:
        end(server)


def end(server: Serving, timeout_s: float = 60.0) -> int:
    """Sends SIGTERM, then kills the remaining processes; returns the exit code."""
    left = server.pids("")
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        if server.process.stdout is not None:
            server.process.stdout.close()


def refusal(folder: Path, *arguments: str) -> str:
    """The last line on stderr of a start that must fail with exit code 2."""
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--model", "demo", *DOCUMENTS, *QUICK, *arguments]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=READY_S)
    assert done.returncode == 2 and "Ready" not in done.stdout, done.stderr
    return done.stderr.strip().splitlines()[-1]


def documents(name: str, count: int = 3) -> list[dict[str, str]]:
    return [
        {"text": f"Note {number} on {name}: it lies in drawer {number} of the old desk."} for number in range(count)
    ]


@contextlib.contextmanager
def loading(cluster: Serving, num_clients: int = 3, max_tokens: int = 20) -> Iterator[Load]:
    """Results of requests that some clients send continuously, each one after the other."""
    load = Load()
    is_over = threading.Event()

    def client(number: int) -> None:
        count = 0
        while not is_over.is_set():
            count += 1
            started = time.monotonic()
            answer = cluster.chat(
                f"Who is {number}?", documents=documents(f"{number} {count % 5}"), max_tokens=max_tokens
            )
            load.statuses.append(answer.status_code)
            load.seconds.append(time.monotonic() - started)

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(client, number) for number in range(num_clients)]
        try:
            yield load
        finally:
            is_over.set()
        for future in clients:
            future.result()


def environment(folder: Path) -> dict[str, str]:
    """An environment with its own caches."""
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _parent(path: Path) -> int:
    with contextlib.suppress(OSError):
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""
