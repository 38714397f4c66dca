"""Kernels and steps compile for chips that are absent, without spills on GPUs and new copies or communication.

`make kernels-aot` compiles all cases for which it installs compilers, `.ci/run` those in QUICK; elsewhere some steps
are compiled, small, for the CPU. That shows neither correctness nor speed. The committed figures are bundles of a TPU
kernel's schedule, slots of stores that spill in it, and MB of a step's temporaries; CCJAX_AOT_UPDATE=1 writes them.
"""

import dataclasses
import functools
import inspect
import json
import os
import re
from pathlib import Path

import jax
import pytest

from ccjax.kernels.attention.blocks import MosaicBlocks, TritonBlocks
from ccjax.kernels.attention.mosaic_tpu import mosaic_tpu_attention
from ccjax.kernels.attention.triton import triton_attention
from ccjax.models.llama3 import LlamaConfig
from ccjax.models.llama3.inputs import StepSettings
from ccjax.models.llama3.paged_steps import paged_decode_step, paged_layer_step
from tests.pallas_kernels import aot_cases as aot
from tests.pallas_kernels.aot_cases import CHIPS, COMPILERS, KERNELS, KINDS, STEPS

TABLE = Path(__file__).with_name("aot_table.json")
SLACK = 1.05
QUICK = {"prefill", "rotated", "decode", "move", "decode, 1 request", "four warps spill", "blocks exceed VMEM"}
TINY = LlamaConfig(512, 128, 2, 4, 2, 32, 256)
CONTROLS = {  # kernels that must not compile: blocks, and what the error says
    "four warps spill": ("gpu", triton_attention, TritonBlocks(128, 64, num_warps=4, num_stages=2), "spilling"),
    "four stages exceed shared memory": ("gpu", triton_attention, TritonBlocks(128, 128, 8, 4), "(?i)shared memory"),
    "blocks exceed VMEM": ("tpu", mosaic_tpu_attention, MosaicBlocks(rows=4096, keys=4096), "(?i)vmem"),
}


def on_chips(names):
    """(chip, name) for every installed chip; what is not quick is slow."""
    pairs = [(chip, name) for chip in CHIPS for name in names if chip not in KINDS or names is KERNELS]
    quick = {chip: {"prefill", "decode"} if chip in KINDS else QUICK for chip in CHIPS}
    return [pytest.param(*pair, marks=[] if pair[1] in quick[pair[0]] else [pytest.mark.slow]) for pair in pairs]


def compare(chip, name, figures):
    """Fails if a figure is above the committed one."""
    table = json.loads(TABLE.read_text())
    if os.environ.get("CCJAX_AOT_UPDATE") == "1":
        table.setdefault(name, {})[chip] = figures
        lines = [f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(table.items())]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    known = table[name][chip]
    assert {key: value for key, value in figures.items() if value > SLACK * known[key] + 1} == {}, known


@pytest.mark.parametrize(("chip", "name"), on_chips(KERNELS))
def test_kernel_compiles_without_spills(chip, name):
    """TPU kernels spill as part of their pipeline: no more than they did."""
    operation, arrays, statics = KERNELS[name]
    has_figures = chip in COMPILERS["libtpu"] and chip not in KINDS
    for old in aot.DUMP.glob("*utilization*") if has_figures else ():
        old.unlink()
    aot.compile_kernel(chip, functools.partial(operation, implementation=aot.implementation(chip)), arrays, **statics)
    if has_figures:
        kernel = {"decode": "paged_decode", "move": "move_keys"}.get(name.split(",")[0], "partial_prefill")
        (schedule,) = aot.DUMP.glob(f"*{kernel}*final_hlo-static-per-bundle-utilization*")
        head, rows = schedule.read_text().split("UTILIZATION:")
        spills = [column.strip() for column in head.splitlines()[1].split(",")].index("VSTORE:SPILL")
        slots = [int(row.split()[spills]) for row in rows.splitlines() if row.strip()]
        compare(chip, name, {"bundles": len(slots), "spills": sum(slots)})


