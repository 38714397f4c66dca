"""Selects an implementation of an operation by name, platform and chip; a named one is never replaced by another."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

BEST = {"cpu": "xla", "gpu": "triton", "tpu": "mosaic_tpu"}
"""Platform -> the implementation that `None` stands for, unless an operation has its own."""

logger = logging.getLogger(__name__)

# A kind without sizes of its own has those of a chip with no more fast memory, for which the kernels compile on it
# (`make kernels-aot`): those of "l4" need little enough shared memory for every GPU since Ampere.
_DEVICE_KINDS = {
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h100",
    "NVIDIA GH200": "h100",
    "NVIDIA H20": "h100",
    "NVIDIA H800": "h100",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "b200",
    "NVIDIA A800": "a100",
    "NVIDIA A30": "a100",
    "NVIDIA A10": "l4",
    "NVIDIA A16": "l4",
    "NVIDIA A40": "l4",
    "NVIDIA A2": "l4",
    "NVIDIA L4": "l4",
    "NVIDIA L20": "l4",
    "NVIDIA RTX": "l4",
    "NVIDIA GeForce RTX 30": "l4",
    "NVIDIA GeForce RTX 40": "l4",
    "NVIDIA GeForce RTX 50": "l4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5e",
    "TPU v4": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def chip_of(device_kind: str) -> str:
    """JAX's `device_kind` as the name of a chip with block sizes; kinds that have none are returned unchanged."""
    return next((chip for start, chip in _DEVICE_KINDS.items() if device_kind.startswith(start)), device_kind)


def name_of(name: str | None, best: Mapping[str, str] = BEST) -> str:
    """The name itself, or that of the platform's own implementation if it is None.

    Raises:
      NotImplementedError: there is none for this platform.
    """
    if name is not None:
        return name
    platform = jax.default_backend()
    if platform not in best:
        raise NotImplementedError(f"platform {platform!r}: wanted one of {sorted(best)}, or a named implementation")
    return best[platform]


def implementation(
    name: str | None,
    plain: Mapping[str, Callable[..., Any]],
    kernels: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]],
    best: Mapping[str, str] = BEST,
) -> Callable[..., Any]:
    """The function for a name.

    Args:
      name: key of `plain`, or key of `kernels`, optionally with ":chip" for a chip that is not present, or "_interpret"
        for any platform; None for the platform's own or, on a chip without block sizes, XLA's form, with a warning.
      plain: functions that need no block sizes.
      kernels: functions with arguments `blocks` and `interpret`, and their blocks by chip.
      best: platform -> the implementation that None stands for.

    Raises:
      NotImplementedError: the name, platform or chip is not supported.
    """
    may_substitute, name = name is None, name_of(name, best)
    if name in plain:
        return plain[name]
    is_interpreted = name.endswith("_interpret")
    base, _, chip = name.removesuffix("_interpret").partition(":")
    if base not in kernels or (is_interpreted and chip):
        names = [*plain, *kernels, *(f"{kernel}_interpret" for kernel in kernels)]
        raise NotImplementedError(f"implementation: wanted one of {sorted(names)}, got {name!r}")
    function, blocks = kernels[base]
    chip = "interpret" if is_interpreted else chip or chip_of(jax.devices()[0].device_kind)
    if chip not in blocks and may_substitute:
        _warn(base, chip)
        return plain["xla"]
    if chip not in blocks:
        raise NotImplementedError(
            f"implementation {name!r}: wanted a chip of {sorted(set(blocks) - {'interpret'})}, got {chip!r}; "
            "another implementation has to be named"
        )
    return functools.partial(function, blocks=blocks[chip], interpret=is_interpreted)


@functools.cache  # once each
def _warn(kernel: str, chip: str) -> None:
    logger.warning("attention: %s has no block sizes for %s; XLA's form is used, which is slower", kernel, chip)
