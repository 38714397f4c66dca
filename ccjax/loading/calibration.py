"""Keeps a calibration beside its model."""

from __future__ import annotations

from pathlib import Path

from ccjax.loading.model_files import model_file, read_model_file, write_model_file
from ccjax.policy.calibration import Calibration

CALIBRATION_FILE = "calibration.json"
_PROGRAM = "ccjax calibrate"


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file.

    Raises:
      ConfigError: it cannot be read, or is none.
    """
    return read_model_file(path, "calibration", _PROGRAM, Calibration.from_json)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes the file, or leaves the one that is there as it was."""
    write_model_file(path, calibration.to_json())


def calibration_of(model: str, beside: Path | None, named: str | None) -> Calibration | None:
    """The calibration for the model of that fingerprint, from the file that is named or else the one in its directory;
    None where there is none there, or it is of other weights or another dtype, which is logged.

    Raises:
      ConfigError: the file that is named does not exist or is for another model, or a file is damaged.
    """
    return model_file(
        "calibration",
        _PROGRAM,
        Calibration.from_json,
        lambda found: None if found.model == model else "is of other weights or another dtype",
        beside=None if beside is None else beside / CALIBRATION_FILE,
        named=named,
    )
