"""Keeps what prefills of a model cost on this machine beside the model. Decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ccjax.loading.model_files import model_file, write_model_file
from ccjax.policy.prefill_cost import PrefillGrid

PROFILE_FILE = "prefill_profile.json"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class PrefillProfile:
    """T(cached, new) of one model on one kind of machine.

    Attributes:
      model: fingerprint of weights, tokenizer and dtype.
      device: JAX's kind of device.
      settings: of the engine, for the record.
    """

    model: str
    device: str
    grid: PrefillGrid
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {"version": VERSION, "model": self.model, "device": self.device, "settings": dict(self.settings)} | {
            "grid": self.grid.to_json()
        }

    @classmethod
    def from_json(cls, value: Any) -> PrefillProfile:
        """What `to_json` gave.

        Raises:
          ValueError: it is something else; the message says what.
        """
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            raise ValueError(f"profile: wanted an object of version {VERSION}, got {value!r:.80}")
        model, device, settings = (value.get(name) for name in ("model", "device", "settings"))
        if not isinstance(model, str) or not isinstance(device, str) or not isinstance(settings, Mapping):
            raise ValueError("profile: wanted strings under 'model' and 'device' and an object under 'settings'")
        return cls(model, device, PrefillGrid.from_json(value.get("grid")), dict(settings))


def write_profile(path: Path, profile: PrefillProfile) -> None:
    """Writes the file, or leaves the one that is there as it was."""
    write_model_file(path, profile.to_json())


def profile_of(model: str, beside: Path | None, named: str | None) -> PrefillProfile | None:
    """The profile for the model of that fingerprint on this kind of device, from the file that is named or else the one
    in its directory; None where there is none there, or it is of another model or device, which is logged.

    Raises:
      ConfigError: the file that is named does not exist or does not fit, or a file is damaged.
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
