"""Parts of weights of codes: what a rank of a tensor-parallel model keeps of one, in whichever form has its groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from omniserve.layers.weights.quantized import QuantForm, QuantizedWeight, Remembered, Scales, itself, remember

_WIDER = 8
"""Bits of the codes of forms whose own bits have no groups of other sizes."""


def form_of_inputs(form: QuantForm, num_in: int, begin: int, end: int) -> QuantForm | None:
    """Return the form of a weight's inputs from ``begin`` to ``end``, of ``num_in``; None if none has groups so small.

    It is the weight's own if they begin and end with records of it. Else their groups are smaller, and scales of
    blocks become plain ones, which have the same values in fp32.
    """
    bounds = math.gcd(begin, end if end < num_in else 0)
    if bounds % form.block == 0 or (form.group >= num_in and form.block == form.group):
        return form
    bits, scales, group = form.bits, form.scales, math.gcd(form.group, bounds)
    if scales in (Scales.K, Scales.K_SIGNED):
        scales = Scales.AFFINE32 if scales is Scales.K else Scales.F32
        bits = bits if bits == 4 else _WIDER
    elif bits == 5 and group % 32:
        bits, scales = _WIDER, Scales.F16 if scales is Scales.F16 else Scales.AFFINE32
    return QuantForm(bits, scales, group) if group % 8 == 0 else None


def inputs_of(weight: QuantizedWeight, begin: int, end: int) -> QuantizedWeight:
    """Return some inputs of a weight, whose inputs are in their own order.

    Its dense values are the weight's, bit for bit.

    Raises:
        ValueError: No form has them (``form_of_inputs``).
    """
    num_in = weight.shape[1]
    form = form_of_inputs(weight.form, num_in, begin, end)
    if form is None or weight.order is not None:
        raise ValueError(f"no form has the inputs {begin} to {end} of a weight of {weight.form}")
    if form[:2] != weight.form[:2]:
        weight = _plain(weight, form)
    if form == weight.form:
        blocks = -(-num_in // form.block)
        first, last = begin // form.block, -(-end // form.block)
        per_block = [scale.shape[1] // blocks for scale in weight.scales]
        scales = tuple(s[:, first * n : last * n] for s, n in zip(weight.scales, per_block, strict=True))
    else:
        repeats = weight.form.group // form.group
        scales = tuple(
            scale.repeat_interleave(repeats, 1)[:, begin // form.group : -(-end // form.group)]
            for scale in weight.scales
        )
    return QuantizedWeight(form, weight.codes[:, begin:end], scales)


def _plain(weight: QuantizedWeight, form: QuantForm) -> QuantizedWeight:
    """Return a weight with the bits and the kind of scales of a form, and its own groups."""
    scales = weight.scales
    if weight.form.scales in (Scales.K, Scales.K_SIGNED):
        wide = [scale.float() for scale in scales]
        per_block = weight.form.block // weight.form.group
        if weight.form.scales is Scales.K:
            d, e, u, v = wide
            scales = d.repeat_interleave(per_block, 1) * u, -(e.repeat_interleave(per_block, 1) * v)
        else:
            scales = (wide[0].repeat_interleave(per_block, 1) * wide[1],)
    elif form.scales is Scales.AFFINE32:
        scales = tuple(scale.float() for scale in scales)
    has_middle = form.scales in (Scales.F16, Scales.F32)
    shift = 2 ** (form.bits - 1) - 2 ** (weight.form.bits - 1) if has_middle else 0
    return QuantizedWeight(QuantForm(form.bits, form.scales, weight.form.group), weight.codes + shift, scales)


def remember_outputs(part: Tensor, noted: Remembered, outputs: Tensor) -> None:
    """Note of a dense weight that it has these outputs of one that was made of codes."""
    order = None if noted.order is None else torch.frombuffer(bytearray(noted.order), dtype=torch.int32)
    _remember(part, noted, noted.form, order, functools.partial(QuantizedWeight.rows, order=outputs))


def remember_inputs(part: Tensor, noted: Remembered, num_in: int, begin: int, end: int) -> bool:
    """Note of a dense weight that it has some inputs of one that was made of codes; return whether a form has them."""
    form = None if noted.order is not None else form_of_inputs(noted.form, num_in, begin, end)
    if form is not None:
        _remember(part, noted, form, None, functools.partial(inputs_of, begin=begin, end=end))
    return form is not None


def _remember(
    part: Tensor,
    noted: Remembered,
    form: QuantForm,
    order: Tensor | None,
    cut: Callable[[QuantizedWeight], QuantizedWeight],
) -> None:
    if noted.is_in_memory:
        kept = cut(noted.read())
        scales = tuple(scale.clone() for scale in kept.scales)  # so that the rest can go
        kept = QuantizedWeight(kept.form, kept.codes.clone(), scales, kept.order)
        remember(part, form, functools.partial(itself, kept), is_in_memory=True, order=order)
    else:
        remember(part, form, functools.partial(_cut, noted.read, cut), order=order)


def _cut(read: Callable[[], QuantizedWeight], cut: Callable[[QuantizedWeight], QuantizedWeight]) -> QuantizedWeight:
    return cut(read())
