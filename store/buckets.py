"""Small objects in a bucket of S3, of an S3-compatible server, or of Google Cloud Storage. An unreachable bucket delays
one call by seconds; later calls fail at once until it answers again."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorstore as ts

from ccjax.store.errors import CommitUnknownError, StoreUnavailableError

START_S = 10.0
"""Timeout of the first request, which may include connecting and finding credentials."""

ANSWER_S = 3.0
"""Timeout for a small object: the delay of the one request that detects an outage."""

TRANSFER_S = 60.0
"""Timeout for the KV of a variant, or for a listing."""

PROBE_INTERVAL_S = 5.0
"""Pause between two probes of a bucket that did not answer."""

# Prefixes of tensorstore's errors that mean no answer, or a server that is temporarily unavailable.
_NO_ANSWER = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_NO_ACCESS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL: Failed to get credentials")

# tensorstore's default of 32 attempts takes minutes.
_RETRIES = {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}

# tensorstore has no other setting for these. By default it waits 5 minutes for a connection and forever for an answer,
# and holds its read buffer in the meantime.
_PATIENCE = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "5",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or use an instance role",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`",
}


class BucketRoot:
    """Everything below `s3://bucket/prefix` or `gs://bucket/prefix`, a `store.objects.Root`.

    `s3://` has two options: `?endpoint=http://host:9000` names a server other than AWS, and `region=eu-west-3` avoids
    looking up the region of the bucket. Credentials are found in the same way as by the clouds' own tools, first in the
    environment: AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS.
    TENSORSTORE_GCS_HTTP_URL names a server other than Google's.

    Bucket listings contain no ages, so ids begin with the writer's clock. The sweep of orphans is correct as long as
    the clocks of all writers differ by much less than `store.namespaces.ORPHAN_AGE_S`; an object that is swept too
    early becomes a miss, never wrong data.

    Raises (constructor):
      ValueError: a malformed URL, or options unknown for its scheme.
      StoreUnavailableError: the bucket or credentials are missing, access is denied, the server does not answer or lets
        a second writer overwrite an object that the first one created. With `read_only` nothing is checked.
    """

    num_parallel = 16

    def __init__(self, url: str, *, read_only: bool = False):
        self.url = url
        self._spec, resources = _parse(url)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self.context = ts.Context(resources)
        self.longest_wait_s = TRANSFER_S
        self._lock = threading.Lock()
        self._down: str | None = None
        self._next_probe_s = 0.0
        self._probe: Any = None
        try:
            self._kv = ts.KvStore.open(self._spec, context=self.context).result(timeout=START_S)
        except ValueError as error:
            raise ValueError(f"store: cannot parse {url!r}: {_reason(error)}") from error
        self._absent = b""
        if read_only:
            return
        try:
            self._absent, is_safe = self._try_out()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"store: cannot use {url}: {self._advice(error.__cause__)}") from error
        if not is_safe:
            raise StoreUnavailableError(
                f"store: cannot use {url}: the server ignores the condition of a write, so that a second writer "
                "overwrites the first one's commit. Wanted conditional writes, as in S3, Google's and Ceph's storage"
            )

    def _try_out(self) -> tuple[bytes, bool]:
        """The generation that means "no such object", and whether a conditional create of an existing object fails."""
        probe = f".probe-{self.new_id()}"
        absent = self._wait(self._live().read(probe), START_S).stamp.generation
        self.replace(probe, b"first")  # unconditional: otherwise a missing bucket looks like a lost race
        refused = not self._wait(self._live().write(probe, b"second", if_equal=absent)).generation
        self.delete(probe)
        return absent, refused

    def _advice(self, error: BaseException | None) -> str:
        reason = _reason(error)
        bucket = self._spec["bucket"]
        if reason.startswith("NOT_FOUND"):
            return f"there is no bucket {bucket!r}. Create it first; this program does not create buckets"
        if reason.startswith(_NO_ACCESS):
            return (
                f"access to bucket {bucket!r} was refused ({reason}). Set {_CREDENTIALS[self._spec['driver']]}; "
                "wanted credentials that may list, read, write and delete"
            )
        return f"{reason}. Wanted a bucket that this process can list, read, write and delete in"

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return {**self._spec, "path": f"{self._spec['path']}{prefix}/"}

    def folder(self, prefix: str) -> Path | None:
        return None

    def new_id(self) -> str:
        return f"{time.time_ns() // 1_000_000:012x}{uuid.uuid4().hex[:20]}"

    def age_s(self, key: str) -> float:
        stamps = re.findall(r"[0-9a-f]{32}", key.rpartition("/")[2])
        return max(0.0, time.time() - int(stamps[-1][:12], 16) / 1000) if stamps else 0.0

    # -- outages -----------------------------------------------------------------------------------------------

    def outage(self) -> StoreUnavailableError | None:
        with self._lock:
            if self._down is None:
                return None
            error = StoreUnavailableError(f"store: {self.url} did not answer recently: {self._down}")
            if time.monotonic() < self._next_probe_s:
                return error
            self._next_probe_s = time.monotonic() + PROBE_INTERVAL_S
            probe = self._probe = self._kv.read(".probe")  # whether it exists does not matter
        probe.add_done_callback(self._probed)  # outside the lock: it may run at once
        return error

    def _probed(self, probe: Any) -> None:
        if not probe.cancelled() and probe.exception() is None:
            with self._lock:
                self._down = None

    def record_failure(self, error: Exception) -> None:
        if isinstance(error, TimeoutError) or str(error).startswith(_NO_ANSWER):
            with self._lock:
                if self._down is None:
                    self._next_probe_s = 0.0  # probe at once: a single write may fail for other reasons
                self._down = _reason(error)

    def _live(self) -> ts.KvStore:
        """The bucket, for a new call. Raises StoreUnavailableError during an outage."""
        outage = self.outage()
        if outage is not None:
            raise outage
        return self._kv

    def _wait(self, call: Any, longest_s: float | None = None) -> Any:
        """The result of a future. Raises StoreUnavailableError, with the cause."""
        longest_s = ANSWER_S if longest_s is None else longest_s
        failure: Exception
        try:
            return call.result(timeout=longest_s)
        except TimeoutError:
            failure = TimeoutError(f"no answer within {longest_s:g} s")
        except ValueError as error:
            failure = error
        self.record_failure(failure)
        raise StoreUnavailableError(f"store: {self.url}: {_reason(failure)}") from failure

    # -- objects -----------------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        found = self._wait(self._live().read(key))
        return found.value if found.state == "value" else None

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        assert self._absent, "opened read_only"  # without it the write would be unconditional
        bucket = self._live()
        try:
            # A failed condition does not raise; the result has no generation. (`if_equal=b""` would be no condition.)
            if self._wait(bucket.write(key, data, if_equal=self._absent)).generation:
                return True
            # The object may be our own: the reply to the first attempt was lost, and tensorstore retried.
            found = self.read(key)
        except StoreUnavailableError as error:
            raise CommitUnknownError(str(error)) from error
        if found is None:
            raise StoreUnavailableError(f"store: {self.url}: cannot create {key}, though there is none: bucket gone?")
        return found == data

    def replace(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._wait(self._live().write(key, data))

    def make_prefix(self, prefix: str) -> None:
        self._live()  # buckets have no folders, but this fails early during an outage

    def names(self, prefix: str) -> list[str]:
        keys = self._list(_below(prefix) if prefix else ts.KvStore.KeyRange())
        start = len(prefix) + 1 if prefix else 0
        return sorted({key[start:].partition("/")[0] for key in keys})

    def left_overs(self, prefixes: Iterable[str]) -> list[str]:
        return self._list(ts.KvStore.KeyRange(".probe-", ".probe."))  # "." follows "-"

    def _list(self, keys: ts.KvStore.KeyRange) -> list[str]:
        return [key.decode(errors="replace") for key in self._wait(self._live().list(keys), TRANSFER_S)]

    def move(self, key: str, new_key: str) -> None:
        data = self.read(key)
        if data is not None:
            self.replace(new_key, data)
            self._wait(self._live().write(key, None))

    def delete(self, key: str) -> None:
        bucket = self._live()
        below, itself = bucket.delete_range(_below(key)), bucket.write(key, None)  # concurrently
        self._wait(itself)
        self._wait(below, TRANSFER_S)


def _below(prefix: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(f"{prefix}/", f"{prefix}0")  # "0" follows "/"


def _reason(error: BaseException | None) -> str:
    return str(error).partition(" [")[0]  # without the whole HTTP response


def _parse(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """tensorstore's kvstore spec of a bucket URL, and its context resources.

    Raises:
      ValueError: the URL is malformed or has unknown options.
    """
    parts = urllib.parse.urlsplit(url)
    prefix = urllib.parse.unquote(parts.path).strip("/")
    options = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    driver = {"s3": "s3", "gs": "gcs"}[parts.scheme]
    known = {"endpoint", "region"} if driver == "s3" else set()
    if "@" in parts.netloc:
        raise ValueError(f"store: wanted no credentials in the URL; set {_CREDENTIALS[driver]}")
    if not parts.netloc or parts.fragment or {".", ".."} & set(prefix.split("/")) or "//" in prefix:
        raise ValueError(f"store: wanted {parts.scheme}://bucket/prefix, got {url!r}")
    if not options.keys() <= known or any(len(values) != 1 or not values[0] for values in options.values()):
        allowed = "?endpoint=http://host:port and region=NAME, each once," if known else "none"
        raise ValueError(f"store: wanted {allowed} as options of {parts.scheme}://bucket/prefix, got {url!r}")
    spec: dict[str, Any] = {"driver": driver, "bucket": parts.netloc, "path": f"{prefix}/" if prefix else ""}
    if driver == "gcs":
        return spec, {"gcs_request_retries": _RETRIES}
    for endpoint in options.get("endpoint", ()):
        server = urllib.parse.urlsplit(endpoint)
        if server.scheme not in ("http", "https") or not server.hostname:
            raise ValueError(f"store: endpoint: wanted http://host:port or https://host, got {endpoint!r}")
        spec["endpoint"] = endpoint.rstrip("/")
    for region in options.get("region", ()):
        spec["aws_region"] = region
    # Otherwise the credential chain writes a line to stderr for each source without credentials.
    kind = "environment" if "AWS_ACCESS_KEY_ID" in os.environ else "default"
    return spec, {"s3_request_retries": _RETRIES, "aws_credentials": {"type": kind}}
