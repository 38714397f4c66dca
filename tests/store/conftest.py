"""The kinds of places that the store's tests run on. "s3" is a fast double; in modules with `ON_MOTO = True`, which
test the calls themselves, and everywhere with `--all`, it is moto. `-m rgw` uses Ceph's S3, a real server, instead."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

import ccjax.store.buckets
import ccjax.store.index.database
import ccjax.store.index.outage
import ccjax.store.index.redis
from tests.store import servers
from tests.store.places import KEYS, Place, directory, gs_bucket, s3_bucket

# A test with the argument runs on each of these; see the fixtures below and in test_tiers.py.
KINDS = {
    "place_kind": ["file", "s3", "gs"],
    "bucket_kind": ["s3", "gs"],
    "process_kind": ["file", "s3"],
    "tier_kind": ["host", "file", "both", "s3", "gs"],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    with_ceph = "rgw" in (metafunc.config.getoption("markexpr") or "")
    for name, kinds in KINDS.items():
        if name in metafunc.fixturenames:
            ceph = [pytest.param("rgw", marks=pytest.mark.rgw)] if with_ceph else []
            metafunc.parametrize(name, [*kinds, *ceph])


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """Prevents timeouts on a busy machine; tests of outages set other waits."""
    for name in ("START_S", "ANSWER_S", "TRANSFER_S"):
        monkeypatch.setattr(ccjax.store.buckets, name, 300.0)
    for module in (ccjax.store.index.database, ccjax.store.index.redis):
        monkeypatch.setattr(module, "ANSWER_S", 300.0)


@pytest.fixture
def impatient(monkeypatch, patience) -> None:
    """A shared index that does not answer times out after a second, and is probed without a pause."""
    for module in (ccjax.store.index.database, ccjax.store.index.redis):
        monkeypatch.setattr(module, "ANSWER_S", 1.0)
    monkeypatch.setattr(ccjax.store.index.outage, "PROBE_INTERVAL_S", 0.05)


@pytest.fixture
def num_waits(monkeypatch) -> Callable[[], int]:
    """`num_waits()` is the number of calls so far that waited for a shared index in vain."""
    found = []
    begin = ccjax.store.index.outage.Outage.begin
    monkeypatch.setattr(ccjax.store.index.outage.Outage, "begin", lambda *each: found.append(each) or begin(*each))
    return lambda: len(found)


@pytest.fixture
def stride(request) -> Callable[[int], int]:
    """Tests that damage an object byte by byte take every `stride(number)`-th one, an odd number so that all bits of a
    byte are tested; with `--all` every one."""
    return lambda number: 1 if request.config.getoption("--all") else number


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    with servers.moto() as port:
        yield port


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with servers.double("s3_double") as port:
        yield port


@pytest.fixture(scope="session")
def gs_port() -> Iterator[int]:
    with servers.double("gcs_double") as port:
        yield port


@pytest.fixture(scope="session")
def rgw_port(tmp_path_factory) -> Iterator[int]:
    with servers.ceph(tmp_path_factory.mktemp("ceph")) as port:
        yield port


@pytest.fixture
def port_of(request) -> Callable[[str], int]:
    """`port_of(kind)` is the port of that kind's server, started at the first call."""
    on_moto = request.config.getoption("--all") or getattr(request.module, "ON_MOTO", False)
    return lambda kind: request.getfixturevalue("moto_port" if kind == "s3" and on_moto else f"{kind}_port")


@pytest.fixture
def make_place(tmp_path, port_of, monkeypatch) -> Callable[[str], Place]:
    """`make_place(kind)` creates an empty place, and sets its credentials and server names in the environment."""

    def make(kind: str, port: int | None = None) -> Place:
        prefix = f"a b/{uuid.uuid4().hex}"  # a space, as a reminder that keys are quoted on their way
        if kind == "file":
            return directory(tmp_path / "kv")
        port = port_of(kind) if port is None else port
        if kind == "gs":
            monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
            return gs_bucket(prefix)
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        return s3_bucket(kind, port, prefix)

    return make


@pytest.fixture
def place(place_kind, make_place) -> Place:
    return make_place(place_kind)


@pytest.fixture
def process_place(process_kind, make_place) -> Place:
    """For tests that start processes: a directory, or a bucket of only one kind."""
    return make_place(process_kind)


@pytest.fixture
def bucket(bucket_kind, make_place) -> Place:
    return make_place(bucket_kind)
