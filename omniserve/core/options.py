"""Options: frozen dataclasses whose fields are given by name, as ``NAME=VALUE`` on a command line."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

Value = bool | int | float | str | None
Group = TypeVar("Group")


def make_options(kind: type[Group], values: Mapping[str, Value], *, owner: str) -> Group:
    """Return a dataclass with these fields, given by name.

    A string is read as the field's type, so that a command line can give all of them. Errors name the ``owner`` of the
    options, such as ``scheduler 'neo'``.

    Raises:
        ValueError: There is no such option, or its value is out of range or of another type.
    """
    types = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise ValueError(f"{owner} has no option {name!r}; it has {', '.join(names)}")
    return kind(**{name: _value(name, types[name], value) for name, value in values.items()})


def _value(name: str, kind: Any, value: Any) -> Any:
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        if value not in choices:
            raise ValueError(f"{name} must be {' or '.join(choices)}, got {value!r}")
        return value
    if type(None) in choices:
        if value is None or value == "none":
            return None
        (kind,) = (choice for choice in choices if choice is not type(None))
    if kind is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name} must be true or false, got {value!r}")
    if kind is str or isinstance(value, bool):
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}") from None


def named_value(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``; an argparse type."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value
