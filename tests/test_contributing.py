"""The examples of CONTRIBUTING.md: each is applied to a copy of the sources, and its test runs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"<!-- (?:(?P<file>\S+) before: (?P<anchor>.+?)|test) -->\n```python\n(?P<code>.*?)```", re.DOTALL)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def _examples() -> dict[str, list[re.Match[str]]]:
    """Blocks by the heading of their section."""
    _, *parts = _HEADING.split((ROOT / "CONTRIBUTING.md").read_text())
    found = {title: list(_BLOCK.finditer(text)) for title, text in zip(parts[::2], parts[1::2], strict=True)}
    return {title: blocks for title, blocks in found.items() if blocks}


def _with_marks(title: str) -> Any:
    needs_peers = "import transformers" in _examples()[title][-1]["code"]
    return pytest.param(title, marks=[pytest.mark.peers] if needs_peers else [])


@pytest.mark.parametrize("title", [_with_marks(title) for title in _examples()])
def test_example(title, tmp_path):
    for folder in ("ccjax", "models", "store", "pallas_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("tests", "scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    *edits, test = _examples()[title]
    assert edits and test["file"] is None
    for edit in edits:
        path = tmp_path / edit["file"]
        text = path.read_text()
        assert text.count(edit["anchor"]) == 1, (
            f"{edit['file']}: {edit['anchor']!r} occurs {text.count(edit['anchor'])} times"
        )
        path.write_text(text.replace(edit["anchor"], edit["code"] + "\n\n" + edit["anchor"]))
    (tmp_path / "test_example.py").write_text(test["code"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
