"""Command line flags made of the fields of a dataclass, which alone says their names, types, defaults and help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import math
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from omniserve.core.arguments import name_options
from omniserve.core.config import GIB
from omniserve.core.options import named_value


def integer(low: int) -> Callable[[str], int]:
    """Return an argparse type: an int of at least ``low``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be >= {low}, got {value}")
        return value

    return integer


def number(text: str) -> float:
    """Read a finite number >= 0; an argparse type."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text}")
    return value


def positive(text: str) -> float:
    """Read a finite number > 0; an argparse type."""
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text}")
    return value


def _gib(text: str) -> int:
    return int(number(text) * GIB)


def _cores(text: str) -> tuple[int, ...]:
    """Read ``0-3,8``: cores, and ranges of them."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"must be cores and ranges of them, such as 0-3,8, got {text!r}")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def _words(text: str) -> tuple[str, ...]:
    """Read words that are separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring that stands under each field of a dataclass, on one line, those of its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                text = ast.literal_eval(below.value)
                docs[field.target.id] = " ".join(text.replace("``", "").split())
    return docs


def flag_of(field: str) -> str:
    """Return the flag for a field: bytes are given in GiB, and seconds are not named."""
    return "--" + field.replace("_bytes", "_gib").removesuffix("_s").replace("_", "-")


def add_field_flags(
    parser: argparse.ArgumentParser,
    kind: type,
    names: Sequence[str],
    *,
    notes: Mapping[str, str] = {},
    prefix: str = "",
) -> None:
    """Add a flag for each of these fields of a dataclass, which have defaults; ``notes`` has more help by field.

    ``prefix`` stands before the names of flags and of the arguments that they set.
    """
    types, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name in names:
        default: Any = fields[name].default
        flag, dest = flag_of(prefix + name), prefix + name
        doc = field_docs(kind).get(name, "")
        text = ". ".join(part.rstrip(".") for part in (doc, notes.get(name)) if part).replace("%", "%%")
        hint = types[name]
        is_union = typing.get_origin(hint) in (typing.Union, UnionType, typing.Literal)
        choices = [each for each in typing.get_args(hint) if each is not NoneType] if is_union else [hint]
        if hint is bool:
            assert default is False
            parser.add_argument(flag, dest=dest, action="store_true", help=text)
            continue
        readers = {tuple[int, ...]: _cores, tuple[str, ...]: _words}
        read = _gib if name.endswith("_bytes") else readers.get(choices[0], choices[0])
        metavar = "GIB" if read is _gib else "SECONDS" if name.endswith("_s") else name.split("_")[-1].upper()
        if default not in (None, ()):
            text += f" (default: {default / GIB if read is _gib else default})"
        if typing.get_origin(hint) is typing.Literal:
            parser.add_argument(flag, dest=dest, default=default, choices=choices, help=text)
        else:
            parser.add_argument(flag, dest=dest, type=read, default=default, metavar=metavar, help=text)


def add_options_flag(parser: argparse.ArgumentParser, flag: str, kinds: Sequence[type], text: str) -> None:
    """Add a flag that gives fields of dataclasses by ``NAME=VALUE``, and may be repeated; its help lists them."""
    parser.formatter_class = _HelpFormatter
    name_options(parser, flag, (field.name for kind in kinds for field in dataclasses.fields(kind)))
    group = parser.add_argument_group(f"{flag} NAME=VALUE", "\n".join(_lines_on(kinds)))
    group.add_argument(flag, action="append", type=named_value, metavar="NAME=VALUE", help=f"{text}; repeat it")


def _lines_on(kinds: Sequence[type]) -> Iterator[str]:
    width = max(40, min(shutil.get_terminal_size().columns, 120) - 4)
    fields = {field.name: (field, kind) for kind in kinds for field in dataclasses.fields(kind)}
    for name, (field, kind) in fields.items():
        yield f"{name}={str(field.default).lower()}"
        yield from textwrap.wrap(field_docs(kind)[name], width, initial_indent="    ", subsequent_indent="    ")


class _HelpFormatter(argparse.HelpFormatter):
    """Leaves texts as they are that have several lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))


def flag_value(action: argparse.Action, value: Any) -> Any:
    """Return what a flag has to be given to have this value."""
    if action.type is _gib:
        return value / GIB
    if action.type in (_cores, _words):
        return ",".join(map(str, value))
    if action.type is named_value:
        return "=".join(value)
    return str(value) if isinstance(value, Path) else value
