"""The gates of the ahead-of-time check; its committed table has every case of every chip, within the gates."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ccjax.models.llama3 import LlamaConfig
from ccjax.models.llama3.paged_steps import paged_decode_step
from scripts.kernels import gpu, tpu
from scripts.kernels.cases import ALL_CASES, QUICK
from scripts.kernels.steps import QUICK_STEPS, STEP_CASES, compile_step, step_controls, step_figures
from scripts.kernels_aot import TABLE, violations

LIMITS = {"spill_bytes": {"a100": 0}, "shared_bytes": {"a100": 166_912}}
GOOD = {"registers": 200, "spill_bytes": 0, "shared_bytes": 100_000}


def test_figures_within_limits_and_slack_pass():
    known = {"registers": 195, "spill_bytes": 0, "shared_bytes": 120_000}
    assert violations("a100", "case", GOOD, LIMITS, known) == []


@pytest.mark.parametrize(
    ("figures", "known", "wanted"),
    [
        (GOOD | {"spill_bytes": 4}, GOOD | {"spill_bytes": 4}, ["a100, case: spill_bytes is 4, the limit is 0"]),
        (GOOD | {"shared_bytes": 166_913}, GOOD | {"shared_bytes": 166_912}, ["is 166,913, the limit is 166,912"]),
        (GOOD, GOOD | {"registers": 190}, ["registers rose from 190 to 200"]),
        (GOOD, None, ["case: not in aot_table.json"]),
    ],
    ids=["a spill", "over shared memory", "a regression", "an unknown case"],
)
def test_violations_name_exceeded_limits_regressions_and_unknown_cases(figures, known, wanted):
    found = violations("a100", "case", figures, LIMITS, known)
    assert len(found) == len(wanted) and all(part in line for part, line in zip(wanted, found, strict=True))


@pytest.mark.parametrize("target", [gpu, tpu], ids=["gpu", "tpu"])
def test_the_committed_figures_are_within_limits(target):
    table = json.loads(TABLE.read_text())[target.__name__.rpartition(".")[2]]
    assert set(table["versions"]) == set(target.PACKAGES)
    assert set(table["figures"]) == set(target.CHIPS)
    for chip, cases in table["figures"].items():
        assert set(cases) == {case.name for case in (*ALL_CASES, *STEP_CASES)}
        for name, figures in cases.items():
            assert violations(chip, name, figures, target.LIMITS, figures) == []


@pytest.mark.parametrize("target", [gpu, tpu], ids=["gpu", "tpu"])
def test_quick_cases_cover_every_kernel_and_include_a_control_for_each(target):
    cases = [case for case in ALL_CASES if case.name in QUICK]
    assert {case.name for case in cases} == QUICK
    assert QUICK_STEPS <= {case.name for case in STEP_CASES}
    kernels = {(case.kernel, getattr(case, "is_rotated", True)) for case in cases}
    assert kernels == {(case.kernel, getattr(case, "is_rotated", True)) for case in ALL_CASES}
    spoilt = {(chip, case.kernel) for _, chip, case, _, _ in target.controls() if case.name in QUICK}
    assert spoilt == {(chip, case.kernel) for chip in target.CHIPS for case in ALL_CASES}
    assert any(case.name in QUICK_STEPS for _, case, _, _ in step_controls("xla"))


@pytest.mark.parametrize("chip", tpu.CHIPS)
def test_computing_mass_adds_at_most_12_percent_to_the_tpu_kernel(chip):
    """Measured in bundles of the static schedule, for 16 segments."""
    figures = json.loads(TABLE.read_text())["tpu"]["figures"][chip]
    usual = next(case for case in ALL_CASES if case.name == "8B TP1, 15 % of 16k")
    assert dataclasses.replace(usual, name="no mass", num_segments=0) in ALL_CASES and usual.num_segments == 16
    assert figures[usual.name]["bundles"] <= 1.12 * figures["no mass"]["bundles"]


TINY = LlamaConfig(512, 128, 2, 4, 2, 32, 256)


def small(case):
    """The same step at sizes that a CPU compiles in a second."""
    slots = 256 if case.slots else 0
    return dataclasses.replace(case, config=TINY, rows=min(case.rows, 32), slots=slots, dtype="float32")


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: case.name)
def test_every_step_compiles_with_the_expected_memory_and_collectives(case):
    """On this machine: the arguments match the steps, and donated pages and contexts need no additional outputs."""
    figures = step_figures(compile_step(small(case), "xla", jax.devices(), "cpu"))
    assert {"argument_bytes", "result_bytes", "temp_bytes", "hbm_bytes", "flops"} <= figures.keys()
    arrays, _ = small(case).call(lambda axes, shape: None, "xla")
    assert figures["argument_bytes"] <= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    assert figures["hbm_bytes"] == sum(figures[f"{name}_bytes"] for name in ("argument", "result", "temp"))
    if case.num_devices > 1:
        # Only sums: after the attention, after the MLP, and of the masses if these are computed; compilers may merge
        # two of them.
        assert figures["other_collectives"] == 0 and 2 <= figures["sums"] <= (3 if case.num_segments else 2)


def test_memory_gate_rejects_mutated_steps():
    """Mutants for the memory gate, checked by the program's own function."""
    devices = jax.devices()
    seen = []
    for name, case, implementation, message in step_controls("xla"):
        usual = small(next(step for step in STEP_CASES if step.name == case.name))
        known = step_figures(compile_step(usual, "xla", devices, "cpu"))
        figures = step_figures(compile_step(small(case), implementation, devices, "cpu"))
        assert violations("cpu", name, known, {}, known) == []
        rose = [line.partition(": ")[2].split(" from ")[0] for line in violations("cpu", name, figures, {}, known)]
        seen += [message for line in rose if line == message]
    assert seen == ["result_bytes rose", "argument_bytes rose"]


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: case.name)
def test_step_arrays_are_sharded_by_axis_name(case):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = {"heads", "kv_heads", "ffn", "vocab"}

    def place(axes, shape):
        return NamedSharding(mesh, PartitionSpec(*("model" if axis in split else None for axis in axes)))

    arrays, _ = small(case).call(place, "xla")
    for array in jax.tree.leaves(arrays):
        local = array.sharding.shard_shape(array.shape)  # raises if axes and shape do not match
        assert np.prod(local) in (array.size, array.size // 2)
    large = [array for array in jax.tree.leaves(arrays) if array.dtype.kind == "f" and array.ndim > 2]
    whole = [array for array in large if np.prod(array.sharding.shard_shape(array.shape)) == array.size]
    assert len(whole) == (case.step is paged_decode_step), "only the rotation of pages is the same for all heads"
