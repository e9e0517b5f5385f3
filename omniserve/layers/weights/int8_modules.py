"""Linears that round their rows to int8 beside weights of int8, which is compressed-tensors' W8A8.

A row's codes are the nearest integers to its values by its scale; a product is the integer sum of codes times the scale
of the row and that of the feature. Without a fixed scale, a row's is its largest value by 127.5, also where the ranks
of a tensor-parallel model have parts of the row. ``RoundedLinear`` is that in torch, with a dense weight; when the
model is patched, ``int8_linear`` computes the integer sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from omniserve.layers.compiled import GROUP_PRODUCTS
from omniserve.layers.weights.groups import HeldLinear, hide, join_group, plain_linears, split_group
from omniserve.layers.weights.packed import huge_pages
from omniserve.layers.weights.quantized import (
    PANEL,
    QuantForm,
    QuantizedWeight,
    Scales,
    forget,
    joined,
    remembered,
    still_quantized,
)
from omniserve.ops import collectives  # noqa: F401  registers torch.ops.omniserve, with all_gather

GROUP_PRODUCTS.add(torch.ops.omniserve.int8_linear.default)

MOST_INPUTS = 1 << 16
"""The most inputs whose sums are in the range of int32."""

_HEADER = PANEL * 8
_INPUTS = 64

_all_gather = torch.ops.omniserve.all_gather.default


def rounded(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return rows with their values rounded to int8 times a scale, in their dtype; see ``codes_of_rows``."""
    codes, scale = codes_of_rows(x, scale)
    return (codes * scale).to(x.dtype)


def codes_of_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of rows, whole numbers in fp32, and their scales.

    Args:
        x: ``[*, I]``.
        scale: One number for all rows, or one for each, ``[*, 1]``; None: each row's own.
    """
    wide = x.float()
    if scale is None:
        scale = _scales_of_rows(wide)
    return (wide / torch.where(scale == 0, 1.0, scale)).clamp(-128, 127).round(), scale


def _scales_of_rows(wide: Tensor) -> Tensor:
    return wide.abs().amax(-1, keepdim=True) / 127.5 if wide.shape[-1] else wide.new_zeros(*wide.shape[:-1], 1)


class Rounding(nn.Linear):
    """A linear that rounds its rows to int8."""

    input_scale: Tensor | None
    """``[1]`` fp32; None: each row has its own."""
    row_ranks = 1
    """How many ranks have a part of each row, and the weights of its inputs."""

    def scale_of(self, input: Tensor) -> Tensor | None:
        """Return the scale of rows, ``[1]`` or ``[*, 1]``; None: the one that a rank finds in what it has of each."""
        if self.input_scale is not None or self.row_ranks == 1:
            return self.input_scale
        parts = _scales_of_rows(input.float())
        return _all_gather(parts, self.row_ranks, self.row_ranks).amax(-1, keepdim=True)


class RoundedLinear(Rounding):
    """An ``nn.Linear`` that rounds its rows to int8; ``round_inputs`` makes it."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(rounded(input, self.scale_of(input)), self.weight, self.bias)


def round_inputs(linear: nn.Linear, input_scale: Tensor | None) -> None:
    """Make a linear one that rounds its rows, in place, by a fixed scale or each row's own."""
    linear.__dict__["input_scale"] = input_scale
    linear.__class__ = RoundedLinear


