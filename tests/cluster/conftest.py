"""Three servers with one tiny model: one to compare with, two that are the replicas of a front."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from ccjax.cluster.front import Front
from ccjax.retrieval import Retriever
from ccjax.server import ServerSettings, create_app
from tests.cluster.local import ADMIN_KEY, API_KEY, MAX_BODY_BYTES, LocalReplicas, running_front
from tests.polling import wait_until
from tests.server.conftest import Server, docs_dir, few_shapes, start_server, tiny_model

if TYPE_CHECKING:
    import openai

__all__ = ["docs_dir", "few_shapes", "start_server", "tiny_model"]
SETTINGS = ServerSettings(top_k=2, api_key=API_KEY, admin_key=ADMIN_KEY, max_body_bytes=MAX_BODY_BYTES, repair=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that start a real cluster, except with `-m cluster`."""
    if "cluster" not in (config.getoption("markexpr") or ""):
        ours = [item for item in items if item.nodeid.startswith("tests/cluster/")]
        left_out = {item for item in ours if item.get_closest_marker("cluster")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@dataclasses.dataclass
class Cluster:
    """A front on a socket, with its replicas.

    Attributes:
      searcher: the front's own retriever.
    """

    url: str
    front: Front
    replicas: LocalReplicas
    servers: tuple[Server, ...]
    searcher: Retriever

    def client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=60)

    def post(self, path: str, json, key: str | None = API_KEY) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=json, headers=bearer(key), timeout=60)

    def ask(self, method: str, path: str, json=None) -> httpx.Response:
        """Sends a call with the admin key."""
        return httpx.request(method, f"{self.url}{path}", json=json, headers=bearer(ADMIN_KEY), timeout=60)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="package")
def servers(start_server) -> Iterator[tuple[Server, ...]]:
    """The one to compare with, and two replicas."""
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(start_server(SETTINGS)) for _ in range(3))


@pytest.fixture
def cluster(tiny_model, servers) -> Iterator[Cluster]:
    """A front of its own over the two replicas."""
    replicas = LocalReplicas(*(create_app(server.service) for server in servers[1:]))
    with running_front(tiny_model, servers[0], replicas) as (front, url):
        yield Cluster(url, front, replicas, servers[1:], servers[0].retriever)
        wait_until(lambda: all(server.service.backend.worker.is_idle for server in servers))
