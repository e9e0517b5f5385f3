"""Weights of few bits: codes with scales by groups of inputs, as checkpoints have them, and as kernels read them.

A weight is ``w = s * (code - zero) + m`` in fp32. Codes and scales are kept as the checkpoint has them, nothing is
rounded again. ``ops/csrc/linear.h`` has the packed layout, ``linear_quantized.inl`` the kernel: in fp32 its products
have the bits of those with the dense weight ``w``. With rows of bf16, a CPU that multiplies bf16 alone multiplies the
codes themselves while the rows are few, and ``w`` rounded to bf16 when they are many. AVX2 multiplies codes and few
rows in integers, with a unit for the inputs that share a scale. Others multiply ``w``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PANEL = 32
"""Features of a panel."""

_PANELS_AT_ONCE = 64
"""Panels that are packed at a time: what is unpacked takes eight bytes a weight."""


class Scales(enum.IntEnum):
    """How the scales of a form are held; as in ``ops/csrc/linear.h``."""

    F16 = 0
    F32 = 1
    AFFINE16 = 2
    AFFINE32 = 3
    K = 4
    K_SIGNED = 5


class QuantForm(NamedTuple):
    """A form of codes that the kernels know. As a tuple of numbers it is part of what a compiled half depends on."""

    bits: int
    """Bits of a code."""
    scales: Scales
    """How scales and offsets are held."""
    group: int
    """Inputs that share a scale."""

    @property
    def block(self) -> int:
        """Inputs of a record of the packed weight."""
        return 256 if self.scales in (Scales.K, Scales.K_SIGNED) else self.group

    @property
    def arguments(self) -> tuple[int, int, int]:
        """The last arguments of ``quantized_linear``."""
        return self.bits, int(self.scales), self.group


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of codes, unpacked.

    Args:
        form: Its form.
        codes: ``[O, I]``, uint8; without an offset the zero is ``2 ** (bits - 1)``.
        scales: What a record holds: the two of ``AFFINE`` and the only one of ``F16`` and ``F32`` are ``[O, groups]``
            in their dtype; ``K`` has d and e, fp16, ``[O, blocks]``, and u and v, uint8, ``[O, groups]``; ``K_SIGNED``
            has d, and u as int8.
        order: ``[I]``, int32: the input that each column of codes belongs to; None: all in their order. Groups are of
            neighbouring columns.
    """

    form: QuantForm
    codes: Tensor
    scales: tuple[Tensor, ...]
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, order: Tensor) -> QuantizedWeight:
        """Return the weight with its output features in another order."""
        scales = tuple(scale[order] for scale in self.scales)
        return QuantizedWeight(self.form, self.codes[order], scales, self.order)


def affine_weight(bits: int, group: int, codes: Tensor, scale: Tensor, zeros: Tensor) -> QuantizedWeight:
    """Return codes with a scale and a zero point for each group, ``[O, groups]``.

    A zero point that all share and that is in the middle needs no offset.
    """
    if bool((zeros == 2 ** (bits - 1)).all()):
        return symmetric_weight(bits, group, codes, scale)
    wide = scale.float().contiguous()
    return QuantizedWeight(QuantForm(bits, Scales.AFFINE32, group), codes, (wide, -(wide * zeros.float())))


def symmetric_weight(bits: int, group: int, codes: Tensor, scale: Tensor) -> QuantizedWeight:
    """Return codes whose zero is in the middle, with a scale for each group, ``[O, groups]``."""
    is_half = scale.dtype is torch.float16
    form = QuantForm(bits, Scales.F16 if is_half else Scales.F32, group)
    return QuantizedWeight(form, codes, ((scale if is_half else scale.float()).contiguous(),))


def itself(codes: QuantizedWeight) -> QuantizedWeight:
    """Return codes that lie in memory, as what ``remember`` is given."""
    return codes


def joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Return the weight of several, one below the other, that have the same form and order of inputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    scales = tuple(torch.cat(each) for each in zip(*(part.scales for part in parts), strict=True))
    return QuantizedWeight(first.form, torch.cat([part.codes for part in parts]), scales, first.order)


