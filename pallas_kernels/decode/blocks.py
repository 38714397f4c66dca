"""Block sizes of the decode kernels, per chip. Knows chips by name only; docs/kernels.md gives the reasons."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TritonDecodeBlocks:
    """How the Triton kernel is cut.

    Attributes:
      slots: slots per step, in whole pages.
      num_warps, num_stages: warps of a program, and steps of the software pipeline.
      programs: a small batch is split along its context until there are about this many programs.
    """

    slots: int
    num_warps: int
    num_stages: int
    programs: int


@dataclasses.dataclass(frozen=True)
class MosaicDecodeBlocks:
    """How one step of the TPU kernel is cut.

    Attributes:
      slots: slots per step, in whole pages; all kv heads of them are loaded at once.
    """

    slots: int


TRITON = {
    "a100": TritonDecodeBlocks(slots=64, num_warps=4, num_stages=2, programs=432),
    "h100": TritonDecodeBlocks(slots=64, num_warps=4, num_stages=2, programs=528),
    "interpret": TritonDecodeBlocks(slots=32, num_warps=4, num_stages=2, programs=12),
}
MOSAIC_TPU = {
    "v5e": MosaicDecodeBlocks(slots=256),
    "v6e": MosaicDecodeBlocks(slots=256),
    "interpret": MosaicDecodeBlocks(slots=128),
}
