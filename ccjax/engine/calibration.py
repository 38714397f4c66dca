"""Keeps a calibration beside its model. Knows no question and measures nothing."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from ccjax.errors import ConfigError
from ccjax.policy.calibration import Calibration

logger = logging.getLogger(__name__)
CALIBRATION_FILE = "calibration.json"


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file.

    Raises:
      ConfigError: it cannot be read, or is none.
    """
    try:
        return Calibration.from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration: wanted a file that scripts/calibrate.py wrote, got {path}: {error}") from error


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes the file, or leaves the one that is there as it was."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(calibration.to_json(), indent=1) + "\n", "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def calibration_of(model: str, beside: Path | None, named: str | None) -> Calibration | None:
    """The calibration for the model of that fingerprint, from the file that is named or else the one in its directory;
    None where there is none there, or it is of other weights or another dtype, which is logged.

    Raises:
      ConfigError: the file that is named does not exist or is for another model, or a file is damaged.
    """
    path = Path(named) if named is not None else None if beside is None else beside / CALIBRATION_FILE
    if path is None or (named is None and not path.exists()):
        return None
    found = read_calibration(path)
    if found.model == model:
        return found
    if named is not None:
        raise ConfigError(f"calibration: wanted one of this model and dtype, got {path}, which is for another")
    logger.warning("%s is of other weights or another dtype: this model is served as uncalibrated", path)
    return None
