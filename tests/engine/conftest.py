"""Fixtures shared by engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
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


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host's actions during prefills, in order: "run0" when it launches layer 0, "wait0" when it waits for it."""
    seen: list[str] = []
    run_layer, block = Pack.run_layer, jax.block_until_ready
    launched: list[tuple[jax.Array, int]] = []

    def run(pack: Pack) -> None:
        seen.append(f"run{pack.layer}")
        run_layer(pack)
        launched.append((pack.hidden, pack.layer - 1))

    def waited(hidden: jax.Array) -> jax.Array:
        seen.extend(f"wait{layer}" for array, layer in launched if array is hidden)
        return block(hidden)

    monkeypatch.setattr(Pack, "run_layer", run)
    monkeypatch.setattr(jax, "block_until_ready", waited)
    return seen
