"""httpx's functions with long timeouts, since the default of 5 s fails on a busy machine; and a client that disconnects
when a test wants it."""

import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import httpx

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
