"""Paged decode attention on the device against the float64 oracle."""

from __future__ import annotations

from typing import Any

from ccjax.kernels.decode import decode_attention
from scripts.gpucheck.attention_cases import worst
from scripts.gpucheck.decode_cases import MUTANTS, TOLERANCE, Case
from scripts.gpucheck.record import CheckRecord, numerics_table

SUITE = "decode_numerics"
IMPLEMENTATIONS = ("triton", "xla", "reference")
SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": 4, "kv_heads": 4, "head_dim": 64},
    {"heads": 8, "kv_heads": 1, "head_dim": 128},
    {"heads": 32, "kv_heads": 8, "head_dim": 128},
    {"heads": 32, "kv_heads": 8, "head_dim": 128, "theta": 500000.0},
    {"heads": 16, "kv_heads": 4, "head_dim": 64, "page_size": 32, "theta": 10000.0},
)


def check(record: CheckRecord, implementation: str, *, mutant: str | None = None, **shape: Any) -> None:
    """One case of the kernel's tests, or with `mutant` a variant that must differ from it."""
    case = Case(**shape)
    inputs, arguments = case.arguments(**({} if mutant is None else MUTANTS[mutant](case)))
    named = ", ".join(f"{name} {value}" for name, value in shape.items() if name != "dtype")
    row = {"implementation": implementation, "dtype": case.dtype, "shape": named}
    try:
        result = decode_attention(*inputs, **arguments, implementation=implementation)
        error = float(worst(result, case.expected()))
    except Exception as raised:  # the other cases are still checked
        record.add(SUITE, **row, mutant=mutant, error=None, tolerance=TOLERANCE[case.dtype], passed=False)
        record.fail(f"{SUITE}: {implementation}, {case.dtype}, {named}: {type(raised).__name__}: {raised!s:.300}")
        return
    record.compare(SUITE, error, TOLERANCE[case.dtype], mutant=mutant, **row)


def run(record: CheckRecord, implementations: tuple[str, ...] = IMPLEMENTATIONS) -> None:
    """Every shape in both dtypes, and every mutant of one."""
    for implementation in implementations:
        for dtype in TOLERANCE:
            for shape in SHAPES[-2:] if record.is_quick else SHAPES:
                check(record, implementation, dtype=dtype, **shape)
            for mutant in MUTANTS:
                check(record, implementation, mutant=mutant, dtype=dtype, head_dim=64, theta=10000.0)
        record.say(f"decode: {implementation}")


def tables(record: CheckRecord) -> list[str]:
    """One row per implementation and dtype, worst of the shapes."""
    return [numerics_table(record, SUITE, "Paged decode against float64", "implementation", "dtype")]
