"""A real Redis for tests, which can be killed, stopped for a while and emptied. Tests are skipped where none is
installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class RedisServer:
    """One server process on `port`; `start` begins it, again too, from what `save` wrote last or empty."""

    def __init__(self, folder: Path, password: str | None, arguments: Sequence[str]) -> None:
        self.folder = folder
        self._arguments = arguments
        self.port = free_port()
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        credentials = "" if self._password is None else f":{self._password}@"
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert self._process is None
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        command += [*self._arguments, *([] if self._password is None else ["--requirepass", self._password])]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64)[:5] in (b"+PONG", b"-NOAU"):
                    return
            assert self._process.poll() is None and time.monotonic() < end_s, "redis-server does not start"
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def run(self, *command: str) -> str:
        """What redis-cli prints."""
        arguments = ["redis-cli", "-p", str(self.port), *command]
        return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120).stdout


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def redis_server(password: str | None = None, arguments: Sequence[str] = ()) -> Iterator[RedisServer]:
    """A server that runs, with more `arguments`; it is gone afterwards."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    pytest.importorskip("redis", reason="needs the package redis: pip install 'ccjax[test]'")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), password, arguments)
        try:
            server.start()
            yield server
        finally:
            server.kill()
