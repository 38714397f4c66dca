"""Figures of the TPU kernel from libtpu's ahead-of-time compiler, without a TPU."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PLATFORM = "tpu"
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
"""Chip -> the topology that it is compiled for."""
PACKAGES = ("jax", "libtpu")
LIMITS = {"vmem_bytes": {"v5e": 16 << 20, "v6e": 32 << 20}, "hbm_bytes": {"v5e": 16 << 30, "v6e": 32 << 30}}
"""The compiler's default limit for one kernel, and a chip's memory."""


def set_environment(dump: Path) -> None:
    """Makes libtpu write schedules to `dump`; call it before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # Only one pass: the texts of all passes are 200 MB for one kernel.
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=hlo-static-per-bundle-utilization"
    )


def devices_of(chip: str) -> Sequence[Any]:
    """Four described devices of the chip."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(CHIPS[chip], platform=PLATFORM).devices


def implementation(chip: str) -> str:
    """The kernel's name as an implementation of `attention`."""
    return f"mosaic_tpu:{chip}"


def options() -> None:
    """Compiler options: none."""


def figures(executable: Any, kernel: str, dump: Path, chip: str) -> dict[str, int]:
    """VMEM of the kernel, bundles of its static schedule (both branches, start and end), store slots that spill; the
    maximum of each over several calls."""
    calls = [line for line in executable.as_text().splitlines() if "tpu_custom_call" in line and kernel in line]
    sizes = [re.search(r'scoped_memory_configs":\[\{[^\]]*"size":"(\d+)"', line) for line in calls]
    schedules = [path for path in dump.glob(f"*{kernel}*final_hlo-static-per-bundle-utilization*")]
    # Identical calls have one schedule.
    if None in sizes or not 0 < len(schedules) <= len(calls):
        raise ValueError(f"compiler output: wanted kernels and their schedules, got {len(calls)} and {len(schedules)}")
    schedule = [_schedule(path.read_text()) for path in schedules]
    return {
        "vmem_bytes": max(int(size.group(1)) for size in sizes if size),
        "bundles": max(bundles for bundles, _ in schedule),
        "spilling_stores": max(spills for _, spills in schedule),
    }


def _schedule(text: str) -> tuple[int, int]:
    """Bundles of a schedule, and store slots that spill."""
    header, *_ = text.splitlines()[1:]
    columns = [name.strip() for name in header.split(",")]
    rows = [line.split() for line in text.split("UTILIZATION:")[1].splitlines() if line.strip()]
    spills = columns.index("VSTORE:SPILL")
    return len(rows), sum(int(row[spills]) for row in rows)


def controls() -> Iterator[tuple[str, str, Any, Any, str]]:
    """(name, chip, case, function, what the error must say): kernels that must not compile."""
    from ccjax.kernels.attention.blocks import MosaicBlocks
    from ccjax.kernels.attention.mosaic_tpu import mosaic_tpu_attention
    from ccjax.kernels.decode.blocks import MosaicDecodeBlocks
    from ccjax.kernels.decode.mosaic_tpu import mosaic_tpu_decode
    from scripts.kernels.cases import CONTROL, DECODE_CONTROL

    for chip in CHIPS:
        too_large = functools.partial(mosaic_tpu_attention, blocks=MosaicBlocks(rows=4096, keys=4096))
        yield "blocks of 4096 x 4096 exceed VMEM", chip, CONTROL, too_large, "(?i)vmem"
        too_long = functools.partial(mosaic_tpu_decode, blocks=MosaicDecodeBlocks(slots=8192))
        yield "decode steps of 8,192 slots exceed VMEM", chip, DECODE_CONTROL, too_long, "(?i)vmem"
