"""The check of the kernels on a device runs with the package's requirements and pytest alone, without a GPU too."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts import bench, gpu_check
from tests.polling import wait_until

ROOT = Path(__file__).resolve().parents[2]


def requirements(*names: str) -> set[str]:
    """The named packages and all that they need, without extras."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = re.match(r"[\w.-]+", left.pop()).group().lower().replace("_", "-")
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        if name not in found:
            found.add(name)
            left += [line for line in needed if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter that finds these packages only."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in requirements("ccjax", "pytest") - {"ccjax"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_check_runs_without_the_test_extra(bare_python, tmp_path):
    missing = "import hypothesis, beartype, openai, httpx, moto"
    assert subprocess.run([bare_python, "-c", missing], capture_output=True, cwd=ROOT).returncode
    output = tmp_path / "found.json"
    command = [bare_python, "scripts/gpu_check.py", "--quick", "--only", "tests", "kernels", "--output", output]
    command += ["--tests", "everything_recomputed or (test_packed_queries and reference) or last_one"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["wrong"] == [] and found["tests"]["tests"] == 8 and not found["tests"]["skipped"]
    assert "is not installed: array shapes and what tests leave behind are not checked" in done.stdout
    figures = found["benchmarks"]["kernels"]
    assert {case["kernel"] for case in figures["cases"]} == {"attention", "decode", "rope"}
    assert all(case["ms"] > 0 and case["share"] > 0 for case in figures["cases"])


@pytest.mark.parametrize("name", gpu_check.BENCHMARKS)
def test_benchmarks_accept_the_options_of_the_check(name, monkeypatch):
    seen = []
    module = importlib.import_module(f"scripts.benchmarks.{name}")
    monkeypatch.setattr(module, "run", lambda options: seen.append(options.name) or {})
    bench.main([name, "--json", *gpu_check.BENCHMARKS[name]])
    assert seen == [name]


def test_a_step_that_takes_too_long_leaves_no_process(tmp_path, monkeypatch):
    begun = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(3600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"

    def times_out(process, timeout):
        wait_until(lambda: begun.exists() and begun.read_text())
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", times_out)
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_check._run([sys.executable, "-c", parent], dict(os.environ), 1.0)
    wait_until(lambda: is_gone(int(begun.read_text())))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
