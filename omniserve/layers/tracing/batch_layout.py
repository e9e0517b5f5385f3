"""Layouts of a batch: RowLayout has the columns of a token's row, PositionTables what follows from positions alone.

Between two layers a row is mostly the output of one layer, which is the input of the next. Some models give their
layers more of a token: an embedding for each layer (Gemma 3n and 4), or K and V of an earlier layer, which a later one
uses as its own. These are columns behind the layer's input, so that a row that is away on the host tier takes them
along. The columns are

* the layer's input;
* what several layers are given;
* what one layer is given, the next layer's first: a queue that each layer turns on, so that a layer finds its own
  where all others find theirs, and layers of one structure share one graph;
* what earlier layers left;
* the output of the layer's mixer (``attention_free.Mixer``), which has run before the layer.

The forms of all position tables are recorded; of these ``PositionTables.kept`` are made in each step, because some
layer computes q, k or v from them.

Tensor legend: T packed tokens, W columns of a row, or values of the tables that are kept; D columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from omniserve.layers.tracing.model_tracer import TracedRun
from omniserve.layers.tracing.placeholders import Carried, Place, TableForm, placeholders_in


class RowLayout:
    """The columns of the rows of one model."""

    def __init__(self, hidden: TableForm) -> None:
        self._hidden = Carried(hidden, 0)
        self._row_dim = hidden.row_dim
        self._shared: list[Carried] = []
        self._queued: list[list[Carried]] = []
        """The queued columns of each layer: what it alone is given."""
        self.width = hidden.width
        """W, the number of columns."""
        self._left_start = self.width
        self._mixed: Carried | None = None

    def place_arguments(self, arguments: Sequence[Any]) -> None:
        """Give columns to what the layers are given of a token, by what stands for it in their arguments."""
        of_layers = [[one for one, _ in placeholders_in(each, each) if isinstance(one, Carried)] for each in arguments]
        of_layers = [list(dict.fromkeys(each)) for each in of_layers]
        every = [one for each in of_layers for one in each]
        self._shared = list(dict.fromkeys(one for one in every if every.count(one) > 1))
        self._queued = [[one for one in each if one not in self._shared] for each in of_layers]
        for one in self._shared:
            one.start, self.width = self.width, self.width + one.form.width
        for each in self._queued:
            start = self.width
            for one in each:
                one.start, start = start, start + one.form.width
        self.width += sum(one.form.width for each in self._queued for one in each)
        self._left_start = self.width

    def place_left(self, arguments: Sequence[Any], watched: Sequence[Mapping[int, WatchedPlace]]) -> None:
        """Give columns to what layers left for later ones, as a run has shown that these read it."""
        for index, places in enumerate(watched):
            for place in places_in(arguments[index]):
                for key, value in places[place.number].left().items():
                    readers = _readers(place.number, key, watched[index + 1 :])
                    if not readers:
                        continue
                    place.leaves[key] = carried = self._placed(value)
                    for reader in readers:
                        for later in places_in(arguments[index + 1 + reader]):
                            if later.number == place.number:
                                later.reads[key] = carried

    def place_mixed(self, form: TableForm) -> slice:
        """Give columns to the output of mixers, behind those of all arguments."""
        self._mixed = Carried(form, self.width)
        self.width += form.width
        return slice(self._mixed.start, self.width)

    def _placed(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._placed(each) for each in value)
        form = TableForm(0, tuple(value.shape[1:]), value.dtype)
        self.width += form.width
        return Carried(form, self.width - form.width)

    def turn(self, index: int) -> int:
        """Return how many columns of the queue a layer uses."""
        return sum(one.form.width for one in self._queued[index])

    @property
    def carries(self) -> bool:
        """A row is more than the layer's input."""
        return self.width > self._hidden.form.width

    def hidden(self, rows_TW: Tensor) -> Tensor:
        """Return the layer's input as the layer wants it."""
        return self._hidden.read(rows_TW)

    def mixed(self, rows_TW: Tensor) -> Tensor:
        """Return the output of the layer's mixer."""
        assert self._mixed is not None
        return self._mixed.read(rows_TW)

    def hidden_rows(self, hidden: Tensor) -> Tensor:
        """Return a layer's input or output as rows without what lies behind it."""
        return self._hidden.form.to_rows(hidden)

    def plain(self, rows_TW: Tensor) -> Tensor | None:
        """Return the layer's input as ``[T, D]``; None if it has more dimensions."""
        if self._row_dim != 0 or len(self._hidden.form.shape) != 2:
            return None
        return rows_TW[:, : self._hidden.form.width]

    def transposed(self, hidden: Tensor) -> Tensor:
        """Turn a layer's input for one sequence into that for as many sequences of one token, or back."""
        return hidden.transpose(self._row_dim, self._row_dim + 1)

    def first(self, run: TracedRun, arguments: Sequence[Any]) -> Tensor:
        """Return the rows for the first layer, from what a run of the model gave to all layers."""
        parts = [self._hidden.form.to_rows(run.inputs[0])]
        given = zip(arguments, run.arguments, strict=True)
        found = {one: value for each in given for one, value in placeholders_in(*each)}
        for one in (*self._shared, *(one for each in self._queued for one in each)):
            parts.append(one.form.to_rows(found[one]))
        parts.append(parts[0].new_zeros(parts[0].shape[0], self.width - self._left_start))
        return torch.cat(parts, dim=-1)

    def next(self, turn: int, output: Tensor, rows_TW: Tensor) -> Tensor:
        """Return the rows behind a layer, which used ``turn`` columns of the queue, from its output and its rows."""
        output_rows = self._hidden.form.to_rows(output)
        if not self.carries:
            return output_rows
        queue_start = self._hidden.form.width + sum(one.form.width for one in self._shared)
        turned = queue_start + turn
        return torch.cat(
            [
                output_rows,
                rows_TW[:, self._hidden.form.width : queue_start],
                rows_TW[:, turned : self._left_start],
                rows_TW[:, queue_start:turned],
                rows_TW[:, self._left_start :],
            ],
            dim=-1,
        )


