"""Options of a command, generated from its settings: command line, `--config` file and environment.

A field `max_queue` is the flag --max-queue and the line `max-queue: 5` of a file, at top level or below the name of its
group; secrets, such as `api_key`, can also be given by a variable, CCJAX_API_KEY. The command line overrides the file,
the file overrides the environment.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource

from ccjax.cli.yaml_file import read_yaml
from ccjax.config.base import KEYWORD_ONLY, Described, SettingsModel, explained, unpacked
from ccjax.config.values import FilePath

Options = TypeVar("Options", bound=SettingsModel)
Part = TypeVar("Part", bound=SettingsModel)

_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_NO_DEFAULT = re.compile(r" \(default(: (None|null)?| factory: \w+)\)")
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
        return self.name.replace("_", "-")

    @property
    def title(self) -> str | None:
        """The name of the group."""
        return self.group.model_config.get("title")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"CCJAX_{self.name.upper()}"

    @property
    def metavar(self) -> str:
        """Placeholder for the value."""
        kind, metadata, _ = unpacked(self.field)
        described = [
            annotation.metavar for annotation in metadata if isinstance(annotation, Described) and annotation.metavar
        ]
        return (described or [_METAVARS.get(kind) or "{" + ",".join(map(str, get_args(kind))) + "}"])[0]

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


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


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
            found[name.replace("_", "-")] = _Option(name, field, group)
    return found


def _flags(
    model: type[SettingsModel], argv: Sequence[str] | None, prog: str, description: str | None
) -> dict[str, Any]:
    """Field -> the text given on the command line."""
    options = options_of(model)
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}

    def add(_: Any, *names: str, **how: Any) -> Any:
        option = options.get(how["dest"].replace("_", "-"))
        if option is None:  # --help
            return parser.add_argument(*names, **how)
        if option.title not in groups:
            groups[option.title] = parser.add_argument_group(option.title, option.group.__doc__)
        how["help"] = _NO_DEFAULT.sub("", how["help"]).replace("`", "")
        if "metavar" in how:
            how["metavar"] = option.metavar
        return groups[option.title].add_argument(names[0], **how)

    source = CliSettingsSource(
        create_model(
            "Flags", __base__=BaseSettings, **{option.name: _as_text(option.field) for option in options.values()}
        ),
        root_parser=parser,
        add_argument_method=add,
        cli_kebab_case=True,
        cli_implicit_flags="dual",
    )
    given = source(args=True if argv is None else [*argv])()
    return {options[name.replace("_", "-")].name: value for name, value in given.items()}


def _as_text(field: FieldInfo) -> Any:
    """The field with any text as its value, unless it is a switch: the settings themselves parse it."""
    if unpacked(field)[0] is bool:
        return field.annotation, field
    text = copy.copy(field)
    text.metadata = []
    return str, text


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
