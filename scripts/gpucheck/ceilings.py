"""Ceilings of the device, and the cost of a turn of the timing loop, in the same run."""

from __future__ import annotations

from scripts.gpucheck.record import CheckRecord, table
from scripts.gpucheck.timing import copy_gbps, matmul_tflops, turn_us

SUITE = "ceilings"


def run(record: CheckRecord) -> None:
    """Measures all three."""
    rounds = 3 if record.is_quick else 7
    record.add(SUITE, name="matmul_tflops", value=matmul_tflops(8192, rounds))
    record.add(SUITE, name="copy_gbps", value=copy_gbps(1 << 30, rounds))
    record.add(SUITE, name="turn_us", value=turn_us(rounds))
    record.say(", ".join(f"{row['name']} {row['value']:.0f}" for row in record.rows[SUITE]))


def ceiling(record: CheckRecord, name: str) -> float | None:
    """A figure of this run, or None."""
    return next((row["value"] for row in record.rows.get(SUITE, []) if row["name"] == name), None)


def tables(record: CheckRecord) -> list[str]:
    """The figures."""
    names = {
        "matmul_tflops": "bfloat16 product of two 8192 x 8192 matrices, TFLOP/s",
        "copy_gbps": "1 GiB read and written, GB/s",
        "turn_us": "empty turn of the timing loop, included in each figure of a JAX function, us",
    }
    rows = [(label, ceiling(record, name)) for name, label in names.items()]
    return [table("Ceilings of the device", ("measured", "value"), rows)]
