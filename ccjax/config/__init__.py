"""Settings of engine, documents and server in groups: type, default, bounds and description of every option.

The engine's settings are also the keywords of `Engine.from_pretrained`. The command line (`ccjax.cli`) is generated
from all of them but those marked `KEYWORD_ONLY`.
"""

from ccjax.config.base import SettingsModel
from ccjax.config.documents import DEMO, DocumentOptions
from ccjax.config.engine import EngineConfig

__all__ = ["DEMO", "DocumentOptions", "EngineConfig", "SettingsModel"]
