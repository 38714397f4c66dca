"""Reads and writes the calibration in a model's directory."""

from __future__ import annotations

from pathlib import Path

from ccjax.loading.model_files import model_file, read_model_file, write_model_file
from ccjax.policy.calibration import Calibration

CALIBRATION_FILE = "calibration.json"
_PROGRAM = "ccjax calibrate"


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file.

    Raises:
      ConfigError: it cannot be read, or is not a calibration.
    """
    return read_model_file(path, "calibration", _PROGRAM, Calibration.from_json)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes the file atomically: on failure an existing one stays unchanged."""
    write_model_file(path, calibration.to_json())


def calibration_of(model: str, beside: Path | None, named: str | None) -> Calibration | None:
    """The calibration for the model with the fingerprint `model`: the file `named`, or else that in the directory
    `beside`, or else the one that comes with the package; None if there is none, or only one for other weights or
    another dtype, which is logged.

    Raises:
      ConfigError: the file `named` does not exist or is for another model, or a file is damaged.
    """
    own = None if beside is None else beside / CALIBRATION_FILE
    if own is None or not own.exists():
        own = shipped_path(model)
    return model_file(
        "calibration",
        _PROGRAM,
        Calibration.from_json,
        lambda found: None if found.model == model else "is of other weights or another dtype",
        beside=own,
        named=named,
    )


def shipped_path(model: str) -> Path:
    """Where the package has the calibration of the model with the fingerprint `model`, if it has one."""
    return Path(__file__).resolve().parent.parent / "assets" / "calibrations" / f"{model[:16]}.json"
