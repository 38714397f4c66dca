"""A real server on a real socket: uvicorn on a thread, the real engine with a tiny model, documents in an index."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from ccjax.engine import Engine
from ccjax.retrieval import Embedder, Retriever
from ccjax.server import ServerSettings, Service, create_app
from tests.engine import few_shapes as sizes
from tests.retrieval.opened import CountingEmbedder
from tests.server import patience
from tests.server.tiny_model import write_tiny_model

if TYPE_CHECKING:
    import openai

DOCUMENTS = {
    "anna.md": "# Anna\n\nAnna lives in Paris. She repairs violins in a small shop by the river.",
    "bob.md": "# Bob\n\nBob works in Rome. He paints houses and drives an old green van.",
    "carla.md": "# Carla\n\nCarla studies whales. Her boat is called Minerva and sails from Lisbon.",
    "dino.md": "# Dino\n\nDino bakes bread in Naples. His oven burns olive wood every morning.",
    "emma.md": "# Emma\n\nEmma teaches chess. Her club meets on Tuesdays in the library of Oslo.",
}
MAX_MODEL_LEN = 512


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server with its engine and retriever, for comparison."""

    url: str
    service: Service
    engine: Engine
    retriever: Retriever
    api_key: str = "none"

    def client(self) -> openai.OpenAI:
        """OpenAI's own client, without its retries: a test sees the first answer."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=60)


StartServer = Callable[..., contextlib.AbstractContextManager[Server]]
"""The fixture `start_server`."""


@pytest.fixture(scope="package", autouse=True)
def few_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes engines pad to few sizes, as in tests/engine, for the life of a shared server."""
    with contextlib.nullcontext() if request.config.getoption("--all") else sizes.few_shapes():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, list(DOCUMENTS.values()))
    return directory


@pytest.fixture(scope="session")
def docs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs")
    for name, text in DOCUMENTS.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope="session")
def start_server(tiny_model: Path, docs_dir: Path) -> StartServer:
    """`start_server(settings, **engine_settings)` runs a server as a context manager; unless it `prepares`, it caches
    only for requests, and without a `frame` only their chunks, as prompts had them."""

    @contextlib.contextmanager
    def start(
        settings: ServerSettings | None = None,
        *,
        prepares: bool = False,
        model: Path = tiny_model,
        embedder: Embedder | None = None,
        **engine_settings: Any,
    ) -> Iterator[Server]:
        settings = (settings or ServerSettings(top_k=2)).model_copy(update={"prepare": prepares})
        engine = Engine.from_pretrained(
            model, **({"max_model_len": MAX_MODEL_LEN, "tenant_salt": "house", "frame": "none"} | engine_settings)
        )
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        retriever = Retriever(
            docs_dir,
            embedder=embedder or CountingEmbedder(),
            count_tokens=lambda text: len(tokenizer.encode(text, allow_special=False)),
            chunk_tokens=60,
        )
        service = Service(settings)
        with running(service) as url:
            assert patience.get(f"{url}/health").json() == {"status": "alive"}
            assert patience.get(f"{url}/ready").status_code == 503
            service.open(engine, retriever)
            assert patience.get(f"{url}/ready").status_code == 200
            yield Server(url, service, engine, retriever, settings.api_key or "none")

    return start


@pytest.fixture(scope="package")
def server(start_server: StartServer) -> Iterator[Server]:
    with start_server() as running_server:
        yield running_server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@contextlib.contextmanager
def running(service: Service) -> Iterator[str]:
    """uvicorn on a free port and a thread of its own; yields the URL."""
    with running_app(create_app(service)) as url:
        yield url


@contextlib.contextmanager
def running_app(app: Any) -> Iterator[str]:
    """The same for any ASGI application."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # soon full if a client does not read
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
