"""A model over the devices of several hosts: one process leads, has the store and takes requests, the others follow.

    group = join("10.0.0.1:8476", num_processes=2, process_id=...)  # before anything else uses JAX
    if group.is_leader:
        with Engine.from_pretrained("DIR", tensor_parallel_size=16) as engine: ...
    else:
        follow("DIR", tensor_parallel_size=16)

The leader is an `Engine` like any other. See `ccjax.models.lockstep` for how the others keep up.
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
    """Everything on the model's mesh goes through the group of this process from now on; None where it has no other
    process.

    Raises:
      ConfigError: this process follows.
      LostHostError: not all the others came.
    """
    found = group()
    if found is None or found.num_processes == 1:
        return None
    if not found.is_leader:
        raise ConfigError(f"process_id: wanted 0 for the one with the engine, got {found.process}; others follow")
    found.lead(_shared(model))
    return found


def follow(model: str | Path, *, progress: Progress | None = None, **settings: Any) -> None:
    """Loads this host's part of the model and computes with it what the leader's engine does, until that is closed.

    Args: as of `Engine.from_pretrained`; both sides give the same. What is not about the model is not looked at.

    Raises:
      ConfigError, CheckpointError: as `Engine.from_pretrained`.
      LostHostError: the leader went without a word, or could not be reached.
    """
    found = group()
    assert found is not None, "follow: wanted a process that has joined a group"
    loaded, _ = load_configured(model, settings, progress)
    found.follow(_shared(DeviceModel(loaded.params, loaded.config)))


def _shared(model: DeviceModel) -> dict[str, Any]:
    """What operations name instead of sending it."""
    layers = {f"layer {number}": layer for number, layer in enumerate(model.params.layers)}
    return {"mesh": model.mesh, "config": model.config, "top": model.top, **layers}
