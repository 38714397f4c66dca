"""Options of a command, generated from its settings: command line, `--config` file and environment.

A field `max_queue` is the flag --max-queue and the line `max-queue: 5` of a file, at top level or below the name of its
group; secrets, such as `api_key`, can also be given by a variable, CCJAX_API_KEY. The command line overrides the file,
the file overrides the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from ccjax.cli.yaml_file import read_yaml
from ccjax.config.base import KEYWORD_ONLY, Described, SettingsModel, explained, is_list, item_of, unpacked
from ccjax.config.values import FilePath

Options = TypeVar("Options", bound=SettingsModel)
Part = TypeVar("Part", bound=SettingsModel)

_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class StartupError(Exception):
    """A command cannot start; the message is one line that names the argument."""


class CommandSettings(SettingsModel):
    """General options."""

    config: FilePath | None = None
    """YAML file of options, `name: value` per line, also in groups; the command line overrides it."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Option:
    """A field as an option.

    Attributes:
      name: of the field.
      group: its class, whose title is the name of the group; options without a title are not for files and variables.
    """

    name: str
    field: FieldInfo
    group: type[SettingsModel]

    @property
    def key(self) -> str:
        """Its name in files and, behind dashes, on the command line."""
        return _key(self.name)

    @property
    def title(self) -> str | None:
        """The name of the group."""
        return self.group.model_config.get("title")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"CCJAX_{self.name.upper()}"

    @property
    def kind(self) -> Any:
        """The type of its values."""
        return unpacked(self.field)[0]

    @property
    def metavar(self) -> str:
        """Placeholder for the value."""
        for found in unpacked(self.field)[1]:
            if isinstance(found, Described) and found.metavar:
                return found.metavar
        kind = item_of(self.kind) if is_list(self.kind) else self.kind
        return _METAVARS.get(kind) or "{" + ",".join(map(str, get_args(kind))) + "}"

    @property
    def help(self) -> str:
        """Its description and, if it has one, default."""
        field, shown = self.field, ""
        if field.is_required():
            shown = " (required)"
        elif field.default_factory is None and field.default is not None and field.default is not False:
            values = field.default if is_list(self.kind) else [field.default]
            shown = f" (default: {' '.join(map(str, values))})" if "".join(map(str, values)) else ""
        return f"{field.description}{shown}".replace("`", "").replace("%", "%%")

    @property
    def is_secret(self) -> bool:
        """Whether the whole value is secret; in a URL only the password is."""
        return not self.field.repr and self.metavar != "URL"


def parse(model: type[Options], argv: Sequence[str] | None, *, prog: str, description: str | None = None) -> Options:
    """All given options over their defaults. Exits for --help and unknown flags.

    Args:
      argv: the command line; None takes the process's own.

    Raises:
      StartupError: the file cannot be read, a name is unknown or a value is invalid; names where it is.
    """
    options = options_of(model)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    flags = _flags(model, argv, prog, description)
    path = flags.get("config")
    for option in options.values():
        # Other options have no variable: Kubernetes sets CCJAX_PORT for a service of that name.
        value = None if option.field.repr else os.environ.get(option.variable)
        if value or (value is not None and option.is_secret):  # an empty key is probably a mistake
            values[option.name], places[option.name] = value, option.variable
    if path is not None:
        for name, (key, value) in _file(options, Path(path)).items():
            values[name], places[name] = value, f"--config: {path}: {key}"
    for name, value in flags.items():
        values[name], places[name] = value, flag(name)
    try:
        return model.model_validate(values, strict=False)
    except ValidationError as error:
        name, message = explained(model, error.errors()[0])
        if not name:
            name, _, message = message.partition(": ")
        place = places.get(name) or flag(name)
        raise StartupError(f"{place}: {message}") from None


