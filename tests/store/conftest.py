"""The kinds of places that the store's tests run on. `-m rgw` runs them on Ceph's S3, a real server, instead."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.store import servers
from tests.store.places import KEYS, Place, directory, gs_bucket, s3_bucket

# A test that asks for the argument runs on each of these; see the fixtures below and in test_tiers.py.
KINDS = {
    "place_kind": ["file", "s3", "gs"],
    "bucket_kind": ["s3", "gs"],
    "tier_kind": ["host", "file", "both", "s3", "gs"],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    with_ceph = "rgw" in (metafunc.config.getoption("markexpr") or "")
    for name, kinds in KINDS.items():
        if name in metafunc.fixturenames:
            ceph = [pytest.param("rgw", marks=pytest.mark.rgw)] if with_ceph else []
            metafunc.parametrize(name, [*kinds, *ceph])


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with servers.moto() as port:
        yield port


@pytest.fixture(scope="session")
def gs_port() -> Iterator[int]:
    with servers.gcs_double() as port:
        yield port


@pytest.fixture(scope="session")
def rgw_port(tmp_path_factory) -> Iterator[int]:
    with servers.ceph(tmp_path_factory.mktemp("ceph")) as port:
        yield port


@pytest.fixture
def port_of(request) -> Callable[[str], int]:
    """`port_of(kind)` is the port of that kind's server, started at the first call."""
    return lambda kind: request.getfixturevalue(f"{kind}_port")


@pytest.fixture
def make_place(tmp_path, port_of, monkeypatch) -> Callable[[str], Place]:
    """`make_place(kind)` is an empty place; its credentials and server names are in the environment from then on."""

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
def bucket(bucket_kind, make_place) -> Place:
    return make_place(bucket_kind)
