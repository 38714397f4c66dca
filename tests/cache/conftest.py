"""Fixtures that several of these tests share. Engines pad to few sizes, as those of tests/engine do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ccjax.cache.snapshot import save as save_module
from tests.cache.snapshots import BYTES
from tests.engine.conftest import events, few_shapes

__all__ = ["events", "few_shapes"]


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots with two variants of `snapshots.BYTES` in a pack, two packs in a part."""
    monkeypatch.setattr(save_module, "PACK_BYTES", 2 * BYTES)
    monkeypatch.setattr(save_module, "PART_BYTES", 4 * BYTES)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a snapshot may go; not there yet."""
    return tmp_path / "a place"
