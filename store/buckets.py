"""Small objects in a bucket of S3, of an S3-compatible server, or of Google Cloud Storage. An unreachable bucket delays
one call by seconds; later calls fail at once until it answers again."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable
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
"""Pause between two probes of a bucket that did not answer, and between two readings of credentials."""

# Prefixes of tensorstore's errors that mean no answer, or a server that is temporarily unavailable.
_NO_ANSWER = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_NO_ACCESS = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "INTERNAL: Failed to get credentials",
    # S3's own codes.
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
)

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
    TENSORSTORE_GCS_HTTP_URL names a server other than Google's. Those of S3 are read again when access is denied, since
    they may have been replaced; until they work, the bucket counts as not answering.

    Bucket listings contain no ages, so ids begin with the writer's clock. The sweep of orphans is correct as long as
    the clocks of all writers differ by much less than `store.namespaces.ORPHAN_AGE_S`; an object that is swept too
    early becomes a miss, never wrong data.

    Raises (constructor):
      ValueError: a malformed URL, or options unknown for its scheme.
      StoreUnavailableError: the bucket or credentials are missing, access is denied, the server does not answer or lets
        a second writer overwrite an object that the first one created. With `read_only` nothing is checked, and with
        `is_optional` `begin` does so if the server does not answer.
    """

    num_parallel = 16

    def __init__(self, url: str, *, read_only: bool = False, is_optional: bool = False):
        self.url = url
        self._is_read_only = read_only
        self._spec, _ = _parse(url)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self.longest_wait_s = TRANSFER_S
        self._lock = threading.Lock()
        self._down: str | None = None
        self._next_probe_s = self._next_reading_s = 0.0
        self._probe: Any = None
        try:
            self.context, self._kv = self._opened()
        except ValueError as error:
            raise ValueError(f"store: cannot parse {url!r}: {_reason(error)}") from error
        self._absent = b""
        try:
            self.begin()
        except StoreUnavailableError as error:
            if not is_optional or self._down is None or _is_denied(self._down) or error.__cause__ is None:
                raise

    def begin(self) -> None:
        """As `Root`. Raises StoreUnavailableError, as the constructor."""
        if self._is_read_only or self._absent:
            return
        url = self.url
        try:
            absent, is_safe = self._try_out()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"store: cannot use {url}: {self._advice(error.__cause__ or error)}") from error
        if not is_safe:
            raise StoreUnavailableError(
                f"store: cannot use {url}: the server ignores the condition of a write, so that a second writer "
                "overwrites the first one's commit. Wanted conditional writes, as in S3, Google's and Ceph's storage"
            )
        self._absent = absent

    def _opened(self) -> tuple[ts.Context, ts.KvStore]:
        """The bucket with the credentials that there are now."""
        spec, resources = _parse(self.url)
        context = ts.Context(resources)
        return context, ts.KvStore.open(spec, context=context).result(timeout=START_S)

    def renew(self, error: Exception) -> bool:
        return _is_denied(_reason(error)) and self._read_credentials(self._kv)

    def _read_credentials(self, refused: ts.KvStore) -> bool:
        """Opens the bucket again, which refused access; False if that was done a moment ago. (A context keeps the
        credentials that it found first.)"""
        with self._lock:
            if self._kv is not refused:
                return True
            if time.monotonic() < self._next_reading_s:
                return False
            self._next_reading_s = time.monotonic() + PROBE_INTERVAL_S
        try:
            context, bucket = self._opened()
        except (ValueError, TimeoutError):
            return False
        with self._lock:
            self.context, self._kv = context, bucket
        return True

    def _try_out(self) -> tuple[bytes, bool]:
        """The generation that means "no such object", and whether a conditional create of an existing object fails."""
        probe = f".probe-{self.new_id()}"
        absent = self._call(lambda bucket: bucket.read(probe), START_S).stamp.generation
        self.replace(probe, b"first")  # unconditional: otherwise a missing bucket looks like a lost race
        refused = not self._call(lambda bucket: bucket.write(probe, b"second", if_equal=absent)).generation
        self.delete(probe)
        return absent, refused

    def _advice(self, error: BaseException | None) -> str:
        reason = _reason(error)
        bucket = self._spec["bucket"]
        if reason.startswith("NOT_FOUND"):
            return f"there is no bucket {bucket!r}. Create it first; this program does not create buckets"
        if _is_denied(reason):
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
            is_denied = _is_denied(self._down)
            what = "refused access" if is_denied else "did not answer recently"
            error = StoreUnavailableError(f"store: {self.url} {what}: {self._down}")
            if time.monotonic() < self._next_probe_s:
                return error
            self._next_probe_s = time.monotonic() + PROBE_INTERVAL_S
            bucket = self._kv
        if is_denied:
            self._read_credentials(bucket)
        with self._lock:
            probe = self._probe = self._kv.read(".probe")  # whether it exists does not matter
        probe.add_done_callback(self._probed)  # outside the lock: it may run at once
        return error

    def _probed(self, probe: Any) -> None:
        if not probe.cancelled() and probe.exception() is None:
            with self._lock:
                self._down = None

    def record_failure(self, error: Exception) -> bool:
        if isinstance(error, StoreUnavailableError):  # from here
            return True
        is_outage = isinstance(error, TimeoutError) or str(error).startswith(_NO_ANSWER) or _is_denied(_reason(error))
        if is_outage and not self.renew(error):
            with self._lock:
                if self._down is None:
                    self._next_probe_s = 0.0  # probe at once: a single write may fail for other reasons
                self._down = _reason(error)
        return is_outage

    def _live(self) -> ts.KvStore:
        """The bucket, for a new call. Raises StoreUnavailableError during an outage."""
        outage = self.outage()
        if outage is not None:
            raise outage
        return self._kv

    def _call(self, start: Callable[[ts.KvStore], Any], longest_s: float | None = None) -> Any:
        """The result of the future that `start` returns; again with new credentials if access is denied. Raises
        StoreUnavailableError, with the cause."""
        longest_s = ANSWER_S if longest_s is None else longest_s
        failure: Exception
        for is_last in (False, True):
            bucket = self._live()
            try:
                return start(bucket).result(timeout=longest_s)
            except TimeoutError:
                failure = TimeoutError(f"no answer within {longest_s:g} s")
            except ValueError as error:
                failure = error
            if is_last or not _is_denied(_reason(failure)) or not self._read_credentials(bucket):
                break
        self.record_failure(failure)
        raise StoreUnavailableError(f"store: {self.url}: {_reason(failure)}") from failure

    # -- objects -----------------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        found = self._call(lambda bucket: bucket.read(key))
        return found.value if found.state == "value" else None

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        assert not self._is_read_only, "opened read_only"
        self._live()
        if not self._absent:  # without it the write would be unconditional
            raise StoreUnavailableError(f"store: {self.url} was not tried out yet")
        try:
            # A failed condition does not raise; the result has no generation. (`if_equal=b""` would be no condition.)
            if self._call(lambda bucket: bucket.write(key, data, if_equal=self._absent)).generation:
                return True
            # The object may be our own: the reply to the first attempt was lost, and tensorstore retried.
            found = self.read(key)
        except StoreUnavailableError as error:
            raise CommitUnknownError(str(error)) from error
        if found is None:
            raise StoreUnavailableError(f"store: {self.url}: cannot create {key}, though there is none: bucket gone?")
        return found == data

    def replace(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._call(lambda bucket: bucket.write(key, data))

    def make_prefix(self, prefix: str) -> None:
        self._live()  # buckets have no folders, but this fails early during an outage

    def names(self, prefix: str) -> list[str]:
        keys = self._list(_below(prefix) if prefix else ts.KvStore.KeyRange())
        start = len(prefix) + 1 if prefix else 0
        return sorted({key[start:].partition("/")[0] for key in keys})

    def left_overs(self, prefixes: Iterable[str]) -> list[str]:
        return self._list(ts.KvStore.KeyRange(".probe-", ".probe."))  # "." follows "-"

    def _list(self, keys: ts.KvStore.KeyRange) -> list[str]:
        return [key.decode(errors="replace") for key in self._call(lambda bucket: bucket.list(keys), TRANSFER_S)]

    def move(self, key: str, new_key: str) -> None:
        data = self.read(key)
        if data is not None:
            self.replace(new_key, data)
            self._call(lambda bucket: bucket.write(key, None))

    def delete(self, key: str) -> None:
        below: list[Any] = []

        def start(bucket: ts.KvStore) -> Any:
            below[:] = [bucket.delete_range(_below(key))]  # concurrently
            return bucket.write(key, None)

        self._call(start)
        self._call(lambda _: below[0], TRANSFER_S)


def _is_denied(reason: str) -> bool:
    return any(name in reason for name in _NO_ACCESS)


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
    # Otherwise the credential chain writes a line to stderr for each source without credentials, and it reads no file
    # unless a profile is named.
    credentials = {"type": "default", "profile": os.environ.get("AWS_PROFILE") or "default"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        credentials = {"type": "environment"}
    return spec, {"s3_request_retries": _RETRIES, "aws_credentials": credentials}
