"""Attention on the device against a float64 oracle, with broken variants that must not pass.

The hard cases are those of tests/pallas_kernels, at the block sizes of the GPU's chip; one more has serving size
(`serving_case`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ccjax.kernels.attention import api
from scripts.gpucheck import serving_case
from scripts.gpucheck.attention_cases import UNUSED, Case, frequencies, jitted, packed, worst
from scripts.gpucheck.record import CheckRecord, numerics_table
from scripts.gpucheck.serving_case import ServingCase

SUITE = "attention_numerics"
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest absolute error of output, mass and lse in the hard cases; on a CPU it was 1.3e-6 and 8.5e-3, and 2.3e-3 in
float32 with operands truncated to TF32."""

Mutants = dict[str, Callable[[Any], dict[str, Any]]]
"""Name -> changed arguments, with a different result."""

MUTANTS: Mutants = {
    "mask off by one": lambda case: {"q_pos": case.q_pos - 1},
    "mask lets one more through": lambda case: {"q_pos": case.q_pos + 1},
    "a chunk dropped": lambda case: {"k_pos": np.where(case.segment == 2, UNUSED, case.k_pos).astype(np.int32)},
    "wrong scale": lambda case: {"q": case.q * np.float32(1.05)},
    "wrong kv head": lambda case: {"k": np.roll(case.k, 1, axis=1)},
    "wrong segment": lambda case: {"k_segment": case.segment + 1},
}
ROTATED: Mutants = {"wrong theta": lambda case: {"k_frequencies": frequencies(case.q.shape[2], 500.0)}}
PACKED: Mutants = {"another request": lambda case: {"k_request": case.k_request[::-1].copy()}}
TF32: Mutants = {"operands cut to TF32": lambda case: {"q": tf32(case.q), "k": tf32(case.k)}}
BLOCK: Mutants = {
    "a key block dropped": lambda case: {
        "k_pos": np.where(np.arange(len(case.k_pos)) // 64 == 20, UNUSED, case.k_pos).astype(np.int32)
    }
}

_STATIC = ("scale", "num_segments", "implementation")


def tf32(x: np.ndarray) -> np.ndarray:
    """float32 truncated to the 10 bits of TF32's fraction."""
    return np.bitwise_and(x.view(np.uint32), np.uint32(0xFFFFE000)).view(np.float32)


def absolute_error(result: Sequence[Any], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of output, mass and lse, without a mass that was not requested."""
    kept = [(got, wanted) for got, wanted in zip(result, expected, strict=True) if got is not None]
    return float(worst([got for got, _ in kept], [wanted for _, wanted in kept]))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call and its expected result.

    Attributes:
      changes: arguments of the call that differ from the case's.
    """

    label: str
    case: Case
    tolerance: float
    mutants: Mutants = dataclasses.field(default_factory=dict)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: Callable[[Sequence[Any], Sequence[np.ndarray]], float] = absolute_error


def implementations() -> list[str]:
    """Names of implementations of `attention` except those for TPUs; "tokamax" stands for one of its kernels."""
    return [name for name in (*api.PLAIN, *api.KERNELS) if name not in ("mosaic_tpu", "tokamax")]


def is_library(name: str) -> bool:
    """Whether a name stands for another project's kernel, which may lack features without failing the check."""
    return name.startswith("tokamax")


def missing(name: str) -> str | None:
    """Why an implementation cannot be called on this machine, or None."""
    inputs, arguments = Case(head_dim=64, dtype="bfloat16").arguments()
    try:
        jitted.eval_shape(*inputs, **arguments, implementation=name)
    except (NotImplementedError, ImportError) as error:
        return str(error)
    except Exception as error:
        if not is_library(name):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def available() -> list[str]:
    """Implementations that can be called on this machine."""
    return [name for name in implementations() if missing(name) is None]


def problems(is_quick: bool) -> list[Problem]:
    """All problems; building them is cheap except for the serving size."""
    found: list[Problem] = []
    for dtype in TOLERANCE:
        sizes = (64, 128) if dtype == "float32" else (128, 64)

        def add(label: str, case: Case, mutants: Mutants | None = None, dtype: str = dtype, **changes: Any) -> None:
            found.append(Problem(f"{label}, {dtype}", case, TOLERANCE[dtype], mutants or {}, changes))

        groups = (2, 8) if is_quick else (1, 2, 4, 8)
        for group, head_dim in zip(groups, sizes * (len(groups) // 2), strict=True):
            ragged = Case(
                heads=8, kv_heads=8 // group, head_dim=head_dim, queries=130, slots=300, used=290, dtype=dtype
            )
            add(f"{group} heads a kv head, heads of {head_dim}", ragged)
        broken = MUTANTS | ROTATED | PACKED | (TF32 if dtype == "float32" else {})
        add("packed, rotated", packed(theta=10000.0, head_dim=sizes[0], dtype=dtype), broken)
        if is_quick:
            continue
        shape: dict[str, Any] = {"head_dim": sizes[1], "dtype": dtype}
        add("packed, rotated, other heads", packed(theta=10000.0, **shape))
        for head_dim in (16, 256):
            add(f"rotated, heads of {head_dim}", Case(head_dim=head_dim, dtype=dtype, theta=10000.0), ROTATED)
        add("one query", Case(heads=4, kv_heads=1, queries=1, **shape))
        add("all of 200", Case(queries=200, slots=200, used=200, **shape))
        add("300 of 1150, rotated", Case(queries=300, slots=1200, used=1150, theta=500000.0, **shape))
        add("without mass", Case(queries=130, slots=300, used=290, **shape), k_segment=None, num_segments=0)
        shuffled = Case(queries=130, slots=300, used=290, **shape).shuffled()
        shuffled.q_pos = np.concatenate([[-1, -1], shuffled.q_pos[2:]]).astype(np.int32)
        add("slots in any order, rows that see nothing", shuffled)
        segments = Case(queries=70, **shape)
        segments.num_segments = 100
        segments.segment = (np.arange(150) % 100 - 1).astype(np.int32)
        add("100 segments", segments)
    return found


def serving_problems(is_quick: bool) -> list[Problem]:
    """15 % of a context computed; keys rotated before the call and, except in a quick run, by it."""
    num_queries, num_slots = (320, 2048) if is_quick else (2560, 16384)
    label = f"{num_queries} of {num_slots}, 32 / 8 heads of 128"
    plain = ServingCase(num_queries, num_slots)
    found = [Problem(label, plain, serving_case.TOLERANCE, MUTANTS | BLOCK, error=plain.relative_error)]
    if not is_quick:
        rotated = ServingCase(num_queries, num_slots, theta=500000.0)
        label += ", rotated"
        found.append(Problem(label, rotated, serving_case.TOLERANCE, ROTATED, error=rotated.relative_error))
    return found


def check(record: CheckRecord, names: Sequence[str], problem: Problem) -> None:
    """Each implementation against the oracle on one problem, then its mutants."""
    row = {"case": problem.label}
    inputs, arguments = problem.case.arguments(**problem.changes)
    building: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor() as pool:
        for name in names:
            with _noted(record, name, problem):
                lowered = jitted.lower(*inputs, **arguments, implementation=name)
                building[name] = pool.submit(lowered.compile)
        expected = problem.case.expected()
    for name, compiled in building.items():
        with _noted(record, name, problem):
            for mutant, change in [(None, None), *problem.mutants.items()]:
                changes = dict(change(problem.case)) if change else {}
                inputs, arguments = problem.case.arguments(**problem.changes, **changes)
                result = compiled.result()(*inputs, **{k: v for k, v in arguments.items() if k not in _STATIC})
                error = problem.error(result, expected)
                record.compare(SUITE, error, problem.tolerance, mutant=mutant, implementation=name, **row)


@contextlib.contextmanager
def _noted(record: CheckRecord, name: str, problem: Problem) -> Iterator[None]:
    """Turns an exception of a kernel into a row, so that the others are still checked."""
    try:
        yield
    except Exception as error:
        row = {"implementation": name, "case": problem.label}
        message = f"{type(error).__name__}: {str(error)[:300]}"
        if is_library(name):
            record.add(SUITE, **row, cannot=message)
        else:
            record.add(SUITE, **row, mutant=None, error=None, tolerance=problem.tolerance, passed=False)
            record.fail(f"{SUITE}: {name}, {problem.label}: {message}")


def run(record: CheckRecord) -> None:
    """Checks every implementation on every problem; one of ours that cannot be called here fails."""
    for name in implementations():
        reason = missing(name)
        if reason and is_library(name):
            record.say(f"{name} is not available: {reason}")
        elif reason:
            record.fail(f"{SUITE}: {name}: {reason}")
    names = available()
    for build in (problems, serving_problems):
        for problem in build(record.is_quick):
            if record.seconds_left() < 0.5 * record.limit_s and any(map(is_library, names)):
                record.say("attention: half of the time is used, the libraries' remaining cases are left out")
                names = [name for name in names if not is_library(name)]
            check(record, names, problem)
            record.say(f"attention: {problem.label}")


def tables(record: CheckRecord) -> list[str]:
    """One row per implementation."""
    return [numerics_table(record, SUITE, "Attention against the float64 oracle", "implementation")]
