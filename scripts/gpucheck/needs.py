"""Packages that the checks and benchmarks on an accelerator need. Imports none of them."""

from __future__ import annotations

import importlib.util

NEEDED = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jaxtyping": "jaxtyping",
    "jinja2": "jinja2",
    "ml_dtypes": "ml-dtypes",
    "numpy": "numpy",
    "orbax": "orbax-checkpoint",
    "rich": "rich",
    "safetensors": "safetensors",
    "tensorstore": "tensorstore",
    "tiktoken": "tiktoken",
    "tokenizers": "tokenizers",
    "xxhash": "xxhash",
}
"""Module -> its package: all that an engine with a store in memory or in a directory needs. The machine need not have
the other packages of pyproject.toml; `PYTHONPATH` set to the repository replaces an installation."""


def missing_packages() -> list[str]:
    """The packages that are missing."""
    return [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