@pytest.mark.parametrize(("chip", "name"), on_chips(CONTROLS))
def test_kernel_over_a_limit_does_not_compile(chip, name):
    kind, kernel, blocks, message = CONTROLS[name]
    if kind != ("tpu" if chip in COMPILERS["libtpu"] else "gpu"):
        pytest.skip("a kernel of other chips")
    _, arrays, statics = KERNELS["prefill"]
    with pytest.raises(Exception, match=message):
        aot.compile_kernel(chip, functools.partial(kernel, blocks=blocks), arrays, **statics)


def check_step(case, executable):
    """Pages are donated and not copied, and devices communicate in sums only: after attention and MLP, of masses and of
    embeddings."""
    used, num_layers = executable.memory_analysis(), 1
    if case.step in (paged_layer_step, paged_decode_step):
        is_decode = case.step is paged_decode_step
        pools = jax.tree.leaves(case.arguments()[3 if is_decode else 2])
        num_layers = case.config.num_layers if is_decode else 1
        assert len(pools) == 2 * num_layers
        num_bytes = sum(pages.size * pages.dtype.itemsize for pages in pools) // case.num_devices
        assert used.alias_size_in_bytes >= num_bytes, "not donated"
        assert not copies(executable, pools[0], case), "copied"
    operations = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    found = re.findall(operations, executable.as_text())
    each = 2 * num_layers + (case.step is paged_decode_step)
    sums = range(each, each + 1 + bool(case.num_segments)) if case.num_devices > 1 else [0]
    assert found.count("all-reduce") == len(found) and len(found) in sums, found
    return used


def copies(executable, pages, case):
    """The copies of a whole array of pages in a program."""
    heads, *shape = pages.shape
    sizes = ",".join(map(str, (max(1, heads // case.num_devices), *shape)))
    return re.findall(rf"= [a-z0-9]+\[{sizes}\][^ ]* (?:copy|copy-start)\(.*", executable.as_text())


@pytest.mark.parametrize(("chip", "name"), on_chips(STEPS))
def test_step_compiles_without_new_copies(chip, name):
    case = STEPS[name]
    with aot.lowered_for(chip):
        used = check_step(case, aot.compiled(chip, case.trace(chip)))
    sizes = used.argument_size_in_bytes, used.output_size_in_bytes - used.alias_size_in_bytes, used.temp_size_in_bytes
    assert sum(sizes) < aot.MEMORY_BYTES[chip]
    compare(chip, f"step: {name}", {"temp_mb": round(used.temp_size_in_bytes / 1e6)})


def small(name):
    """The same step at sizes that a CPU compiles in a second."""
    case = STEPS[name]
    sizes = {"rows": min(case.rows, 32), "slots": 256 if case.slots else 0}
    return dataclasses.replace(case, config=TINY, dtype="float32", **sizes)


@pytest.mark.parametrize("name", [name for name in STEPS if "15 %" in name or "16" in name or "rotate" in name])
def test_small_step_compiles_for_the_cpu(name):
    check_step(small(name), aot.compiled("cpu", small(name).trace("cpu")))


def test_pages_that_are_not_donated_and_a_step_that_is_not_split_are_noticed():
    case = small("decode, 16 requests")
    kept = jax.jit(inspect.unwrap(paged_decode_step), static_argnames=("settings",))
    executable = kept.trace(*case.arguments(), settings=StepSettings(case.config, "xla")).lower().compile()
    with pytest.raises(AssertionError, match="not donated"):
        check_step(case, executable)
    assert copies(executable, case.arguments()[3][0].k, case)
    split = small("decode, 16 requests, 4 devices")
    whole = dataclasses.replace(split, num_devices=1)
    with pytest.raises(AssertionError):
        check_step(split, aot.compiled("cpu", whole.trace("cpu")))


def test_the_committed_figures_are_of_all_cases_and_the_mass_costs_a_tpu_at_most_12_percent():
    table = json.loads(TABLE.read_text())
    assert table.keys() == {*KERNELS, *(f"step: {name}" for name in STEPS)}
    for chip in {*COMPILERS["libtpu"]} - {*KINDS}:
        assert table["prefill"][chip]["bundles"] <= 1.12 * table["no mass"][chip]["bundles"]
