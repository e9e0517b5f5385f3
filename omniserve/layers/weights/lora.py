"""LoRA adapters by name: in one step each row has its own, or none. Papers: LoRA 4.1; Punica 4.

A row carries the slot of its adapter in a column behind all others (``patched_model.py``), so it takes it along
wherever it goes. While a half runs, ``rows_with`` says which adapters its rows have, and each linear that can be
adapted adds what they make (``add_lora``). The weights of all slots lie in stacks, which are as large from the start as
they can become: adapters come and go without a change of compiled code.

Both products are rounded to the model's dtype, and so are A and B, as PEFT does with ``autocast_adapter_dtype=False``.

Legend: T rows, S slots, R the highest rank, I and O input and output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.lora import LoRAError
from omniserve.layers.weights.lora_files import LoRAFiles, LoRAWeight
from omniserve.layers.weights.packed import PANEL
from omniserve.layers.weights.sharding import part_of, whole_names

_RANK_STEP = 8


class _Rows:
    """The rows of the half that runs."""

    slots_T: Tensor | None = None
    """int32: the slot of each row's adapter, from 1 on; anything else is none."""


_rows = _Rows()


@contextmanager
def rows_with(column_T: Tensor) -> Iterator[None]:
    """Have rows adapted by what their column says."""
    _rows.slots_T = column_T.to(torch.int32)
    try:
        yield
    finally:
        _rows.slots_T = None


