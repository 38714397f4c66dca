"""ccjax serves retrieval-augmented generation without paying for the same passage twice.

Users import only from here; names are loaded on first use, so that `import ccjax.policy` stays free of jax.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccjax.engine import Engine, EngineConfig, Request, Response
    from ccjax.types import Document, ReuseReport

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "ccjax.engine",
    "EngineConfig": "ccjax.engine",
    "Request": "ccjax.engine",
    "Response": "ccjax.engine",
    "Document": "ccjax.types",
    "ReuseReport": "ccjax.types",
}
__all__ = ["Document", "Engine", "EngineConfig", "Request", "Response", "ReuseReport"]


def _check_siblings() -> None:
    """`models` and `store` are generic names: refuse to run on someone else's package of the same name."""
    home = Path(__file__).resolve().parent.parent
    for name in ("models", "store", "pallas_kernels"):
        spec = importlib.util.find_spec(name)
        found = spec.origin if spec is not None else None
        if found is None or Path(found).resolve().parent.parent != home:
            raise ImportError(
                f"ccjax needs its own package {name!r} from {home / name}, but Python finds {found!r}; "
                f"remove or rename the other {name!r}, or put {home} first on sys.path"
            )


_check_siblings()


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ccjax' has no attribute {name!r}")
