"""The package as pip installs it: built from the checkout and from the sdist, run beside files of the user's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.server import patience

BUILD = "import sys; from setuptools import build_meta; print(build_meta.{kind}(sys.argv[1]))"
COMMANDS = ("serve", "precompute", "evaluate", "calibrate", "snapshot")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what goes into a package, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("ccjax", "models", "store", "pallas_kernels"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in, with the command in bin/."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with modules whose names are those of ours in the checkout."""
    for name in ("models", "store", "pallas_kernels"):
        (tmp_path / name).mkdir()
    for name in ("models.py", "models/__init__.py", "store/__init__.py", "pallas_kernels/__init__.py"):
        (tmp_path / name).write_text("raise RuntimeError('the user has this one')\n")
    return tmp_path


def build(kind: str, source: Path, output: Path) -> Path:
    """What setuptools makes of a source tree."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD.format(kind=kind), str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, int]:
    """File in a wheel -> its checksum; without RECORD, which lists them in the order of the file system."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("/RECORD")}


def environment_of(package: Path, home: Path) -> dict[str, str]:
    cached = os.environ.get("XDG_CACHE_HOME", str(home / "cache"))
    return os.environ | {"PYTHONPATH": str(package), "XDG_CACHE_HOME": cached, "HOME": str(home)}


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_ready(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bool:
    """Whether a server started by this command comes to answer /ready."""
    arguments = ["--model", "demo", "--port", "0", "--no-warmup", "--search", "lexical"]
    process = subprocess.Popen([*command, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            url, _ = patience.final_line(process)
            return patience.get(f"{url}/ready").status_code == 200
        finally:
            process.terminate()


@pytest.mark.slow
def test_wheels_built_from_checkout_and_sdist_are_identical(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", checkout, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("build_wheel", unpacked, tmp_path / "unpacked")
    assert contents(again) == contents(wheel)
    names = contents(wheel)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ccjax"}
    assert {f"ccjax/cli/{command}.py" for command in COMMANDS} <= names.keys()
    assert {"ccjax/models/llama3/steps.py", "ccjax/store/tiered.py", "ccjax/kernels/rope/api.py"} <= names.keys()
    assert "ccjax/assets/demo_model/model.safetensors" in names


def test_installed_wheel_is_not_shadowed_by_user_modules(installed: Path, folder: Path) -> None:
    environment = environment_of(installed, folder)
    where = run([sys.executable, "-c", "import ccjax; print(ccjax.__file__)"], folder, environment)
    assert Path(where.strip()) == installed / "ccjax" / "__init__.py"
    command = str(installed / "bin" / "ccjax")
    output = run([command, "--help"], folder, environment)
    assert all(name in output for name in COMMANDS)
    assert "--model" in run([sys.executable, "-m", "ccjax", "serve", "--help"], folder, environment)
    assert is_ready([command, "serve"], folder, environment)


def test_checkout_is_not_shadowed_by_user_modules(folder: Path) -> None:
    environment = environment_of(Path(), folder)
    del environment["PYTHONPATH"]
    assert is_ready([sys.executable, str(ROOT / "scripts" / "serve.py")], folder, environment)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_and_launcher_report_the_same_error_without_importing_jax(name: str) -> None:
    code = f"""
import runpy, sys
sys.argv = ["x", {name!r}, "--no-such-option"]
try:
    runpy.run_module("ccjax", run_name="__main__")
finally:
    if "jax" in sys.modules:
        print("imported jax")
"""
    started = [
        subprocess.run([sys.executable, *how], cwd=ROOT, capture_output=True, text=True)
        for how in (["-c", code], [f"scripts/{name}.py", "--no-such-option"])
    ]
    assert [done.returncode for done in started] == [2, 2]
    assert [done.stdout for done in started] == ["", ""]
    lines = {done.stderr.splitlines()[-1] for done in started}
    assert len(lines) == 1 and lines.pop().startswith(f"ccjax {name}: error: ")