def run_command(
    model: type[Options],
    argv: Sequence[str] | None,
    action: Callable[[Options], int],
    *,
    prog: str,
    description: str | None,
) -> int:
    """Runs a command with its options; returns its exit code, 2 with one line on stderr if it is refused."""
    try:
        return action(parse(model, argv, prog=prog, description=description))
    except Exception as error:
        from ccjax.store.errors import StoreError  # takes a second, which --help need not wait for

        if not isinstance(error, (StartupError, StoreError, ValueError, OSError, ImportError)):
            raise
        print(f"{' '.join(prog.split()[:2])}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{_key(name)}"


def part(options: SettingsModel, model: type[Part]) -> Part:
    """The options that are settings of `model`."""
    return model(**{name: getattr(options, name) for name in model.model_fields})


def subset(model: type[SettingsModel], names: set[str]) -> type[SettingsModel]:
    """A model with these settings of another one, in the same groups."""
    groups = []
    for group in model.__mro__:
        own = [name for name in group.__dict__.get("__annotations__", {}) if name in names]
        fields: Any = {name: (model.model_fields[name].annotation, model.model_fields[name]) for name in own}
        if fields:
            groups.append(create_model(group.__name__, __base__=SettingsModel, __doc__=group.__doc__, **fields))
            groups[-1].model_config["title"] = group.model_config.get("title")
    return create_model(model.__name__, __base__=tuple(groups))


def config_lines(options: SettingsModel) -> list[str]:
    """The output of `--print-config`: YAML that gives the same options as a `--config` file, except secrets. Options
    that are not set and have no default are comments."""
    lines = []
    values = options.model_dump(mode="json")
    for option in options_of(type(options)).values():
        key, value = option.key, values[option.name]
        if option.title is None:
            continue
        if value is None or value == "":
            lines.append(f"# {key}:")
        elif option.is_secret:
            lines.append(f"# {key}: set, not shown")
        elif isinstance(value, str) and _CREDENTIALS.search(value):
            lines.append(f"# {key}: {_CREDENTIALS.sub('...@', value)} (without its secrets)")
        else:
            lines.append(yaml.safe_dump({key: value}, allow_unicode=True, width=1 << 16).rstrip("\n"))
    return lines


@functools.cache
def options_of(model: type[SettingsModel]) -> dict[str, _Option]:
    """Options by their name in files and, behind dashes, on the command line."""
    found = {}
    for name, field in model.model_fields.items():
        if KEYWORD_ONLY not in unpacked(field)[1]:
            group = next(base for base in reversed(model.__mro__) if name in base.__dict__.get("__annotations__", {}))
            found[_key(name)] = _Option(name, field, group)
    return found


def _flags(
    model: type[SettingsModel], argv: Sequence[str] | None, prog: str, description: str | None
) -> dict[str, Any]:
    """Field -> what the command line says: texts, which the settings themselves parse, or True or False."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for option in options_of(model).values():
        if option.title not in groups:
            groups[option.title] = parser.add_argument_group(option.title, option.group.__doc__)
        if option.kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction if option.field.default else "store_true"}
        else:
            how = {"metavar": option.metavar, "nargs": "*" if is_list(option.kind) else None}
        groups[option.title].add_argument(
            f"--{option.key}", dest=option.name, default=argparse.SUPPRESS, help=option.help, **how
        )
    return vars(parser.parse_args(argv))


def _key(name: str) -> str:
    """An option's name; an underscore at the end only keeps a field's from meaning something in Python."""
    return name.strip("_").replace("_", "-")


def _file(options: Mapping[str, _Option], path: Path) -> dict[str, tuple[str, Any]]:
    """Field -> its key in a file, and its value."""
    found: dict[str, tuple[str, Any]] = {}
    titles = {option.title for option in options.values()}

    def put(key: str, value: Any, group: str | None = None) -> None:
        known = {
            name: option
            for name, option in options.items()
            if option.title is not None and group in (None, option.title)
        }
        name, shown = key.replace("_", "-"), key if group is None else f"{group}: {key}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            elsewhere = options[name].title if group is not None and name in options else None
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(f"{shown}: no such option" + (f", it belongs to {elsewhere}" if elsewhere else hint))
        earlier, _ = found.setdefault(known[name].name, (shown, value))
        if earlier != shown:
            raise ValueError(f"{shown}: given twice, first as {earlier}")

    try:
        for key, value in read_yaml(path).items():
            if isinstance(value, Mapping) and key in titles:
                for inner, its in value.items():
                    put(inner, its, key)
            else:
                put(key, value)
    except OSError as error:
        raise StartupError(f"--config: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise StartupError(f"--config: {path}: {error}") from None
    return found
