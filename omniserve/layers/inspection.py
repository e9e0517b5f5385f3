"""Facts about a model's layers that one run shows: their arguments, and the operators and linears that they call.

Tensor legend: T tokens, W values of a table.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


def stand_ins(arguments: Any, given: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what stands for something among a layer's arguments, each with what the layer was given there."""
    if isinstance(arguments, (Table, Carried, Place)):
        yield arguments, given
    elif isinstance(arguments, dict):
        for key in arguments:
            yield from stand_ins(arguments[key], given[key])
    elif isinstance(arguments, (tuple, list)):
        for argument, value in zip(arguments, given, strict=True):
            yield from stand_ins(argument, value)


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


def collect(arguments: Any, given: Any, found: dict[int, Tensor]) -> None:
    """Find the tables among the arguments that a layer was given."""
    for each, tensor in stand_ins(arguments, given):
        if isinstance(each, Table):
            found.setdefault(each.number, tensor)


class LinearWatch:
    """Notes which linears of a layer are called with the same rows."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._calls: list[tuple[Tensor, list[nn.Linear]]] = []

    def __enter__(self) -> LinearWatch:
        def note(linear: nn.Linear, args: tuple[Any, ...]) -> None:
            for rows, linears in self._calls:
                if rows is args[0]:
                    linears.append(linear)
                    return
            self._calls.append((args[0], [linear]))

        linears = [module for module in self._layer.modules() if isinstance(module, nn.Linear)]
        self._hooks = [linear.register_forward_pre_hook(note) for linear in linears]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def called(self) -> list[nn.Linear]:
        """Return the linears that were called."""
        return list({id(linear): linear for _, linears in self._calls for linear in linears}.values())

    def groups(self) -> list[tuple[nn.Module, ...]]:
        """Return the linears that share their input, in the order called; none is in two groups."""
        called = Counter(id(linear) for _, linears in self._calls for linear in linears)
        groups = [tuple(each for each in linears if called[id(each)] == 1) for _, linears in self._calls]
        return [group for group in groups if len(group) > 1]


class OperatorLog(TorchDispatchMode):
    """Notes the operators that are called, with the shapes of tensors and the values of everything else.

    Raises:
        UnsupportedModelError: An operator's result has a shape that depends on values of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.sha256()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in function.tags or (
            torch.Tag.dynamic_output_shape in function.tags
            and (function is not torch.ops.aten.index.Tensor or _has_mask(args[1]))
        ):
            raise DataDependent(str(function))
        self.names.add(str(function))
        self._digest.update(repr((str(function), *map(_described, (args, kwargs or {})))).encode())
        return function(*args, **(kwargs or {}))

    def digest(self, arguments: str) -> str:
        self._digest.update(arguments.encode())
        return self._digest.hexdigest()


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class DataDependent(Exception):
    """An operator that no single graph can hold."""


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.stride())
    if isinstance(value, dict):
        return {key: _described(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    return value
