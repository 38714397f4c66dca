"""httpx's functions with long timeouts, since the default of 5 s fails on a busy machine; what waits for a server that
starts and for a warm job; and a client that disconnects when a test wants it."""

import contextlib
import functools
import re
import selectors
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.polling import wait_until

READY_S = 300
get = functools.partial(httpx.get, timeout=60.0)
post = functools.partial(httpx.post, timeout=60.0)


@contextlib.contextmanager
def leaving(url: str, json: Any) -> Iterator[None]:
    """A chat whose client stays while the block runs, and then disconnects without an answer."""
    request = httpx.Request("POST", f"{url}/v1/chat/completions", json=json)
    with socket.create_connection((request.url.host, request.url.port)) as client:
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        client.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        yield


def final_line(process: subprocess.Popen[str], log: Path | None = None) -> tuple[str, str]:
    """URL of a server that starts, and the line in which it says that it is ready; fails, with its stderr or what it
    wrote to `log`, if it ends instead."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(READY_S), "no final line"
    line = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", line)
    assert found is not None, line + (log.read_text() if log else process.stderr.read() if process.stderr else "")
    return found[0], line


def warmed(url: str, admin_key: str, **fields: Any) -> dict[str, Any]:
    """The finished warm job of a body with these fields, or the error if it is refused."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    begun = post(f"{url}/v1/cache/warm", json=fields, headers=headers)
    if begun.status_code != 202:
        return begun.json()["error"]
    found: dict[str, Any] = {}

    def is_over() -> bool:
        found.update(get(f"{url}{begun.headers['location']}", headers=headers).json())
        return found["status"] != "running"

    wait_until(is_over)
    return found
