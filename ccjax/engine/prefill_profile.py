"""Profiles what prefills of a model cost on this machine, and keeps that beside the model. Decides nothing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ccjax.engine.model_files import model_file, write_model_file
from ccjax.policy.prefill_cost import PrefillGrid

if TYPE_CHECKING:
    from ccjax.engine.engine import Engine

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


def measure_prefills(
    engine: Engine,
    cached: Sequence[int],
    new: Sequence[int],
    *,
    repetitions: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PrefillGrid:
    """T(cached, new): prefills of `new` tokens behind one passage of `cached` that is reused exactly, from the fastest
    tier that took it; the median of several, after one that may have compiled. No other thread may use the engine.

    Args:
      progress: called with prefills done and in all.

    Raises:
      RequestError, ContextLengthError: a number is out of range.
      ValueError: the engine did not keep that many tokens.
    """
    rng = np.random.default_rng(0)

    def drawn(count: int) -> list[int]:
        return rng.integers(0, engine.model_config.vocab_size, count).tolist()

    total, done = len(cached) * len(new) * (repetitions + 1), 0
    rows = []
    for num_cached in cached:
        passages = [drawn(num_cached)] if num_cached else []
        if passages:
            engine.generate_from_tokens([(), *passages, drawn(1)], max_new_tokens=1, reuse="exact")
        row = []
        for num_new in new:
            seconds = []
            for _ in range(repetitions + 1):
                response = engine.generate_from_tokens([(), *passages, drawn(num_new)], max_new_tokens=1, reuse="exact")
                if response.reuse.reused_tokens != num_cached:
                    raise ValueError(f"cached: wanted {num_cached} tokens, got room for fewer in the engine's budgets")
                seconds.append(response.reuse.prefill_s)
                done += 1
                progress(done, total)
            row.append(statistics.median(seconds[1:]))
        rows.append(tuple(row))
    return PrefillGrid(tuple(cached), tuple(new), tuple(rows))
