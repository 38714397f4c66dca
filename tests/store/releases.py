"""A later release for the tests: a copy of the package `ccjax.store` with its own format, which reads both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_RECORDS = [
    ("_VERSIONS = (FORMAT_VERSION, CODED_VERSION)", "_VERSIONS = (FORMAT_VERSION, CODED_VERSION, 3)"),
    ('"format_version": FORMAT_VERSION,', '"format_version": 3, "of_a_later_release": [1],'),
    ('if body["format_version"] == FORMAT_VERSION:', 'if body["format_version"] in (FORMAT_VERSION, 3):'),
    ('"num_bytes": record.num_bytes,', '"kv_bytes": record.num_bytes,'),
    ('body["num_bytes"], body["meta"]', 'body.get("kv_bytes", body.get("num_bytes")), body["meta"]'),
]
_STORE = [("FORMAT_VERSION = 1\n", "FORMAT_VERSION = 2\n")]


def with_later_records(folder: Path) -> Path:
    """Only its records are of another format."""
    return _changed(folder, "records.py", _RECORDS)


def with_later_store(folder: Path) -> Path:
    """All of its stores are."""
    return _changed(folder, "spec.py", _STORE)


def spawn(release: Path, module: str, *arguments: object) -> subprocess.Popen[str]:
    """`python -m MODULE ...` with the package `ccjax.store` of that release."""
    paths = [str(release), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # Not where the tests are: Python looks for packages in the current directory first.
    return subprocess.Popen(
        command, cwd=release, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def _changed(folder: Path, name: str, changes: list[tuple[str, str]]) -> Path:
    package = folder / "ccjax"
    shutil.copytree(ROOT / "store", package / "store", ignore=shutil.ignore_patterns("__pycache__"))
    source = (ROOT / "ccjax/__init__.py").read_text("utf-8")
    (package / "__init__.py").write_text(f"{source}\n__path__.append({str(ROOT / 'ccjax')!r})\n", "utf-8")
    file = package / "store" / name
    text = file.read_text("utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{name} has no longer one {old!r}"
        text = text.replace(old, new)
    file.write_text(text, "utf-8")
    return folder