class LoRALinear(nn.Linear):
    """A linear that can be adapted; ``LoRAStacks`` makes it of whatever linear there is, by a class of both."""

    lora_a: Tensor
    """``[S, R, I]``; on a CPU ``[S * R, I]``, packed (``ops/csrc/linear.h``)."""
    lora_b: Tensor
    """``[S, O, R]``; on a CPU each slot packed."""
    lora_scales: Tensor
    """``[S]`` fp32."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if _rows.slots_T is None:
            return output
        stacks = self.lora_a, self.lora_b, self.lora_scales
        adapted: Tensor = torch.ops.omniserve.add_lora(output, input, _rows.slots_T, *stacks)
        return adapted


_classes: dict[type[nn.Linear], type[LoRALinear]] = {}


def _with_lora(own: type[nn.Linear]) -> type[LoRALinear]:
    if own not in _classes:
        _classes[own] = type(f"LoRA{own.__name__}", (LoRALinear, own), {"__module__": __name__})
    return _classes[own]


class LoRAStacks:
    """The adapters of a model's linears, in slots from 1 on.

    Args:
        model: The model whose linears they are.
        linears: Those that can be adapted. Their classes change. On a rank each has its part of an adapter.
        elsewhere: Those that other stages of a pipeline have.
        num_slots: S.
        max_rank: R, rounded up to a multiple of 8.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        linears: Iterable[nn.Linear],
        *,
        num_slots: int,
        max_rank: int,
        elsewhere: Iterable[nn.Linear] = (),
    ) -> None:
        self.sizes = num_slots, max_rank
        self.max_rank = -(-max_rank // _RANK_STEP) * _RANK_STEP
        self._dtype, self._device = model.dtype, model.device
        names = whole_names(model)
        self._linears: dict[str, Any] = {names[id(linear)]: linear for linear in linears}
        self._parts = {names[id(linear)]: part_of(linear) for linear in (*self._linears.values(), *elsewhere)}
        dtype, device = self._dtype, self._device
        for linear in self._linears.values():
            a_shape: tuple[int, ...] = (num_slots, self.max_rank, linear.in_features)
            b_shape: tuple[int, ...] = (num_slots, linear.out_features, self.max_rank)
            if device.type == "cpu":
                a_shape = self._packed_shape(num_slots * self.max_rank, linear.in_features)
                b_shape = num_slots, *self._packed_shape(linear.out_features, self.max_rank)
            linear.__dict__.update(
                # Memory that is zero and not there yet: it comes with the first adapter of a slot.
                lora_a=torch.zeros(a_shape, dtype=dtype, device=device),
                lora_b=torch.zeros(b_shape, dtype=dtype, device=device),
                lora_scales=torch.zeros(num_slots, device=device),
            )
            linear.__class__ = _with_lora(type(linear))

    def remove(self) -> None:
        """Undo what making this did."""
        for linear in self._linears.values():
            linear.__class__ = next(own for own, adapted in _classes.items() if adapted is type(linear))
            for name in LoRALinear.__annotations__:
                del linear.__dict__[name]

    def check(self, files: LoRAFiles) -> None:
        """See that an adapter fits.

        Raises:
            LoRAError: It is of another model or of too high a rank, or adapts what cannot be adapted here.
        """
        for path, weight in files.weights.items():
            part = self._parts.get(path)
            if part is None:
                raise LoRAError(f"{files.folder} adapts {path}, {self._why_not}")
            (rank, num_in), num_out = weight.a.shape, weight.b.shape[0]
            if (num_in, num_out) != (part.num_inputs, part.num_outputs):
                raise LoRAError(
                    f"{files.folder} is of another model: {path} has {part.num_inputs} inputs and "
                    f"{part.num_outputs} outputs here, {num_in} and {num_out} there"
                )
            if rank > self.max_rank:
                raise LoRAError(
                    f"{files.folder} has the rank {rank}, but the server was started for ranks up to {self.max_rank}: "
                    f"set max_lora_rank (--max-lora-rank) to {rank}"
                )

    @property
    def _why_not(self) -> str:
        kinds = sorted({name.rpartition(".")[2] for name in self._parts})
        return f"which this model does not have, or which cannot be adapted by name; these can: {', '.join(kinds)}"

    def load(self, slot: int, files: LoRAFiles) -> None:
        """Write an adapter that fits into a slot, in which no row is now."""
        self.check(files)
        with torch.inference_mode(False), torch.no_grad():
            for path, linear in self._linears.items():
                self._write(linear, slot - 1, self._part(path, files.weights.get(path)))

    def _part(self, path: str, weight: LoRAWeight | None) -> LoRAWeight | None:
        """Return this rank's part. Where it is of the inputs, the products of all ranks are summed, as the base's."""
        if weight is None:
            return None
        part = self._parts[path]
        b = weight.b if part.outputs is None else weight.b[part.outputs]
        return LoRAWeight(weight.a[:, slice(*part.inputs)], b, weight.scale)

    def _write(self, linear: Any, index: int, weight: LoRAWeight | None) -> None:
        if weight is None:
            linear.lora_scales[index] = 0.0
            linear.lora_b[index] = 0.0
            return
        rank, device = weight.a.shape[0], self._device
        a = torch.zeros(self.max_rank, linear.in_features, dtype=self._dtype, device=device)
        b = torch.zeros(linear.out_features, self.max_rank, dtype=self._dtype, device=device)
        a[:rank], b[:, :rank] = weight.a.to(device), weight.b.to(device)
        if device.type == "cpu":
            _write_features(linear.lora_a, index * self.max_rank, a)
            torch.ops.omniserve.pack_linear(b, linear.lora_b[index])
        else:
            linear.lora_a[index], linear.lora_b[index] = a, b
        linear.lora_scales[index] = weight.scale

    def _packed_shape(self, num_out: int, num_in: int) -> tuple[int, int, int]:
        """Return the shape of a packed weight ``[O, I]``."""
        at_once = 2 if self._dtype is torch.bfloat16 else 1
        return -(-num_out // PANEL), -(-num_in // at_once), PANEL * at_once


def _write_features(packed: Tensor, first: int, rows: Tensor) -> None:
    """Write some features of a packed weight, and touch no other: steps may read these meanwhile."""
    num_panels, num_steps, width = packed.shape
    at_once = width // PANEL
    features = packed.view(num_panels, num_steps, PANEL, at_once).transpose(1, 2)
    rows = torch.nn.functional.pad(rows, (0, num_steps * at_once - rows.shape[1])).view(-1, num_steps, at_once)
    done = 0
    while done < len(rows):
        panel, place = divmod(first + done, PANEL)
        count = min(PANEL - place, len(rows) - done)
        features[panel, place : place + count] = rows[done : done + count]
        done += count