def dense_of(weight: QuantizedWeight) -> Tensor:
    """Return the dense weight ``[O, I]``, fp32, with its inputs in their own order."""
    form = weight.form
    value = weight.codes.float()
    if form.scales in (Scales.F16, Scales.F32, Scales.K_SIGNED):
        value -= 2 ** (form.bits - 1)
    scales = [each.float() for each in weight.scales]
    if form.scales is Scales.K:
        d, e, u, v = scales
        per_block = form.block // form.group
        by = [d.repeat_interleave(per_block, 1) * u, -(e.repeat_interleave(per_block, 1) * v)]
    elif form.scales is Scales.K_SIGNED:
        d, u = scales
        by = [d.repeat_interleave(form.block // form.group, 1) * u]
    else:
        by = scales
    num_in = weight.codes.shape[1]
    value *= by[0].repeat_interleave(form.group, 1)[:, :num_in]
    if len(by) > 1:
        value += by[1].repeat_interleave(form.group, 1)[:, :num_in]
    return in_own_order(value, weight.order)


def in_own_order(value: Tensor, order: Tensor | None) -> Tensor:
    """Return a dense weight whose columns are those of codes with its inputs in their own order."""
    if order is None:
        return value
    whole = torch.empty_like(value)
    whole[:, order.long()] = value
    return whole


def packed_shape(form: QuantForm, num_out: int, num_in: int) -> tuple[int, int]:
    """Return panels and bytes of a panel of a packed weight."""
    scale_bytes = {
        Scales.F16: 2, Scales.F32: 4, Scales.AFFINE16: 4, Scales.AFFINE32: 8,
        Scales.K: 2 * 2 + 2 * 8, Scales.K_SIGNED: 2 + 16,
    }[form.scales]  # fmt: skip
    record = PANEL * scale_bytes + PANEL * form.block * form.bits // 8
    return -(-num_out // PANEL), -(-num_in // form.block) * record


def pack_quantized(weight: QuantizedWeight, packed: Tensor) -> None:
    """Write the codes of a weight, in their order, into ``packed``, uint8 of ``packed_shape``."""
    num_out, num_in = weight.shape
    if not num_in:
        return
    for first in range(0, packed.shape[0], _PANELS_AT_ONCE):
        rows = slice(first * PANEL, min(num_out, (first + _PANELS_AT_ONCE) * PANEL))
        part = QuantizedWeight(weight.form, weight.codes[rows], tuple(scale[rows] for scale in weight.scales))
        packed[first : first + _PANELS_AT_ONCE] = _panels(part)


def _panels(weight: QuantizedWeight) -> Tensor:
    form = weight.form
    num_out, num_in = weight.shape
    panels, blocks = -(-num_out // PANEL), -(-num_in // form.block)

    def by_block(values: Tensor, width: int) -> Tensor:
        """``[O, any]`` as ``[panels, blocks, width, 32]``; what is not there is zero."""
        whole = values.new_zeros(panels * PANEL, blocks * width)
        whole[: values.shape[0], : values.shape[1]] = values
        return whole.view(panels, PANEL, blocks, width).permute(0, 2, 3, 1)

    def as_bytes(values: Tensor) -> Tensor:
        return values.contiguous().view(torch.uint8).reshape(panels, blocks, -1)

    groups = form.block // form.group
    is_k = form.scales in (Scales.K, Scales.K_SIGNED)
    wide = {Scales.K: 2, Scales.K_SIGNED: 1}.get(form.scales, 0)  # of these there is one a block
    pieces = [as_bytes(by_block(s, 1 if i < wide or not is_k else groups)) for i, s in enumerate(weight.scales)]
    codes = by_block(weight.codes, form.block)
    if form.bits == 8:
        has_offset = form.scales in (Scales.AFFINE16, Scales.AFFINE32)
        pieces.append(as_bytes(codes if has_offset else codes ^ 0x80))  # signed
    else:
        pieces.append(as_bytes(_words(codes & 15, 4)))
        if form.bits > 4:
            pieces.append(as_bytes(_words(codes >> 4, form.bits - 4)))
    return torch.cat(pieces, dim=2).reshape(panels, -1)


def _words(values: Tensor, bits: int) -> Tensor:
    """``[panels, blocks, inputs, 32]`` as 32-bit words of ``32 / bits`` inputs each; even ones in the lower half."""
    at_once = 32 // bits
    panels, blocks, inputs, _ = values.shape
    split = values.reshape(panels, blocks, inputs // at_once, at_once, PANEL)
    words = torch.zeros(panels, blocks, inputs // at_once, PANEL, dtype=torch.int32)
    for i in range(at_once):
        words |= split[:, :, :, i].int() << (i // 2 * bits + i % 2 * 16)
    return words


class Remembered(NamedTuple):
    """What a loader knows of a dense weight that it made of codes."""

    form: QuantForm
    read: Callable[[], QuantizedWeight]
    """Reads the codes again, in the order of the weight's rows."""
    is_in_memory: bool
    """The codes that are read lie in memory, not in a file."""
    order: bytes | None
    """The order of the inputs, as ``QuantizedWeight`` has it."""

    @property
    def kind(self) -> tuple[QuantForm, bytes | None]:
        """What weights must have in common to be held as one."""
        return self.form, self.order


def remember(
    weight: Tensor,
    form: QuantForm,
    read: Callable[[], QuantizedWeight],
    *,
    is_in_memory: bool = False,
    order: Tensor | None = None,
) -> None:
    """Note which codes a dense weight was made of, and the order of their inputs if it is another one."""
    as_bytes = None if order is None else order.numpy().tobytes()
    weight.omniserve_quantized = Remembered(form, read, is_in_memory, as_bytes)  # type: ignore[attr-defined]


def forget(weight: Tensor) -> None:
    """Drop a note whose codes lie in memory, once a packed copy is there: ``unpatch`` then makes the weight dense."""
    if (noted := remembered(weight)) is not None and noted.is_in_memory:
        del weight.omniserve_quantized  # type: ignore[attr-defined]


def remembered(weight: Tensor) -> Remembered | None:
    """Return what was noted of a weight. Its values may have been changed since: ``still_quantized`` compares them."""
    return getattr(weight, "omniserve_quantized", None)


def still_quantized(weight: Tensor) -> QuantizedWeight | None:
    """Return the codes that were noted of a dense weight, if its values are still theirs, bit for bit."""
    if (noted := remembered(weight)) is None:
        return None
    read = noted.read()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]  # -0 and 0 are equal, and are other bits
    dense = dense_of(read).to(weight.dtype)
    is_same = dense.shape == weight.shape and torch.equal(dense.view(bits), weight.detach().view(bits))
    return read if is_same else None
