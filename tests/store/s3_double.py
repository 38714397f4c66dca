"""A stand-in for S3: `python -m tests.store.s3_double` prints its port and serves until killed.

It supports tensorstore's calls (PUT, GET with ranges, HEAD, DELETE, listing in pages) and enforces `If-None-Match` and
`If-Match` under one lock, on which commits depend. It ignores signatures; `PUT /.key/KEY` makes KEY the only access key
that it accepts, and others are refused as AWS refuses expired ones. It is ten times as fast as moto, on which the tests
of the calls themselves run, and with `--all` every test.

Buckets: "chunks"; any other is missing.
"""

from __future__ import annotations

import hashlib
import threading
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.store.gcs_double import PAGE, ObjectHandler, Server

_objects: dict[str, bytes] = {}
_keys: list[str] = []
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_lock = threading.Lock()


class Handler(ObjectHandler):
    def do_PUT(self) -> None:
        content = self.read_body()
        if content is None:
            return
        name = self._target()
        with _lock:
            if self._bucket == ".key":
                _keys[:] = [name]
            status = None if self._bucket == ".key" else self._refusal(name)
            if status is None and self._bucket != ".key":
                _objects[name] = content
        self._answer(status or 200, headers={} if status else {"ETag": _etag(content)})

    def do_GET(self) -> None:
        name = self._target()
        with _lock:
            status, content = self._refusal(name), _objects.get(name)
            listed = [] if name else sorted(_objects.items())
        if status is not None:
            self._answer(status)
        elif not name:
            self._answer(200, self._page(listed))
        else:
            assert content is not None
            self._download(content)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        name = self._target()
        with _lock:
            status = self._refusal(name)
            if status is None:
                _objects.pop(name, None)
        self._answer(status or 204)

    def _target(self) -> str:
        """The object of /BUCKET[/NAME]."""
        parts = urlsplit(self.path)
        self._query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self._bucket, _, name = parts.path.lstrip("/").partition("/")
        return unquote(name)

    def _refusal(self, name: str) -> int | None:
        """The status of a request that is refused."""
        if self._bucket != "chunks":
            return 404
        if _keys and f"Credential={_keys[0]}/" not in self.headers.get("Authorization", ""):
            return 400
        there = _objects.get(name)
        match, no_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if there is None:
            return 404 if match is not None or self.command in ("GET", "HEAD") and name else None
        if match is not None and match != _etag(there):
            return 412
        if no_match is not None and no_match in ("*", _etag(there)):
            return 304 if self.command in ("GET", "HEAD") else 412
        return None

    def _page(self, listed: list[tuple[str, bytes]]) -> bytes:
        prefix, after = self._query.get("prefix", ""), self._query.get("start-after", "")
        after = max(after, bytes.fromhex(self._query.get("continuation-token", "")).decode())
        found = [(name, content) for name, content in listed if name.startswith(prefix) and name > after]
        page = found[:PAGE]
        parts = [f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size></Contents>" for name, content in page]
        if len(found) > PAGE:
            parts.append(f"<NextContinuationToken>{page[-1][0].encode().hex()}</NextContinuationToken>")
        head = f"<Name>chunks</Name><KeyCount>{len(page)}</KeyCount>"
        head += f"<IsTruncated>{str(len(found) > PAGE).lower()}</IsTruncated>"
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f"<ListBucketResult {space}>{head}{''.join(parts)}</ListBucketResult>".encode()

    def _download(self, content: bytes) -> None:
        headers = {"ETag": _etag(content)}
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

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        body = _EXPIRED if status == 400 else body
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
