"""ccjax.models.llama3.checkpoint: reads what was written, and rejects incomplete, damaged or foreign data."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.models.llama3 import checkpoint, init_params
from ccjax.models.llama3.checkpoint import (
    INDEX,
    is_checkpoint,
    leaf_names,
    load_checkpoint,
    read_index,
    write_checkpoint,
    write_params,
)
from ccjax.models.llama3.convert import CheckpointError
from ccjax.models.llama3.params import ParamSpec
from ccjax.models.llama3.presets import PRESETS
from tests.conftest import ROOT
from tests.models.held import Held

# A failed read ends Orbax's event loop while other reads are in progress, which then raise in their destructors.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = PRESETS["tiny"]


@functools.cache
def drawn(seed: int = 0, dtype: str = "float32", quantization: str | None = None):
    return init_params(CONFIG, jax.random.key(seed), jnp.dtype(dtype), quantization=quantization)


def write(directory: Path, *, seed: int = 0, dtype: str = "float32", quantization: str | None = None):
    params = drawn(seed, dtype, quantization)
    write_checkpoint(
        directory,
        CONFIG,
        lambda add: write_params(params, CONFIG, quantization, add),
        source=f"seed {seed}",
        dtype=dtype,
        is_rounded=False,
        quantization=quantization,
    )
    return params


def assert_same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [leaf.dtype for leaf in jax.tree.leaves(wanted)]


@pytest.mark.parametrize(
    ("part_bytes", "dtype", "quantization"),
    [
        (1, "bfloat16", "int8"),
        (100_000, "float32", None),
        (1 << 30, "bfloat16", "fp8"),
    ],
)
def test_checkpoint_round_trips_leaf_by_leaf(tmp_path, monkeypatch, part_bytes, dtype, quantization):
    monkeypatch.setattr(checkpoint, "_PART_BYTES", part_bytes)
    params = write(tmp_path, dtype=dtype, quantization=quantization)
    seen, done = [], []

    def put(spec: ParamSpec, host: np.ndarray) -> jax.Array:
        assert host.shape == spec.shape
        seen.append(spec.axes)
        return jnp.asarray(host)

    got = load_checkpoint(tmp_path, dtype=jnp.dtype(dtype), put=put, progress=lambda *at: done.append(at))
    assert_same(got, params)
    assert len(seen) == len(leaf_names(CONFIG, quantization)) and done[-1][0] == done[-1][1]
    assert read_index(tmp_path).quantization == quantization


def test_conversion_on_load_matches_loading_from_safetensors(tmp_path):
    write(tmp_path)
    assert_same(load_checkpoint(tmp_path, dtype=jnp.bfloat16), drawn(dtype="bfloat16"))
    packed = drawn(quantization="int8")
    got = load_checkpoint(tmp_path, dtype=jnp.float32, quantization="int8")
    np.testing.assert_array_equal(got.layers[0].wq.values, packed.layers[0].wq.values)
    write(tmp_path, quantization="int8")
    assert_same(load_checkpoint(tmp_path, dtype=jnp.float32, quantization="int8"), packed)
    with pytest.raises(CheckpointError, match="wanted weights for fp8, got a checkpoint in int8"):
        load_checkpoint(tmp_path, dtype=jnp.float32, quantization="fp8")


def data_files(directory: Path) -> list[Path]:
    """The files with weights."""
    return sorted(
        path for path in (directory / "weights").rglob("*") if path.is_file() and path.parent.name.endswith("weight")
    )


def test_checkpoint_with_a_flipped_byte_is_rejected(tmp_path):
    write(tmp_path)
    files = [path for path in data_files(tmp_path) if not path.name.startswith(".")]
    assert len(files) >= len(leaf_names(CONFIG, None))
    for path in files[:: len(files) // 6]:
        sound = path.read_bytes()
        path.write_bytes(sound[: len(sound) // 2] + bytes([sound[len(sound) // 2] ^ 4]) + sound[len(sound) // 2 + 1 :])
        with pytest.raises(CheckpointError, match="damaged|got"):
            load_checkpoint(tmp_path, dtype=jnp.float32)
        path.write_bytes(sound)
    load_checkpoint(tmp_path, dtype=jnp.float32)


@pytest.mark.parametrize("how", ["truncated", "gone", "whole part gone"])
def test_checkpoint_with_a_missing_file_is_rejected(tmp_path, how):
    write(tmp_path)
    path = next(path for path in data_files(tmp_path) if "q_proj" in str(path) and not path.name.startswith("."))
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "gone":  # tensorstore would read zeros
        path.unlink()
    else:
        path.parent.parent.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="wanted"):
        load_checkpoint(tmp_path, dtype=jnp.float32)


def test_damaged_or_incompatible_index_is_rejected(tmp_path):
    write(tmp_path)
    path = tmp_path / INDEX
    sound = json.loads(path.read_text())
    for change, message in (
        ({"source": "another"}, "its checksum failed"),
        ({"folder": "../../etc"}, "damaged"),
        ({"format_version": 2}, "format version 1, got 2: upgrade"),
    ):
        path.write_text(json.dumps(sound | change))
        with pytest.raises(CheckpointError, match=message):
            read_index(tmp_path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        read_index(tmp_path)
    path.write_text(json.dumps(sound))
    read_index(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 5.0}))
    with pytest.raises(CheckpointError, match=r"wanted the config.json that it was written with"):
        read_index(tmp_path)
    path.unlink()
    assert not is_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="wanted a finished checkpoint"):
        read_index(tmp_path)


def test_failed_write_keeps_the_old_checkpoint_and_leaves_no_partial_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 1)
    old = write(tmp_path)

    def half(add):
        add(np.zeros((512, 64), np.float32))
        add(np.zeros(64, np.float32))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, CONFIG, half, source="new", dtype="float32", is_rounded=False)
    with pytest.raises(ValueError, match="produce: wanted"):
        write_checkpoint(tmp_path, CONFIG, lambda add: None, source="new", dtype="float32", is_rounded=False)
    assert len(list((tmp_path / "weights").iterdir())) == 1
    assert_same(load_checkpoint(tmp_path, dtype=jnp.float32), old)
    new = write(tmp_path, seed=1)
    assert_same(load_checkpoint(tmp_path, dtype=jnp.float32), new)
    assert len(list((tmp_path / "weights").iterdir())) == 1


KILLED = """
import os, sys, threading
import jax, numpy as np
from ccjax.models.llama3 import checkpoint, init_params
from ccjax.models.llama3.presets import PRESETS
checkpoint._PART_BYTES = 1
config, left = PRESETS["tiny"], int(sys.argv[2])
params = init_params(config, jax.random.key(1))

