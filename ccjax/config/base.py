"""Base class of all settings, and the wording of their errors: the setting, the accepted values, the given value."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ccjax.errors import ConfigError


class SettingsModel(BaseModel):
    """Frozen settings, given by keyword; an invalid one raises ConfigError. Fields without `repr` are secret."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            name, message = explained(type(self), error.errors()[0])
            raise ConfigError(
                f"{name}: {message}" if name else message
            ) from None  # pydantic's own text contains the values

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # `model_validate` need not go through it

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, validated like new ones."""
        return type(self)(**{**dict(self), **changes})


@dataclasses.dataclass(frozen=True)
class Described:
    """Metadata of a type.

    Attributes:
      wanted: description of accepted values in errors, such as "a URL such as redis://HOST:PORT/DB".
      metavar: placeholder in the help of the command line, such as URL.
      is_option: whether command lines and files can set it; otherwise only a keyword of the library does.
    """

    wanted: str | None = None
    metavar: str | None = None
    is_option: bool = True


KEYWORD_ONLY = Described(is_option=False)


def explained(model: type[SettingsModel], error: ErrorDetails) -> tuple[str, str]:
    """The setting that an error is about, or "" if the message names it, and the message in our words."""
    if not error["loc"]:
        return "", error["msg"].removeprefix("Value error, ")
    name = str(error["loc"][0])
    field = model.model_fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        return name, "no such setting" + (f", did you mean {near[0]}?" if near else "")
    message = f"wanted {wanted(field)}"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
    value = repr(error["input"]) if field.repr else type(error["input"]).__name__
    return name, f"{message}, got {'none' if error['type'] == 'missing' else value}"


def wanted(field: FieldInfo) -> str:
    """The accepted values of a field, as a phrase."""
    return _phrase(*unpacked(field))


def _phrase(kind: Any, metadata: Sequence[Any], is_optional: bool = False) -> str:
    for found in metadata:
        if isinstance(found, Described) and found.wanted is not None:
            return found.wanted
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}" + (" or None" if is_optional else "")
    if kind in (int, float):
        return _number(kind is int, metadata)
    if is_list(kind):
        return f"values, each {_phrase(*_without_metadata(get_args(kind)[0]))}"
    return {bool: "True or False", str: "a text"}.get(kind, "another value")


def unpacked(field: FieldInfo) -> tuple[Any, list[Any], bool]:
    """The type of an optional field without None, its metadata, and whether it may be None."""
    kind, metadata = _without_metadata(field.annotation)
    is_optional = False
    while get_origin(kind) in (Union, types.UnionType):
        others = [member for member in get_args(kind) if member is not type(None)]
        is_optional = is_optional or len(others) < len(get_args(kind))
        kind, more = _without_metadata(others[0])
        metadata += more
    return kind, [*field.metadata, *metadata], is_optional


def is_list(kind: Any) -> bool:
    """True for a tuple of any length, which a command line gives as several values."""
    return get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis


def item_of(kind: Any) -> Any:
    """The type of the values of a list."""
    return _without_metadata(get_args(kind)[0])[0]


def _without_metadata(kind: Any) -> tuple[Any, list[Any]]:
    metadata: list[Any] = []
    while hasattr(kind, "__metadata__"):
        kind, metadata = get_args(kind)[0], [*metadata, *kind.__metadata__]
    return kind, metadata


def _number(is_int: bool, metadata: Sequence[Any]) -> str:
    bounds: Mapping[str, float] = {
        name: getattr(constraint, name)
        for constraint in metadata
        for name, kind in (
            ("gt", annotated_types.Gt),
            ("ge", annotated_types.Ge),
            ("le", annotated_types.Le),
            ("lt", annotated_types.Lt),
        )
        if isinstance(constraint, kind)
    }
    noun = "an integer" if is_int else "a share" if bounds.get("le") == 1 else "a number"
    match bounds:
        case {"ge": least, "le": most}:
            return f"{noun} from {least:g} to {most:g}"
        case {"gt": least, "le": most}:
            return f"{noun} above {least:g}, at most {most:g}"
        case {"gt": least, "lt": most}:
            return f"{noun} above {least:g} and below {most:g}"
        case {"ge": 1} if is_int:
            return "a positive integer"
        case {"ge": least}:
            return f"{noun} of at least {least:g}"
        case {"gt": least}:
            return f"{noun} above {least:g}"
    return noun
