"""Settings every test runs under: strict JAX promotion, checked array shapes, CPU unless `-m gpu`. Imports no jax.

Settings travel in environment variables, so that the subprocesses of tests inherit them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import pytest

from tests.data import data_path

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Some virtual machines report AMX and then stop a process that uses it: torch's bfloat16 would end the test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# `params` is left out: jax rebuilds its dataclasses with leaves that are no arrays (shapes, None, shardings).
_STEMS = {path.stem for path in (ROOT / "models/llama3").glob("[a-z]*.py")} - {"params"}
_CHECKED = [f"models.llama3.{stem}" for stem in sorted(_STEMS)]
jaxtyping.install_import_hook([*_CHECKED, "pallas_kernels"], "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in (config.getoption("markexpr") or "").replace("not gpu", ""):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "peers": importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
        "gpu": os.environ.get("JAX_PLATFORMS") == "cpu" or shutil.which("nvidia-smi") is None,
    }
    reasons = {"peers": "needs torch and transformers", "gpu": "needs an NVIDIA GPU and `-m gpu`"}
    for item in items:
        for name, is_missing in missing.items():
            if is_missing and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


@pytest.fixture
def test_data() -> Callable[..., Path]:
    """`test_data("qa", "file.jsonl")` is the path of a data file, or skips the test."""
    return data_path
