"""`--config FILE` and `--print-config`: every option of `ccjax serve` as a line of YAML."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ccjax.cli.serving.messages import StartupError, naming
from ccjax.cli.serving.options import engine_settings, server_settings

_SECRETS = frozenset({"api_key", "admin_key", "tenant_salt"})
_NOT_IN_FILE = frozenset({"help", "config", "print_config", "print_memory_plan"})
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_SWITCHES = (argparse.BooleanOptionalAction, argparse._StoreTrueAction)


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line over those of its `--config` file over the parser's defaults.

    Raises:
      StartupError: the file cannot be read or says what no option is or takes; names file, key and value.
    """
    args = parser.parse_args(argv)  # first alone: what is wrong on the command line is argparse's to say
    if args.config is None:
        return args
    given = sys.argv[1:] if argv is None else argv
    return parser.parse_args([*_as_arguments(parser, args.config), *given])


def config_lines(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """What `--print-config` prints: YAML that as a `--config` file comes to the same, but for what is secret. Comments
    are options that are not set and have no default.

    Raises:
      StartupError: a value that the server would refuse.
    """
    values = {**_engine_values(args), **vars(args)}
    lines = []
    for name, action in _options(parser).items():
        value = values.get(action.dest)
        if value is None or value == "":
            lines.append(f"# {name}:")
        elif action.dest in _SECRETS:
            lines.append(f"# {name}: set, not shown")
        elif isinstance(value, str) and _CREDENTIALS.search(value):
            lines.append(f"# {name}: {_CREDENTIALS.sub('...@', value)} (what is secret is not shown)")
        else:
            lines.append(yaml.safe_dump({name: _as_plain(name, value)}, allow_unicode=True, width=1 << 16).rstrip("\n"))
    return lines


def _engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings, defaults included; like the server's they are checked."""
    from ccjax.engine import EngineConfig

    settings: dict[str, Any] = {"dtype": "auto", **engine_settings(args)}
    with naming(args, ""):
        server_settings(args)
        # What "auto" means only a device could say.
        checked: dict[str, Any] = settings | ({"dtype": "float32"} if settings["dtype"] == "auto" else {})
        config = EngineConfig(**checked)
    return vars(config) | {"dtype": settings["dtype"]}


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Key in a file -> option."""
    actions = [action for action in parser._actions if action.dest not in _NOT_IN_FILE]
    return {action.option_strings[0].removeprefix("--"): action for action in actions}


def _as_arguments(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    options, arguments = _options(parser), []
    for key, value in _read(path).items():
        action = options.get(_normal(key))
        if action is None:
            near = difflib.get_close_matches(_normal(key), options, n=1)
            raise _error(path, f"{key}: no such option" + (f", did you mean {near[0]}?" if near else ""))
        try:
            arguments += _as_argument(action, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise _error(path, f"{key}: {error}") from None
    return arguments


def _as_argument(action: argparse.Action, value: Any) -> list[str]:
    if isinstance(action, _SWITCHES):
        if value not in ("true", "false"):
            raise ValueError(f"wanted true or false, got {value!r}")
        if value == "true":
            return [action.option_strings[0]]
        return list(action.option_strings[1:])
    text = _as_text(value)
    if action.choices is not None and text not in action.choices:
        raise ValueError(f"wanted one of {', '.join(action.choices)}, got {text!r}")
    try:
        (action.type or str)(text)  # type: ignore[operator]
    except ValueError:
        raise ValueError(f"wanted {getattr(action.type, '__name__', 'another value')}, got {text!r}") from None
    return [f"{action.option_strings[0]}={text}"]


class _Loader(yaml.BaseLoader):
    """Every value is the text that stands there, for the option's own type to read: to YAML 1.1 `2:3` is the number
    123. A key that comes twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = _normal(key.value) if isinstance(key, yaml.ScalarNode) else ""
            if not name or name in seen:
                what = "comes twice" if name else "is no name"
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} {what}", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--config: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise _error(path, f"not YAML as wanted: {' '.join(str(error).split())}") from None
    if not content:
        return {}
    if not isinstance(content, dict):
        raise _error(path, f"wanted lines 'name: value', got a {type(content).__name__}")
    return content


def _error(path: Path, what: str) -> StartupError:
    return StartupError(f"--config: {path}: {what}")


def _normal(key: str) -> str:
    return key.replace("_", "-")


def _as_text(value: Any) -> str:
    """As it would stand on the command line."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [f"{name}={part}" for name, part in value.items()]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"wanted a text or a list of them, got {value!r}")
    return ",".join(parts)


def _as_plain(name: str, value: Any) -> Any:
    """As YAML has it."""
    if isinstance(value, tuple):
        return ":".join(map(str, value)) if name == "replicas" else list(value)
    return str(value) if isinstance(value, Path) else value
