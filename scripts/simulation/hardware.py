"""Peak rates of devices by their makers' public figures, with the shares of these that serving reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and the machine around it.

    Attributes:
      name: as in `HARDWARE`.
      flops_per_s: peak of dense products in bfloat16.
      memory_bytes: of the device.
      memory_bytes_per_s: peak of the device's memory.
      host_bytes_per_s: from host memory to the device, one way, as applications measure it.
      disk_bytes_per_s: from local disk to host memory.
      link_bytes_per_s: to the other devices of a split model, one way; 0 without such a link.
      compute_ratio: share of `flops_per_s` that large products reach.
      memory_ratio: share of `memory_bytes_per_s` reached by streaming weights and KV.
      layer_s: fixed time of a layer's step: launches and the host's work between two.
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    host_bytes_per_s: float
    disk_bytes_per_s: float = 5e9
    link_bytes_per_s: float = 0.0
    compute_ratio: float = 0.5
    memory_ratio: float = 0.8
    layer_s: float = 20e-6


_GB = 10**9
_GPU_HOST = {"PCIe 4.0 x16": 25e9, "PCIe 5.0 x16": 50e9}
"""Four fifths of a direction's 31.5 and 63 GB/s, as pinned copies reach."""

HARDWARE: Mapping[str, Hardware] = {
    device.name: device
    for device in (
        # NVIDIA A100 80 GB SXM data sheet: 312 TFLOPS bfloat16, 2,039 GB/s, NVLink 600 GB/s both ways.
        Hardware("a100", 312e12, 80 * _GB, 2039e9, _GPU_HOST["PCIe 4.0 x16"], link_bytes_per_s=300e9),
        # NVIDIA H100 SXM data sheet: 989 TFLOPS dense bfloat16, 3.35 TB/s, NVLink 900 GB/s both ways.
        Hardware("h100", 989e12, 80 * _GB, 3350e9, _GPU_HOST["PCIe 5.0 x16"], link_bytes_per_s=450e9),
        # NVIDIA H200 SXM data sheet: as the H100, with 141 GB at 4.8 TB/s.
        Hardware("h200", 989e12, 141 * _GB, 4800e9, _GPU_HOST["PCIe 5.0 x16"], link_bytes_per_s=450e9),
        # NVIDIA H800: an H100 whose NVLink is 400 GB/s both ways.
        Hardware("h800", 989e12, 80 * _GB, 3350e9, _GPU_HOST["PCIe 5.0 x16"], link_bytes_per_s=200e9),
        # NVIDIA A10G data sheet: 70 TFLOPS dense bfloat16, 24 GB at 600 GB/s.
        Hardware("a10g", 70e12, 24 * _GB, 600e9, _GPU_HOST["PCIe 4.0 x16"]),
        # Google Cloud TPU v5e: 197 TFLOPS bfloat16, 16 GB at 819 GB/s, links 400 GB/s both ways; host link assumed.
        Hardware("v5e", 197e12, 16 * _GB, 819e9, 12e9, link_bytes_per_s=200e9),
        # Google Cloud TPU v6e: 918 TFLOPS bfloat16, 32 GB at 1,640 GB/s, links 800 GB/s both ways; host link assumed.
        Hardware("v6e", 918e12, 32 * _GB, 1640e9, 25e9, link_bytes_per_s=400e9),
    )
}
"""By name. A `compute_ratio` of one half and a `memory_ratio` of four fifths, typical of served models, are assumed for
all of them."""


def hardware(name: str) -> Hardware:
    """The preset of that name.

    Raises:
      ValueError: no such preset; the message names the known ones.
    """
    if name not in HARDWARE:
        raise ValueError(f"hardware: wanted one of {', '.join(HARDWARE)}, got {name!r}")
    return HARDWARE[name]
