"""OpenAI-compatible HTTP server of one engine.

Names are loaded on first use: settings can be checked before jax is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccjax.server.app import create_app
    from ccjax.server.service import Service
    from ccjax.server.settings import ServerSettings

_EXPORTS = {"create_app": "app", "Service": "service", "ServerSettings": "settings"}
__all__ = ["ServerSettings", "Service", "create_app"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
