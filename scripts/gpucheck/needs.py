"""What the checks and benchmarks on an accelerator import of other packages. Imports none of it."""

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
"""Module -> the package that has it: all that an engine with a store in memory or in a directory takes. The machine
need not have the rest of pyproject.toml; `PYTHONPATH` set to the repository stands for an installation."""


def missing_packages() -> list[str]:
    """The packages that are not there."""
    return [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
