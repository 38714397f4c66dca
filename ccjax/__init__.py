"""ccjax serves retrieval-augmented generation and reuses the KV of passages that it has computed before.

Users import only from here. Names are loaded on first use, so that `import ccjax.policy` does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccjax import functional
    from ccjax.engine import Constraint, Engine, EngineConfig, Request, Response, SamplingParams
    from ccjax.types import Document, ReuseReport

__version__ = "0.1.0"

_EXPORTS = {
    "Constraint": "ccjax.engine",
    "Engine": "ccjax.engine",
    "EngineConfig": "ccjax.engine",
    "Request": "ccjax.engine",
    "Response": "ccjax.engine",
    "SamplingParams": "ccjax.engine",
    "Document": "ccjax.types",
    "ReuseReport": "ccjax.types",
}
__all__ = [
    "Constraint",
    "Document",
    "Engine",
    "EngineConfig",
    "Request",
    "Response",
    "ReuseReport",
    "SamplingParams",
    "functional",
]


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module("ccjax.functional")
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ccjax' has no attribute {name!r}")
