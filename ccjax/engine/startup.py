"""Loads a model from settings, for an engine and for the processes that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ccjax.config import EngineConfig
from ccjax.loading.model import LoadedModel, Progress, load_model, model_config
from ccjax.runner.device_memory import with_pool


def load_configured(
    model: str | Path, settings: Mapping[str, Any], progress: Progress | None
) -> tuple[LoadedModel, EngineConfig]:
    """Checks settings against a model before reading its weights, then loads it; returns the model and its settings.

    Args:
      settings: fields of `EngineConfig`.

    Raises:
      ConfigError, CheckpointError: as `Engine.from_pretrained`.
    """
    config = EngineConfig(**settings)
    with_pool(model_config(model, tokenizer=config.tokenizer), config)  # raises if the model does not fit
    loaded = load_model(
        model,
        dtype=config.dtype,
        quantization=config.quantization,
        tokenizer=config.tokenizer,
        tensor_parallel_size=config.tensor_parallel_size,
        progress=progress,
    )
    return loaded, config
