"""Block sizes of the kernels, per chip; docs/kernels.md explains how they were chosen."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TritonBlocks:
    """Block sizes of one program of the Triton kernel.

    Attributes:
      queries: query tokens of one head; fewer if a call has fewer.
      keys: slots per step.
      num_warps, num_stages: warps of a program, and stages of the software pipeline.
      max_segments: columns of the mass that fit into registers; more segments need further passes.
      float32_queries: as `queries`, for four-byte elements.
      rotates: whether keys may be rotated inside the kernel; if not, they are rotated before it.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_segments: int = 64
    float32_queries: int = 128
    rotates: bool = True


@dataclasses.dataclass(frozen=True)
class MosaicBlocks:
    """Block sizes of one step of the TPU kernel.

    Attributes:
      rows: query tokens times the heads that share one kv head; all of them use the same keys.
      keys: slots per step; a multiple of 128 lanes.
    """

    rows: int
    keys: int


TRITON = {
    "a100": TritonBlocks(queries=128, keys=32, num_warps=8, num_stages=3, rotates=False),
    "h100": TritonBlocks(queries=128, keys=64, num_warps=8, num_stages=3, float32_queries=64),
    "b200": TritonBlocks(queries=128, keys=64, num_warps=8, num_stages=2, float32_queries=64, rotates=False),
    "l4": TritonBlocks(64, 32, num_warps=4, num_stages=2, max_segments=32, float32_queries=16, rotates=False),
    "interpret": TritonBlocks(queries=32, keys=64, num_warps=4, num_stages=2, max_segments=16, float32_queries=32),
}
MOSAIC_TPU = {
    "v5e": MosaicBlocks(rows=512, keys=1024),
    "v6e": MosaicBlocks(rows=1024, keys=1024),
    "interpret": MosaicBlocks(rows=512, keys=128),
}
