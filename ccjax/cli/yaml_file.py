"""Reads a YAML file with all values as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class _StringLoader(yaml.BaseLoader):
    """In YAML 1.1 `2:3` is the number 123; here every value is parsed by the option's own type. Duplicate keys are an
    error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = key.value.replace("_", "-") if isinstance(key, yaml.ScalarNode) else ""
            if not name or name in seen:
                what = "comes twice" if name else "is no name"
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} {what}", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Name -> text, list or mapping of texts.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not YAML of this form.
    """
    try:
        content = _StringLoader(path.read_text(encoding="utf-8")).get_single_data()
    except UnicodeDecodeError as error:
        raise OSError(str(error)) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML as wanted: {' '.join(str(error).split())}") from None
    if not content:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"wanted lines 'name: value', got a {type(content).__name__}")
    return content