class WatchedPlace(dict[Any, Any]):
    """Notes what is read of a mapping in which layers leave tensors."""

    def __init__(self, content: Mapping[Any, Any]) -> None:
        super().__init__(content)
        self.before = dict(content)
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def left(self) -> dict[Any, Any]:
        """Return what was put there."""
        return {key: value for key, value in super().items() if self.before.get(key) is not value}


def _readers(number: int, key: Any, later: Sequence[Mapping[int, WatchedPlace]]) -> list[int]:
    """Return which layers read what was left at a key, before it is replaced."""
    readers = []
    for index, places in enumerate(later):
        if number in places:
            if key in places[number].read:
                readers.append(index)
            if key in places[number].left():
                break
    return readers


def places_in(arguments: Any) -> list[Place]:
    """Return the places among a layer's arguments."""
    return [one for one, _ in placeholders_in(arguments, arguments) if isinstance(one, Place)]


def write_left(arguments: Any, places: Mapping[int, Any], rows_TW: Tensor) -> None:
    """Write what a layer left in its places to the columns of rows."""
    for place in places_in(arguments):
        for key, carried in place.leaves.items():
            _write(carried, places[place.number][key], rows_TW)


def _write(carried: Any, value: Any, rows_TW: Tensor) -> None:
    if isinstance(carried, Carried):
        carried.write(rows_TW, value)
        return
    for one, each in zip(carried, value, strict=True):
        _write(one, each, rows_TW)


class PositionTables:
    """The tables of a model; all are kept at first."""

    def __init__(self, forms: Sequence[TableForm]) -> None:
        self._forms = forms
        self.are_cos_and_sin = False
        """The two tables that are kept come from a rotary module, one by one; else one tensor holds all."""
        self.keep(range(len(forms)))

    def keep(self, numbers: Iterable[int]) -> None:
        """Choose the tables that are made; the others are zeros."""
        self.kept = [*numbers]
        dtypes = [self._forms[number].dtype for number in self.kept]
        real = {dtype.to_real() if dtype.is_complex else dtype for dtype in dtypes}
        # One dtype holds them all: an integer below 2^24 is a float32, and bf16 and back is exact.
        self._dtype = real.pop() if len(real) == 1 else reduce(torch.promote_types, real, torch.float32)

    def to_rows(self, found: Mapping[int, Tensor]) -> Tensor:
        """Return the kept ones among tables by their numbers, as rows."""
        return torch.cat([self._forms[number].to_rows(found[number]).to(self._dtype) for number in self.kept], dim=-1)

    def from_rows(self, hidden_TD: Tensor, cos: Tensor | None, sin: Tensor | None) -> list[Tensor]:
        """Return all tables as the layers want them; those that were not kept, or not given, are zeros.

        ``cos`` holds all, and so does ``sin``, unless they are ``are_cos_and_sin``.
        """
        tables = [form.from_rows(hidden_TD.new_zeros(hidden_TD.shape[0], form.width)) for form in self._forms]
        if cos is None:
            return tables
        rows = [cos, sin] if self.are_cos_and_sin else cos.split(self._widths(), dim=-1)
        for number, rows_TW in zip(self.kept, rows, strict=True):
            assert rows_TW is not None
            tables[number] = self._forms[number].from_rows(rows_TW)
        return tables

    def without(self, rows_TW: Tensor, number: int) -> Tensor | None:
        """Return rows of all kept tables without those of one; None if none is left."""
        rows = list(rows_TW.split(self._widths(), dim=-1))
        del rows[self.kept.index(number)]
        return torch.cat(rows, dim=-1) if rows else None

    def _widths(self) -> list[int]:
        return [self._forms[number].width for number in self.kept]