def produce(add):
    def counted(array):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        add(array)
    checkpoint.write_params(params, config, None, counted)

checkpoint.write_checkpoint(sys.argv[1], config, produce, source="new", dtype="float32", is_rounded=False)
"""


def test_killed_writer_leaves_the_old_checkpoint_or_none(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=600)
    assert done.returncode == -9 and not is_checkpoint(tmp_path)
    old = write(tmp_path)
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=600).returncode == -9
    assert_same(load_checkpoint(tmp_path, dtype=jnp.float32), old)
    assert_same(load_checkpoint(tmp_path, dtype=jnp.float32), write(tmp_path))
    assert len(list((tmp_path / "weights").iterdir())) == 1, "what the killed one left is swept by the next"


def test_loading_holds_at_most_two_parts(tmp_path, monkeypatch):
    """Plus one leaf of the part before; here each part is one leaf."""
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 1)
    write(tmp_path)
    held, load = Held(), checkpoint._load

    def watched(*arguments):
        return {name: held.show(array) for name, array in load(*arguments).items()}

    monkeypatch.setattr(checkpoint, "_load", watched)
    load_checkpoint(tmp_path, dtype=jnp.float32, put=lambda spec, host: spec.shape)
    assert 1 <= held.most <= 3 and len(leaf_names(CONFIG, None)) > 9
