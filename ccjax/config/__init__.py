"""SettingsModel of engine, documents and server: every option's type, default, bounds and description, in groups.

The engine's are also the keywords of `Engine.from_pretrained`; the command line is made of all of them (`ccjax.cli`).
"""

from ccjax.config.base import SettingsModel
from ccjax.config.documents import DocumentOptions
from ccjax.config.engine import EngineConfig

__all__ = ["DocumentOptions", "EngineConfig", "SettingsModel"]
