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
    """The calibration for the model with the fingerprint `model`, from the file `named` or else from the directory
    `beside`; None if that has none, or one for other weights or another dtype, which is logged.

    Raises:
      ConfigError: the file `named` does not exist or is for another model, or a file is damaged.
    """
    return model_file(
        "calibration",
        _PROGRAM,
        Calibration.from_json,
        lambda found: None if found.model == model else "is of other weights or another dtype",
        beside=None if beside is None else beside / CALIBRATION_FILE,
        named=named,
    )
