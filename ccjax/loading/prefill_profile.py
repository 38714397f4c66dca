"""Reads and writes profiles of prefill times: in a model's directory, or beside the compiled steps."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ccjax.errors import ConfigError
from ccjax.loading.model_files import model_file, read_model_file, write_model_file
from ccjax.policy.prefill_cost import PrefillGrid

PROFILE_FILE = "prefill_profile.json"
VERSION = 1

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrefillProfile:
    """T(cached, new) of one model on one kind of device.

    Attributes:
      model: fingerprint of weights, tokenizer and dtype.
      device: JAX's device kind.
      settings: the engine's settings, for information only.
    """

    model: str
    device: str
    grid: PrefillGrid
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values."""
        return {"version": VERSION, "model": self.model, "device": self.device, "settings": dict(self.settings)} | {
            "grid": self.grid.to_json()
        }

    @classmethod
    def from_json(cls, value: Any) -> PrefillProfile:
        """Reads what `to_json` returned.

        Raises:
          ValueError: anything else; the message says what.
        """
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            raise ValueError(f"profile: wanted an object of version {VERSION}, got {value!r:.80}")
        model, device, settings = (value.get(name) for name in ("model", "device", "settings"))
        if not isinstance(model, str) or not isinstance(device, str) or not isinstance(settings, Mapping):
            raise ValueError("profile: wanted strings under 'model' and 'device' and an object under 'settings'")
        return cls(model, device, PrefillGrid.from_json(value.get("grid")), dict(settings))


def write_profile(path: Path, profile: PrefillProfile) -> None:
    """Writes the file atomically: on failure an existing one stays unchanged."""
    write_model_file(path, profile.to_json())


def profile_of(model: str, beside: Path | None, named: str | None) -> PrefillProfile | None:
    """The profile for the model with the fingerprint `model` on this kind of device, from the file `named` or else from
    the directory `beside`; None if that has none, or one for another model or device, which is logged.

    Raises:
      ConfigError: the file `named` does not exist or is for another model or device, or a file is damaged.
    """
    device = jax.devices()[0].device_kind

    def why_not(found: PrefillProfile) -> str | None:
        if found.model != model:
            return "is of other weights or another dtype"
        return None if found.device == device else f"was measured on {found.device!r}, not on {device!r}"

    return model_file(
        "prefill_profile",
        "scripts/profile_prefill.py",
        PrefillProfile.from_json,
        why_not,
        beside=None if beside is None else beside / PROFILE_FILE,
        named=named,
    )


class KeptProfile:
    """The coarse profile of a model on so many of these devices, beside JAX's compiled steps; without a directory for
    these nothing is kept.

    Args:
      model: fingerprint of the model.
      num_devices: devices that it is split over.
    """

    def __init__(self, model: str, num_devices: int = 1) -> None:
        self._model, self._device = model, f"{num_devices} x {jax.devices()[0].device_kind}"
        name = hashlib.sha256(f"{model} {self._device}".encode()).hexdigest()[:16]
        directory = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        self._path = None if directory is None else Path(directory) / f"prefill-{name}.json"

    def read(self) -> PrefillGrid | None:
        """The kept grid; None if there is none. A damaged one is left out, since it can be measured again."""
        if self._path is None or not self._path.exists():
            return None
        try:
            found = read_model_file(self._path, "prefill_profile", "a server", PrefillProfile.from_json)
        except ConfigError as error:
            logger.warning("%s", error)
            return None
        return found.grid if (found.model, found.device) == (self._model, self._device) else None

    def write(self, grid: PrefillGrid) -> None:
        """Keeps a grid for later processes, if the directory can be written."""
        if self._path is None:
            return
        try:
            write_profile(self._path, PrefillProfile(self._model, self._device, grid))
        except OSError as error:
            logger.warning("prefill profile: not kept: %s", error)
