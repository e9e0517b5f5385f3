"""PositionTables: what all layers are given of the positions, such as cos and sin, as rows ``[T, W]``.

The forms of all tables are recorded; of these ``kept`` are made in each step, because some layer computes q, k or v
from them. Tensor legend: T packed tokens, D columns of a row, W values of the tables that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from omniserve.layers.inspection import TableForm


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
