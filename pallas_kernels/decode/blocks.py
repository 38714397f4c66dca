"""Block sizes of the decode kernels, per chip; docs/kernels.md gives the reasons."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TritonDecodeBlocks:
    """Block sizes of the Triton kernel.

    Attributes:
      slots: slots per step, in whole pages.
      num_warps, num_stages: warps of a program, and stages of the software pipeline.
      programs: a small batch is split along its context until there are about this many programs.
    """

    slots: int
    num_warps: int
    num_stages: int
    programs: int


@dataclasses.dataclass(frozen=True)
class MosaicDecodeBlocks:
    """Block sizes of one step of the TPU kernel.

    Attributes:
      slots: slots per step, in whole pages; loaded for all kv heads at once.
    """

    slots: int


TRITON = {
    "a100": TritonDecodeBlocks(slots=64, num_warps=4, num_stages=2, programs=432),
    "h100": TritonDecodeBlocks(slots=64, num_warps=4, num_stages=2, programs=528),
    "b200": TritonDecodeBlocks(slots=64, num_warps=4, num_stages=2, programs=592),
    "l4": TritonDecodeBlocks(slots=32, num_warps=4, num_stages=2, programs=232),
    "interpret": TritonDecodeBlocks(slots=32, num_warps=4, num_stages=2, programs=12),
}
MOSAIC_TPU = {
    "v5e": MosaicDecodeBlocks(slots=256),
    "v6e": MosaicDecodeBlocks(slots=256),
    "interpret": MosaicDecodeBlocks(slots=128),
}
