"""Budgets above the machine end the start, by name and figure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ccjax.engine import EngineConfig
from ccjax.errors import ConfigError
from ccjax.runner import budgets
from ccjax.runner.budgets import check_budgets, disk_bytes, memory_bytes
from tests.engine.helpers import TinyModel

MODEL = TinyModel()


def test_memory_and_disk_sizes_of_the_machine_are_detected(tmp_path):
    total_kb = int(
        next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    )
    memory = memory_bytes()
    assert memory is not None and 1 << 28 < memory <= total_kb << 10
    assert disk_bytes(f"file://{tmp_path}/not/made/yet%20") == shutil.disk_usage(tmp_path).total
    assert disk_bytes("s3://bucket/prefix") is None


@pytest.mark.parametrize(("limit", "memory"), [("max", None), ("1048576", 1 << 20), ("", None)])
def test_memory_limit_of_a_container_is_respected(tmp_path, monkeypatch, limit, memory):
    (tmp_path / "memory.max").write_text(limit + "\n")
    whole = memory_bytes()
    monkeypatch.setattr(budgets, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(tmp_path / "memory.max")))
    assert memory_bytes() == memory or (memory is None and memory_bytes() >= whole)


def test_host_cache_defaults_to_a_quarter_of_the_memory(monkeypatch):
    memory = memory_bytes()
    with MODEL.engine() as engine:
        assert engine.cache.usage()["host"].budget_bytes == memory // 4
    with MODEL.engine(host_cache_bytes="3MiB") as engine:
        assert engine.cache.usage()["host"].budget_bytes == 3 << 20
    monkeypatch.setattr(budgets, "memory_bytes", lambda: None)
    assert budgets.host_cache_bytes(EngineConfig()) == 2 << 30


def test_capacity_used_reports_the_fill_level_of_the_last_tier(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with MODEL.engine() as engine:
        assert engine.cache.capacity_used == 0.0
    with MODEL.engine(store=f"file://{tmp_path}/a", disk_cache_bytes="1GiB") as engine:
        assert engine.cache.capacity_used < 0.01
    with MODEL.engine(store=f"file://{tmp_path}/b") as engine:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=1000, used=600, free=200))
        assert engine.cache.capacity_used == pytest.approx(0.75), "200 are reserved, and nobody's to use"
        object.__setattr__(engine.config, "store", "s3://bucket/prefix")
        assert engine.cache.capacity_used == 1.0


def test_budgets_larger_than_the_machine_are_rejected(tmp_path):
    memory, disk = memory_bytes(), disk_bytes(f"file://{tmp_path}")
    with pytest.raises(ConfigError, match=rf"host_cache_bytes: wanted at most {memory} .*got {memory + 1}"):
        MODEL.engine(host_cache_bytes=memory + 1)
    with pytest.raises(ConfigError, match=rf"disk_cache_bytes: wanted at most {disk} .*got {disk + 1}"):
        MODEL.engine(store=f"file://{tmp_path}/s", disk_cache_bytes=disk + 1)
    assert not (tmp_path / "s").exists()
    check_budgets(EngineConfig(host_cache_bytes=memory, store=f"file://{tmp_path}/s", disk_cache_bytes=disk))
    check_budgets(EngineConfig(store="gs://bucket", disk_cache_bytes=1 << 60))  # nobody can tell
