"""Figures of the Triton kernel from XLA's CUDA plugin and ptxas, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PLATFORM = "cuda"
CHIPS = {"a100": "sm_80", "h100": "sm_90a"}
"""Chip -> the architecture that ptxas compiles for."""
PACKAGES = ("jax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
LIMITS = {
    "shared_bytes": {"a100": 166_912, "h100": 232_448},
    "spill_bytes": {"a100": 0, "h100": 0},
    "hbm_bytes": {"a100": 80_000_000_000, "h100": 80_000_000_000},
}
"""Shared memory of one program, no spilled registers, and a chip's memory."""

_COMMON = """
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "12.9.0" driver_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
"""
_DEVICES = {
    "a100": """
      name: "NVIDIA A100-SXM4-80GB" core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
      shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 l2_cache_size: 41943040
      memory_bandwidth: 2039040000000 device_memory_size: 85100068864 cuda_compute_capability { major: 8 }
    """,
    "h100": """
      name: "NVIDIA H100 80GB HBM3" core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
      shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
      memory_bandwidth: 3352320000000 device_memory_size: 84942979072
      cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
    """,
}


def set_environment(dump: Path) -> None:
    """Makes XLA write PTX and launch sizes to `dump`; call it before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump}"


def devices_of(chip: str) -> Sequence[Any]:
    """Four described devices of the chip in one host, from the text form of XLA's GpuTargetConfigProto."""
    from jax.experimental import topologies

    config = f"""gpu_device_info {{ {_COMMON} {_DEVICES[chip]} }} platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{chip}" """
    with contextlib.suppress(RuntimeError):  # loads the plugin, then finds no GPU
        topologies.get_topology_desc(platform=PLATFORM)
    described = topologies.get_topology_desc(
        platform=PLATFORM, topology_name="", topology="1x1x4", target_config=config
    )
    return described.devices


def implementation(chip: str) -> str:
    """The kernel's name as an implementation of `attention`."""
    return f"triton:{chip}"


def options() -> dict[str, Any]:
    """Compiler options: autotuning would need the GPU."""
    return {"xla_gpu_autotune_level": 0}


def figures(executable: Any, kernel: str, dump: Path, chip: str) -> dict[str, int]:
    """Registers, bytes of spill stores and shared memory of the kernel of that name."""
    del executable
    programs = [path for path in dump.glob("*.ptx") if f".entry {kernel}" in path.read_text()]
    launches = re.findall(
        rf" {kernel}\S* grid: .*shared_memory: (\d+) bytes",
        "".join(path.read_text() for path in dump.glob("*thunk_sequence.txt")),
    )
    if not programs or not launches:
        raise ValueError(f"compiler output: wanted PTX and a launch, got {len(programs)} and {len(launches)}")
    registers, spills = [], []
    for program in programs:
        command = [_ptxas(), "-v", f"-arch={CHIPS[chip]}", str(program), "-o", str(dump / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers += [int(count) for count in re.findall(r"Used (\d+) registers", report)]
        spills += [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
    return {"registers": max(registers), "spill_bytes": max(spills), "shared_bytes": max(map(int, launches))}


def _ptxas() -> str:
    wheels = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/ptxas")
    found = next(map(str, wheels), None) or shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("ptxas: wanted the wheel nvidia-cuda-nvcc-cu12 or a CUDA toolkit on PATH")
    return found


def controls() -> Iterator[tuple[str, str, Any, Any, str]]:
    """(name, chip, case, function, what the error must say): kernels that must not pass."""
    from ccjax.kernels.attention.blocks import TritonBlocks
    from ccjax.kernels.attention.triton import triton_attention
    from ccjax.kernels.decode.blocks import TritonDecodeBlocks
    from ccjax.kernels.decode.triton import triton_decode
    from scripts.kernels.cases import CONTROL, DECODE_CONTROL

    for chip in CHIPS:
        large = TritonBlocks(queries=128, keys=128, num_warps=8, num_stages=4)
        attend = functools.partial(triton_attention, blocks=large)
        yield "four stages of 128 keys exceed shared memory", chip, CONTROL, attend, "(?i)shared memory"
        few_warps = TritonBlocks(queries=128, keys=64, num_warps=4, num_stages=2)
        attend = functools.partial(triton_attention, blocks=few_warps)
        yield "four warps for 128 x 64 spill", chip, CONTROL, attend, "spill_bytes"
        long_steps = TritonDecodeBlocks(slots=1024, num_warps=4, num_stages=2, programs=1024)
        decode = functools.partial(triton_decode, blocks=long_steps)
        words = "(?i)spill_bytes|shared memory|shared_bytes"
        yield "decode steps of 1,024 slots spill", chip, DECODE_CONTROL, decode, words
