"""Prints the memory plan of each device, at the start of a server or by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ccjax.cli.serving.messages import naming
from ccjax.cli.serving.options import ServeOptions, engine_settings

if TYPE_CHECKING:
    from ccjax.runner.memory import MemoryPlan


def memory_lines(plan: MemoryPlan, host_bytes: int) -> Iterator[str]:
    """The plan of one device, a line for each part, and the bytes of KV that main memory keeps."""
    size = plan.shapes.tensor_parallel_size
    yield f"  Memory of {'the device' if size == 1 else f'each of {size} devices'}, MB:"
    for name, num_bytes, what in plan.rows():
        yield f"    {name:<14}{num_bytes / 1e6:>12,.1f}  {what}"
    yield f"  Main memory for KV, MB:{host_bytes / 1e6:>13,.1f}  --host-cache-bytes, by default a quarter of it"


def print_memory_plan(args: ServeOptions) -> int:
    """Prints the plan of a server with these options; returns the exit code.

    Raises:
      StartupError: an invalid option, or the model does not fit; says what would.
    """
    from ccjax.engine import EngineConfig
    from ccjax.loading.devices import with_dtype
    from ccjax.loading.model import model_config
    from ccjax.runner.budgets import host_cache_bytes
    from ccjax.runner.device_memory import memory_plan
    from ccjax.runner.memory import check_fits

    with naming(args, "--model"):
        config = EngineConfig(**with_dtype(engine_settings(args)))
        plan = memory_plan(model_config(args.model, tokenizer=config.tokenizer), config)
        print("\n".join(memory_lines(plan, host_cache_bytes(config))))
        sys.stdout.flush()
        check_fits(plan)
    return 0
