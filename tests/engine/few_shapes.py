"""Fewer sizes than in `ccjax.runner.buckets`: each size compiles all steps again, which takes most of the test time."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator

import pytest

from ccjax.kernels import dispatch
from ccjax.models.llama3 import LlamaConfig
from ccjax.runner import batch_sizes, compiled_sizes, device, device_model, heavy_hitters, kernels, pool
from ccjax.runner.pool import PAGE_TOKENS, DevicePool

_MODULES = (batch_sizes, compiled_sizes, device_model, heavy_hitters, pool)
_PAGES = (1024, 8192)
"""Pages in a pool's arrays; those past its budget are never allocated."""


def _one_of(*sizes: int) -> Callable[[int], int]:
    """A function that returns the first of these sizes that is large enough, or the next power of two."""
    return lambda number: next((size for size in sizes if number <= size), 1 << (number - 1).bit_length())


SIZES = {
    "token_bucket": _one_of(16, 128, 256),  # never more than slots
    "slot_bucket": _one_of(256, 1024, 4096),
    "segment_bucket": _one_of(16, 256),
    "batch_bucket": _one_of(4, 32),
    "entry_bucket": _one_of(64, 512),
}


@contextlib.contextmanager
def few_shapes() -> Iterator[None]:
    """Engines in this process pad to these sizes, regardless of the sizes of their pools."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _MODULES:
            for name, size in SIZES.items():
                if hasattr(module, name):
                    patch.setattr(module, name, size)
        patch.setattr(DevicePool, "num_slots", property(lambda pool: _array_pages(pool) * PAGE_TOKENS))
        patch.setattr(DevicePool, "_empty_layers", _padded_layers)
        patch.setattr(device, "check_kernels", lambda *model: _checked(*model, tuple(dispatch.BEST.items())))
        yield


@functools.cache
def _checked(attention: str | None, config: LlamaConfig, dtype: str, best: tuple[tuple[str, str], ...]) -> None:
    """`check_kernels`, which traces the kernels, only once per model."""
    kernels.check_kernels(attention, config, dtype)


def _array_pages(pool: DevicePool) -> int:
    return _one_of(*_PAGES)(pool.num_pages)


def _padded_layers(pool: DevicePool) -> list:
    budget = types.SimpleNamespace(kv_spec=pool.kv_spec, num_pages=_array_pages(pool), _mesh=pool._mesh)
    return _EMPTY_LAYERS(budget)


_EMPTY_LAYERS = DevicePool._empty_layers
