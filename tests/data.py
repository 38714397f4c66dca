"""Where tests find measured data that is not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def data_path(*parts: str) -> Path:
    """`parts` below `$CCJAX_TEST_DATA`, or below `../shared/data` beside the repository; skips the test if absent."""
    root = Path(os.environ.get("CCJAX_TEST_DATA") or _DEFAULT)
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"test data {'/'.join(parts)} is not in {root}; set CCJAX_TEST_DATA to the folder that has it")
    return path