class Int8Linear(Rounding, HeldLinear):
    """A ``RoundedLinear`` whose weight is int8; ``hold`` makes it. Its ``group_weight`` is ``[panels, bytes]``."""

    def held_product(self, input: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        arguments = (self.group_weight, self.group_bias, self.group_rows, self.scale_of(input))
        return torch.ops.omniserve.int8_linear, arguments

    def dense_group(self) -> Tensor:
        codes, scale = unpack_int8(self.group_weight, self.group_rows, self.in_features)
        return (codes.float() * scale[:, None]).to(cast(Tensor, self._parameters["weight"]).dtype)


def form_of_inputs(num_in: int) -> QuantForm:
    """Return the form of a weight of int8 with a scale for each output."""
    return QuantForm(8, Scales.F32, num_in)


def roundable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the candidates that round their rows and whose weights were made of codes, on the CPU."""
    return [
        each
        for each in plain_linears(model, candidates, ("cpu",), kind=RoundedLinear)
        if remembered(each.weight) is not None and each.in_features <= MOST_INPUTS
    ]


def share_rows(linear: Rounding, num_ranks: int) -> None:
    """Note that so many ranks have a part of each row: the largest value of all of them makes the scale."""
    linear.__dict__["row_ranks"] = num_ranks


def kind_of(module: nn.Module) -> tuple[int, float | None]:
    """Return what linears must have in common to be held as one: how they round their rows."""
    if not isinstance(module, RoundedLinear):
        return 0, None
    return module.row_ranks, None if module.input_scale is None else float(module.input_scale)


def forms_of(model: nn.Module) -> list[str]:
    """Name how many linears of a model round their rows to int8."""
    count = sum(isinstance(module, Rounding) for module in model.modules())
    return [f"{count} with rows in int8"] if count else []


def hold(*linears: nn.Linear) -> bool:
    """Put int8 in the place of dense weights, of a linear or a group that rounds its rows alike, in place.

    Returns:
        Whether it was done; a weight that has been changed since it was made of its codes stays dense.
    """
    parts = [still_quantized(linear.weight) for linear in linears]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return False
    with torch.inference_mode(False), torch.no_grad():
        packed = pack_int8(joined(whole))
        scale = cast(RoundedLinear, linears[0]).input_scale
        for linear in linears:
            hide(linear.weight)
        join_group(linears, Int8Linear, packed)
        for linear in linears:
            linear.__dict__["input_scale"] = scale
            forget(cast(Tensor, linear._parameters["weight"]))
    return True


def release(*linears: nn.Linear) -> None:
    """Undo ``hold`` of the same modules: same class, same Parameter objects, same bits."""
    split_group(linears, Int8Linear, lambda: cast(Int8Linear, linears[0]).dense_group(), own=RoundedLinear)


def pack_int8(weight: QuantizedWeight) -> Tensor:
    """Return the panels of a weight in the form of ``form_of_inputs``, as ``ops/csrc/linear.h`` describes them."""
    num_out, num_in = weight.shape
    panels, inputs = -(-num_out // PANEL), -(-num_in // _INPUTS) * _INPUTS
    codes = torch.zeros(panels * PANEL, inputs, dtype=torch.int8)
    codes[:num_out, :num_in] = (weight.codes ^ 0x80).view(torch.int8)
    scales = torch.zeros(panels * PANEL)
    scales[:num_out] = weight.scales[0][:, 0]
    width = _HEADER + PANEL * inputs
    packed = huge_pages(panels * width, torch.uint8).view(panels, width)
    packed[:, : PANEL * 4] = scales.view(panels, PANEL).view(torch.uint8)
    packed[:, PANEL * 4 : _HEADER] = codes.sum(1, dtype=torch.int32).view(panels, PANEL).view(torch.uint8)
    fours = codes.view(panels, PANEL, inputs // 4, 4).permute(0, 2, 1, 3)
    packed[:, _HEADER:].view(panels, inputs // 4, PANEL, 4).copy_(fours.view(torch.uint8))
    return packed


def unpack_int8(packed: Tensor, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
    """Return codes ``[O, I]``, int8, and scales ``[O]``, fp32, of panels."""
    panels, inputs = packed.shape[0], (packed.shape[1] - _HEADER) // PANEL
    scales = packed[:, : PANEL * 4].contiguous().view(torch.float32).view(-1)
    fours = packed[:, _HEADER:].view(torch.int8).view(panels, inputs // 4, PANEL, 4)
    codes = fours.permute(0, 2, 1, 3).reshape(panels * PANEL, inputs)
    return codes[:num_out, :num_in], scales[:num_out]
