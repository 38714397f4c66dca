"""Block sizes of the kernels that move keys, per chip."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TritonMoveBlocks:
    """Block sizes of one program of the Triton kernel.

    Attributes:
      tokens: tokens per program with heads of up to 128; wider ones have fewer.
      num_warps: warps of a program.
    """

    tokens: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class MosaicMoveBlocks:
    """Block sizes of one step of the TPU kernel.

    Attributes:
      rows: tokens times heads, in whole tiles of 8 heads and 128 lanes.
    """

    rows: int


TRITON = {
    "a100": TritonMoveBlocks(tokens=32, num_warps=4),
    "h100": TritonMoveBlocks(tokens=32, num_warps=4),
    "b200": TritonMoveBlocks(tokens=32, num_warps=4),
    "l4": TritonMoveBlocks(tokens=32, num_warps=4),
    "interpret": TritonMoveBlocks(tokens=16, num_warps=4),
}
MOSAIC_TPU = {
    "v5e": MosaicMoveBlocks(rows=2048),
    "v6e": MosaicMoveBlocks(rows=2048),
    "interpret": MosaicMoveBlocks(rows=256),
}
