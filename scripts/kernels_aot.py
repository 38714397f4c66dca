"""Compiles every kernel and step for chips that are not present: `python scripts/kernels_aot.py tpu|gpu [--quick]`.

Needs no TPU and no GPU, only their compilers: `pip install -e .[aot-tpu]` or `.[aot-gpu]`, each in its own environment.
Kernels and the engine's steps are compiled at serving shapes. Failures are a kernel over a chip's limits, a register
spill on a GPU, a figure more than 5 % above pallas_kernels/aot_table.json, and a control that passes. `--quick`
compiles the few cases of every push, `--only step:` the steps alone. `--update` writes the table. Compiling proves
neither correctness, which tests/pallas_kernels test, nor speed, which only the chip shows.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TABLE = ROOT / "pallas_kernels" / "aot_table.json"
SLACK = 1.05


def violations(chip: str, name: str, figures: dict[str, int], limits: Any, known: dict[str, int] | None) -> list[str]:
    """Problems with a kernel's figures, in words; `known` are the committed figures."""
    wrong = [
        f"{chip}, {name}: {figure} is {figures[figure]:,}, the limit is {by_chip[chip]:,}"
        for figure, by_chip in limits.items()
        if figures.get(figure, 0) > by_chip[chip]
    ]
    if known is None:
        return [*wrong, f"{chip}, {name}: not in {TABLE.name}; --update adds it"]
    return wrong + [
        f"{chip}, {name}: {figure} rose from {known[figure]:,} to {value:,}"
        for figure, value in figures.items()
        if value > SLACK * known[figure]
    ]


def main() -> int:
    """Exit status 0 if every gate holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("tpu", "gpu"))
    parser.add_argument("--only", metavar="PART", default="", help="cases with this part in their name")
    parser.add_argument("--quick", action="store_true", help="only a few cases of kernels and steps")
    parser.add_argument("--update", action="store_true", help="write the figures to the committed table")
    arguments = parser.parse_args()
    target = importlib.import_module(f"scripts.kernels.{arguments.kind}")
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    versions = {package: importlib.metadata.version(package) for package in target.PACKAGES}
    table = tables.get(arguments.kind, {"versions": versions, "figures": {}})
    is_part = arguments.quick or arguments.only != ""
    if arguments.update and is_part and table["versions"] != versions:
        parser.error(f"--update: wanted every case, or the table's own {table['versions']}, got a part and {versions}")
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        target.set_environment(dump)
        known = None if arguments.update else table["figures"]
        found, wrong = _compile_all(target, dump, arguments.only, arguments.quick, known)
    if not any(found.values()):
        parser.error(f"--only: wanted a part of a case's name, got {arguments.only!r}, which matches none")
    if arguments.update and not wrong:
        kept = table["figures"] if is_part else {}
        merged = {chip: kept.get(chip, {}) | figures for chip, figures in found.items()}
        tables[arguments.kind] = {"versions": versions, "figures": merged}
        TABLE.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n")
    print(" ".join(f"{package} {version}" for package, version in versions.items()))
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


def _compile_all(
    target: Any, dump: Path, only: str, is_quick: bool, known: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Figures by chip and case, and problems; prints a row for each.

    `only`, `is_quick`: which cases; each control runs with the case that it breaks.
    `known`: committed figures by chip and case; None checks only the limits.
    """
    # Here and not above: jax reads the environment when it is first imported.
    from ccjax.kernels.attention import attention
    from ccjax.kernels.decode import decode_attention
    from scripts.kernels.cases import ALL_CASES, QUICK, compile_case
    from scripts.kernels.steps import QUICK_STEPS, STEP_CASES, compile_step, step_controls, step_figures

    def is_wanted(name: str) -> bool:
        return only in name and (not is_quick or name in QUICK | QUICK_STEPS)

    devices_of = functools.cache(target.devices_of)

    def kernel(case: Any, operation: Any, chip: str) -> dict[str, int]:
        executable = compile_case(operation, case, devices_of(chip)[0], target.PLATFORM, target.options())
        return target.figures(executable, case.kernel, dump, chip)

    def step(case: Any, implementation: str, chip: str) -> dict[str, int]:
        return step_figures(compile_step(case, implementation, devices_of(chip), target.PLATFORM, target.options()))

    operations = {"partial_prefill": attention, "paged_decode": decode_attention}
    found: dict[str, Any] = {chip: {} for chip in target.CHIPS}
    wrong: list[str] = []
    controls: list[tuple[Any, ...]] = [(kernel, name, chip, *control) for name, chip, *control in target.controls()]
    for chip in target.CHIPS:
        implementation = target.implementation(chip)
        jobs: list[tuple[Any, Any, Any]] = [
            (kernel, case, functools.partial(operations[case.kernel], implementation=implementation))
            for case in ALL_CASES
        ]
        jobs += [(step, case, implementation) for case in STEP_CASES]
        for compiled, case, how in jobs:
            if is_wanted(case.name):
                _empty(dump)
                start = time.monotonic()
                figures = found[chip][case.name] = compiled(case, how, chip)
                earlier = figures if known is None else known.get(chip, {}).get(case.name)
                wrong += violations(chip, case.name, figures, target.LIMITS, earlier)
                columns = [f"{figure} {value:>10,} " for figure, value in figures.items()]
                print(f"{chip:5} {case.name:42}", *columns, f"in {time.monotonic() - start:.0f} s", flush=True)
        controls += [(step, name, chip, *control) for name, *control in step_controls(implementation)]
    for compiled, name, chip, case, how, message in controls:
        if is_wanted(case.name):
            _empty(dump)
            start = time.monotonic()
            try:
                figures = compiled(case, how, chip)
                outcome = str(violations(chip, name, figures, target.LIMITS, found[chip][case.name]))
            except Exception as error:  # the compilers raise JaxRuntimeError, lowering ValueError and others
                outcome = str(error)
            wrong += _judge(chip, name, outcome, message, start)
    return found, wrong


def _judge(chip: str, name: str, outcome: str, message: str, start: float) -> list[str]:
    """The problem if a control did not fail as it must; prints its row."""
    failed = re.search(message, outcome) is not None
    result = "fails, as it must" if failed else "DOES NOT FAIL"
    print(f"{chip:5} {name:50} {result} in {time.monotonic() - start:.0f} s", flush=True)
    return [] if failed else [f"{chip}, control {name!r}: wanted an error matching {message!r}, got {outcome[:200]!r}"]


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
