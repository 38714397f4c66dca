"""Locations of the tests' stores, with direct access to the objects: a directory, or a bucket of one of the servers."""

from __future__ import annotations

import dataclasses
import os
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts

import ccjax.store.buckets
from ccjax.store import StoreIdentity
from tests.store.kv import OURS

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTEST12345", "AWS_SECRET_ACCESS_KEY": "secretsecret12345678"}


@dataclasses.dataclass(frozen=True)
class Place:
    """A store URL, and the objects below it by key, accessed by tensorstore's `spec` without our code.

    Attributes:
      kind: "file", "s3" (a mock), "gs" (a double) or "rgw" (S3 of Ceph).
    """

    kind: str
    url: str
    spec: dict[str, Any]

    def below(self, name: str) -> Place:
        """Another root below this one."""
        base, mark, options = self.url.partition("?")
        spec = {**self.spec, "path": f"{self.spec['path']}{name}/"}
        return Place(self.kind, f"{base}/{name}{mark}{options}", spec)

    def _kv(self) -> ts.KvStore:
        return ts.KvStore.open(self.spec).result()

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in self._kv().list().result())

    def read(self, key: str) -> bytes:
        found = self._kv().read(key).result()
        assert found.state == "value", key
        return found.value

    def write(self, key: str, data: bytes) -> None:
        if self.kind == "file":  # tensorstore would make every single one durable
            file = Path(self.spec["path"]) / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        else:
            self._kv().write(key, data).result()

    def delete(self, key: str) -> None:
        assert key in self.keys()
        self._kv().write(key, None).result()

    def record_key(self, variant_id: str, identity: StoreIdentity = OURS) -> str:
        return f"{identity.namespace}/records/{variant_id}.json"

    def object_keys(self, identity: StoreIdentity = OURS) -> list[str]:
        return [key for key in self.keys() if key.startswith(f"{identity.namespace}/data/")]

    def num_bytes(self) -> int:
        """Bytes of all data objects and records of our namespace."""
        folders = (f"{OURS.namespace}/data/", f"{OURS.namespace}/records/")
        return sum(len(self.read(key)) for key in self.keys() if key.startswith(folders))

    def flip(self, key: str, position: int, mask: int = 1) -> None:
        raw = bytearray(self.read(key))
        raw[position] ^= mask
        self.write(key, bytes(raw))

    def let_pass(self, seconds: float, patch: pytest.MonkeyPatch) -> None:
        """Makes all existing objects `seconds` and a minute older."""
        if self.kind == "file":
            then = time.time() - seconds - 60
            for file in Path(self.spec["path"]).rglob("*"):
                os.utime(file, (then, then))
        else:
            patch.setattr(ccjax.store.buckets, "time", _Later(seconds + 60))


class _Later:
    """The module `time`, some seconds fast."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, seconds: float):
        self._seconds = seconds

    def time(self) -> float:
        return time.time() + self._seconds

    def time_ns(self) -> int:
        return time.time_ns() + int(self._seconds * 1e9)


def directory(path: Path) -> Place:
    """The file root at `path`."""
    return Place("file", path.as_uri(), {"driver": "file", "path": f"{path}/", "file_io_locking": {"mode": "none"}})


def s3_bucket(kind: str, port: int, prefix: str) -> Place:
    """Bucket "chunks" of an S3 server on this machine."""
    endpoint = f"http://127.0.0.1:{port}"
    spec = {"driver": "s3", "bucket": "chunks", "path": f"{prefix}/", "endpoint": endpoint, "aws_region": "us-east-1"}
    url = f"s3://chunks/{urllib.parse.quote(prefix)}?endpoint={endpoint}&region=us-east-1"
    return Place(kind, url, {**spec, "aws_credentials": {"type": "environment"}})


def gs_bucket(prefix: str) -> Place:
    """Bucket "chunks" of the server that TENSORSTORE_GCS_HTTP_URL names."""
    return Place(
        "gs", f"gs://chunks/{urllib.parse.quote(prefix)}", {"driver": "gcs", "bucket": "chunks", "path": f"{prefix}/"}
    )
