"""Fixtures shared by engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ccjax.engine import Engine
from ccjax.runner.pack import Pack
from tests.engine import few_shapes as sizes
from tests.engine.documents import engines, write_model


@pytest.fixture(scope="module", autouse=True)
def few_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines pad to few sizes; with `--all`, or in modules that override this fixture, to all listed sizes."""
    if request.config.getoption("--all"):
        yield
        return
    with sizes.few_shapes():
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store that does not exist yet."""
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the words of `tests.engine.documents`."""
    return write_model(tmp_path_factory)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Engine]]:
    """`start(**settings)` returns an engine of that model, closed at the end."""
    with engines(model) as start:
        yield start


class _Pending:
    """Hidden states of a layer that record when the host waits for them."""

    def __init__(self, pack: Pack, events: list[str]) -> None:
        self._array, self._layer, self._events = pack.hidden, pack.layer - 1, events

    def block_until_ready(self) -> None:
        if self._layer >= 0:
            self._events.append(f"wait{self._layer}")
        self._array.block_until_ready()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host's actions during prefills, in order: "run0" when it launches layer 0, "wait0" when it waits for it."""
    seen: list[str] = []
    run_layer = Pack.run_layer

    def run(pack: Pack) -> None:
        seen.append(f"run{pack.layer}")
        run_layer(pack)

    monkeypatch.setattr(Pack, "run_layer", run)
    monkeypatch.setattr(Pack, "hidden", property(lambda pack: _Pending(pack, seen)))
    monkeypatch.setattr(Pack, "wait", lambda pack: pack.hidden.block_until_ready())
    return seen
