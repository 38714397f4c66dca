"""Fixtures that several engine tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ccjax.engine import prefill
from ccjax.engine.snapshot import save as save_module
from ccjax.models.llama3.steps import LayerOutput, layer_step
from tests.engine import few_shapes as sizes
from tests.engine.snapshots import BYTES


@pytest.fixture(scope="module", autouse=True)
def few_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines pad to few sizes; with `--all`, and in modules that have a fixture of this name, to those they list."""
    if request.config.getoption("--all"):
        yield
        return
    with sizes.few_shapes():
        yield


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots with two variants of `snapshots.BYTES` in a pack, two packs in a part."""
    monkeypatch.setattr(save_module, "PACK_BYTES", 2 * BYTES)
    monkeypatch.setattr(save_module, "PART_BYTES", 4 * BYTES)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a snapshot may go; not there yet."""
    return tmp_path / "a place"


class _Pending:
    """Hidden states of a layer that tell when they are waited for."""

    def __init__(self, array, number: int, events: list[str]) -> None:
        self.array, self.number, self.events = array, number, events

    def block_until_ready(self):
        self.events.append(f"wait{self.number}")
        return self.array.block_until_ready()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does during prefills, in order: "run0" when layer 0 is handed to the device, "wait0" when the host
    waits for it. Layers are counted through, over all prefills; logits cannot be computed meanwhile."""
    seen: list[str] = []

    def step(layer, x, *args, **kwargs) -> LayerOutput:
        number = sum(event.startswith("run") for event in seen)
        seen.append(f"run{number}")
        out = layer_step(layer, x.array if isinstance(x, _Pending) else x, *args, **kwargs)
        return out._replace(x=_Pending(out.x, number, seen))

    monkeypatch.setattr(prefill, "layer_step", step)
    return seen
