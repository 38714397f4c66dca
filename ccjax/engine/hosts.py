"""A model over the devices of several hosts: one process leads, owns the store and serves requests; the others follow.

    group = join("10.0.0.1:8476", num_processes=2, process_id=...)  # before anything else uses JAX
    if group.is_leader:
        with Engine.from_pretrained("DIR", tensor_parallel_size=16) as engine: ...
    else:
        follow("DIR", tensor_parallel_size=16)

The leader is an ordinary `Engine`. `ccjax.models.lockstep` describes how the others execute the same operations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ccjax.engine.startup import load_configured
from ccjax.errors import ConfigError
from ccjax.loading.model import Progress
from ccjax.models.lockstep import Group, LostHostError, group, join
from ccjax.runner.device_model import DeviceModel

__all__ = ["Group", "LostHostError", "follow", "group", "join", "lead"]


def lead(model: DeviceModel) -> Group | None:
    """Makes this process the leader of its group: from now on all operations on the model's mesh are sent to the group.
    Returns None if there is no other process.

    Raises:
      ConfigError: this process is a follower.
      LostHostError: not all other processes connected.
    """
    found = group()
    if found is None or found.num_processes == 1:
        return None
    if not found.is_leader:
        raise ConfigError(f"process_id: wanted 0 for the one with the engine, got {found.process}; others follow")
    found.lead(_shared(model))
    return found


def follow(model: str | Path, *, progress: Progress | None = None, **settings: Any) -> None:
    """Loads this host's part of the model and executes the leader's operations until the leader's engine is closed.

    Args: as for `Engine.from_pretrained`, with the same values as the leader's. Settings that do not concern the model
      are ignored.

    Raises:
      ConfigError, CheckpointError: as `Engine.from_pretrained`.
      LostHostError: the leader died or could not be reached.
    """
    found = group()
    assert found is not None, "follow: wanted a process that has joined a group"
    loaded, _ = load_configured(model, settings, progress)
    found.follow(_shared(DeviceModel(loaded.params, loaded.config)))


def _shared(model: DeviceModel) -> dict[str, Any]:
    """The objects that operations refer to by name instead of sending them."""
    layers = {f"layer {number}": layer for number, layer in enumerate(model.params.layers)}
    return {"mesh": model.mesh, "config": model.config, "top": model.top, **layers}
