"""A stand-in for Google Cloud Storage: `python -m tests.store.gcs_double` prints its port and serves until killed.

It supports tensorstore's calls of the JSON API (upload, download with ranges, listing in pages, deletion), and enforces
`ifGenerationMatch` and `ifGenerationNotMatch` under one lock, on which commits depend. No package has a fully
compatible server, so features of Google's own are not tested: quotas, retention, its credentials, its exact errors.

Buckets: "chunks"; "forbidden" answers 403; "lax" ignores preconditions; any other is missing.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 20
"""Names per page of a listing: few, so that tests read several pages."""

_objects: dict[tuple[str, str], tuple[int, bytes]] = {}  # (bucket, name) -> (generation, content)
_lock = threading.Lock()
_generations = itertools.count(1_700_000_000_000_000)


class ObjectHandler(BaseHTTPRequestHandler):
    """Base of the request handlers of both doubles."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()  # else the client waits a second before it sends the body
        return True

    def read_body(self) -> bytes | None:
        """The whole body, or None if the client was killed in the middle."""
        length = int(self.headers.get("Content-Length", 0))
        content = self.rfile.read(length)
        self.close_connection |= len(content) < length
        return content if len(content) == length else None


class Handler(ObjectHandler):
    def do_POST(self) -> None:
        content = self.read_body()
        if content is None:
            return
        bucket, _ = self._target()
        name = self._query.get("name", "")
        with _lock:
            refusal = self._refusal(bucket, name)
            if not refusal:
                entry = _objects[bucket, name] = (next(_generations), content)
        if refusal:
            return self._answer(refusal)
        self._answer(200, _resource(bucket, name, entry))

    def do_GET(self) -> None:
        bucket, name = self._target()
        with _lock:
            refusal = self._refusal(bucket, name)
            entry = _objects.get((bucket, name))
            listed = sorted((key, entry) for (home, key), entry in _objects.items() if home == bucket)
        if refusal:
            return self._answer(refusal)
        if not name:
            return self._answer(200, self._page(bucket, listed))
        if entry is None:
            return self._answer(404)
        if self._query.get("alt") != "media":
            return self._answer(200, _resource(bucket, name, entry))
        self._download(*entry)

    def do_DELETE(self) -> None:
        bucket, name = self._target()
        with _lock:
            refusal = self._refusal(bucket, name)
            gone = None if refusal else _objects.pop((bucket, name), None)
        self._answer(refusal or (204 if gone else 404))

    def _target(self) -> tuple[str, str]:
        """Bucket and object of [/upload]/storage/v1/b/BUCKET/o[/NAME]."""
        parts = urlsplit(self.path)
        self._query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        _, _, rest = parts.path.partition("/b/")
        bucket, _, name = rest.partition("/o")
        return bucket, unquote(name.removeprefix("/"))

    def _refusal(self, bucket: str, name: str) -> int | None:
        """The status of a request that is refused."""
        if bucket not in ("chunks", "lax"):
            return 403 if bucket == "forbidden" else 404
        generation = _objects.get((bucket, name), (0, b""))[0]
        match, no_match = self._query.get("ifGenerationMatch"), self._query.get("ifGenerationNotMatch")
        if bucket != "lax" and match is not None and int(match) != generation:
            return 412
        if bucket != "lax" and no_match is not None and int(no_match) == generation:
            return 304 if self.command == "GET" else 412
        return None

    def _page(self, bucket: str, listed: list[tuple[str, tuple[int, bytes]]]) -> dict[str, Any]:
        prefix, start, end = (self._query.get(key) for key in ("prefix", "startOffset", "endOffset"))
        token = bytes.fromhex(self._query.get("pageToken", "")).decode()
        found = [
            (key, entry)
            for key, entry in listed
            if key.startswith(prefix or "") and (start or "") <= key and (end is None or key < end) and key > token
        ]
        page: dict[str, Any] = {"kind": "storage#objects", "items": [_resource(bucket, *each) for each in found[:PAGE]]}
        if len(found) > PAGE:  # in hex, because clients send tokens back as they are, unquoted
            page["nextPageToken"] = found[PAGE - 1][0].encode().hex()
        return page

    def _download(self, generation: int, content: bytes) -> None:
        headers = {"x-goog-generation": str(generation)}
        wanted = self.headers.get("Range")
        if not wanted:
            return self._answer(200, content, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(len(content), int(last) + 1) if first and last else len(content)
        if start >= end:
            return self._answer(416)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._answer(206, content[start:end], headers)

    def _answer(self, status: int, body: bytes | dict[str, Any] = b"", headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        for key, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(raw)
        self.wfile.flush()


def _resource(bucket: str, name: str, entry: tuple[int, bytes]) -> dict[str, Any]:
    generation, content = entry
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": bucket,
        "generation": str(generation),
        "metageneration": "1",
        "size": str(len(content)),
    }


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # clients may be killed; anything else is a mistake here


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
