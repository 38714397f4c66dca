"""Starts the servers of the bucket tests, each a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.places import KEYS

ROOT = Path(__file__).resolve().parents[2]

# A bucket must exist before a store is opened in it, and tensorstore creates none.
_MAKE_BUCKET = """
import sys, boto3
from botocore.config import Config
client = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1",
                      config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}))
client.create_bucket(Bucket="chunks")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def make_bucket(port: int) -> None:
    command = [sys.executable, "-c", _MAKE_BUCKET, f"http://127.0.0.1:{port}"]
    subprocess.run(command, env={**os.environ, **KEYS}, check=True, timeout=120)


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """The port of a mock of S3 that holds the bucket "chunks"."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("needs moto: pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/chunks", method="PUT")
        urllib.request.urlopen(request, timeout=120).close()  # it wants no signature
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def double(name: str) -> Iterator[int]:
    """The port of a double of ours: of Google Cloud Storage ("gcs_double") or S3 ("s3_double")."""
    command = [sys.executable, "-m", f"tests.store.{name}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def gcs_double() -> contextlib.AbstractContextManager[int]:
    """The port of the double of Google Cloud Storage."""
    return double("gcs_double")


@contextlib.contextmanager
def ceph(folder: Path) -> Iterator[int]:
    """The port of Ceph's S3 gateway, before a cluster of one monitor and one disk on the loopback interface."""
    missing = [tool for tool in ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin") if shutil.which(tool) is None]
    if missing:
        packages = "ceph-mon ceph-osd radosgw ceph-common"
        pytest.skip(f"needs {', '.join(missing)}: apt-get install --no-install-recommends {packages}")
    port = free_port()
    script = Path(__file__).with_name("start_ceph.sh")
    environment = {**os.environ, **KEYS}
    subprocess.run(["bash", script, folder, str(port), str(free_port())], env=environment, check=True, timeout=300)
    try:
        make_bucket(port)
        yield port
    finally:
        for pid_file in (folder / "run").glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), 9)


def _wait_for(port: int, process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=120).close()
                return
            except urllib.error.URLError as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    return
        time.sleep(0.05)
    raise RuntimeError(f"the server on port {port} did not start; exit code {process.poll()}")
