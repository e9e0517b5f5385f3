"""Placeholders in a layer's arguments, for tensors that differ from step to step: Table, Carried and Place.

A ``Table`` follows from the positions, a ``Carried`` from the token, and a ``Place`` is a mapping in which layers leave
tensors for later ones. ``filled`` puts the tensors of a step in their place.

Tensor legend: T tokens, W values of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtype of a complex number's parts. A graph cannot hold ``dtype.to_real()``."""


class Table(NamedTuple):
    """Stands for a tensor that follows from the positions, in the arguments of a layer."""

    number: int
    """The table's index among the model's tables."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """The layout of a tensor among a layer's arguments, and its place in rows ``[T, W]``."""

    row_dim: int
    """The dimension of the tokens."""
    shape: tuple[int, ...]
    """Sizes of the other dimensions."""
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)

    def to_rows(self, tensor: Tensor) -> Tensor:
        rows = tensor.movedim(self.row_dim, 0)
        return (torch.view_as_real(rows) if self.dtype.is_complex else rows).reshape(rows.shape[0], -1)

    def from_rows(self, rows_TW: Tensor) -> Tensor:
        if self.dtype.is_complex:
            pairs = rows_TW.reshape(rows_TW.shape[0], *self.shape, 2).to(_PARTS[self.dtype])
            # No view as complex numbers: the pairs may begin at an odd place of their memory.
            return torch.complex(pairs[..., 0], pairs[..., 1]).movedim(0, self.row_dim)
        return rows_TW.reshape(rows_TW.shape[0], *self.shape).to(self.dtype).movedim(0, self.row_dim)


@dataclass(eq=False, slots=True)
class Carried:
    """Stands for a tensor that follows from the token, in the arguments of a layer: columns of the token's row."""

    form: TableForm
    start: int = -1
    """The first of its columns."""

    def read(self, rows_TW: Tensor) -> Tensor:
        return self.form.from_rows(rows_TW[:, self.start : self.start + self.form.width])

    def write(self, rows_TW: Tensor, tensor: Tensor) -> None:
        rows_TW[:, self.start : self.start + self.form.width] = self.form.to_rows(tensor)


@dataclass(eq=False, slots=True)
class Place:
    """Stands for a mapping in which layers leave tensors for later ones, in the arguments of a layer."""

    number: int
    reads: dict[Any, Any]
    """The entries that the mapping has for the layer: keys, each with a ``Carried`` in the place of its tensor."""
    leaves: dict[Any, Any]
    """The entries that the layer leaves for later layers, in the same form."""


def filled(
    arguments: Any, tables: Sequence[Tensor], rows_TW: Tensor | None = None, places: dict[int, Any] | None = None
) -> Any:
    """Put tables and columns of rows into a layer's arguments, in the place of what stands for them.

    ``places`` has the mappings in which the layer may leave something, by number; those that it lacks are put there.
    """
    if isinstance(arguments, Table):
        return tables[arguments.number]
    if isinstance(arguments, Carried):
        assert rows_TW is not None
        return arguments.read(rows_TW)
    if isinstance(arguments, Place):
        assert places is not None
        return places.setdefault(arguments.number, filled(arguments.reads, tables, rows_TW))
    if isinstance(arguments, dict):
        return {key: filled(value, tables, rows_TW, places) for key, value in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        return type(arguments)([filled(value, tables, rows_TW, places) for value in arguments])
    return arguments


def placeholders_in(arguments: Any, given: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what stands for something among a layer's arguments, each with what the layer was given there."""
    if isinstance(arguments, (Table, Carried, Place)):
        yield arguments, given
    elif isinstance(arguments, dict):
        for key in arguments:
            yield from placeholders_in(arguments[key], given[key])
    elif isinstance(arguments, (tuple, list)):
        for argument, value in zip(arguments, given, strict=True):
            yield from placeholders_in(argument, value)


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        for value in arguments.values():
            yield from tensors_in(value)
    elif isinstance(arguments, (tuple, list)):
        for value in arguments:
            yield from tensors_in(value)


def collect_tables(arguments: Any, given: Any, found: dict[int, Tensor]) -> None:
    """Find the tables among the arguments that a layer was given."""
    for each, tensor in placeholders_in(arguments, given):
        if isinstance(each, Table):
            found.setdefault(each.number, tensor)
