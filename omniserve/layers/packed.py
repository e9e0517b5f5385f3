"""Prepacked linears for the CPU device tier: oneDNN's blocked weight instead of the dense one, not beside it.

A bf16 ``F.linear`` on the CPU reorders its weight at every call; packing once removes that. ``benchmarks/dense.py``
measures it. The packed tensor is opaque, so a compiled graph cannot take it as an input: an op looks it up in a table
by an int64 handle tensor, which can be one.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

_TABLE: dict[int, Tensor] = {}
_next_handle = itertools.count()

_library = torch.library.Library("omniserve", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor handle, Tensor? bias, SymInt out_features) -> Tensor")


def _packed_linear_cpu(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, _TABLE[int(handle)], bias, "none", [], "")


def _packed_linear_fake(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_library.impl("packed_linear", _packed_linear_cpu, "CPU")
torch.library.register_fake("omniserve::packed_linear", _packed_linear_fake, lib=_library)


class _PackedProduct(torch.autograd.Function):
    """Forward only: a packed weight has no gradient, and saying so beats returning none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        return torch.ops.omniserve.packed_linear(x, handle, bias, out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError("prepacked linears have no backward; omniserve.unpatch(model), or patch with prepack=False")


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` whose weight is packed. Only ``pack`` and ``unpack`` make and unmake one.

    They change the module's class and leave the object, its Parameter objects, hooks and names alone. While packed the
    Parameter keeps shape and dtype but holds NaN without storage behind it, so that reading it cannot go unnoticed;
    ``weight`` and ``state_dict()`` give the dense values.
    """

    packed_handle: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _PackedProduct.apply(input, self.packed_handle, self.bias, self.out_features)
        return torch.ops.omniserve.packed_linear(input, self.packed_handle, self.bias, self.out_features)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dense copy of the weight, bit for bit the original."""
        # Never an inference tensor: the copy may become a Parameter's data again.
        with torch.inference_mode(False), torch.no_grad():
            return _TABLE[int(self.packed_handle)].to_dense()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self._refuse("be given another weight")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("be copied")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        self._refuse("change its device or dtype")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load a state dict")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"a prepacked linear cannot {what}; call omniserve.unpatch(model) first")


def pack(linear: nn.Linear) -> None:
    """Pack a linear in place and release its dense weight."""
    parameter = linear._parameters["weight"]
    assert parameter is not None
    with torch.inference_mode(False), torch.no_grad():
        handle = next(_next_handle)
        _TABLE[handle] = torch.ops.mkldnn._reorder_linear_weight(parameter.data, None)
        # A model that is dropped while patched must not leave its weights behind in the table.
        weakref.finalize(linear, _TABLE.pop, handle, None).atexit = False
        # Made before the class changes: PackedLinear forbids most of what follows.
        linear.packed_handle = torch.tensor(handle)
        parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
    linear.__class__ = PackedLinear


def unpack(linear: nn.Linear) -> None:
    """Undo ``pack``: same class, same Parameter object, same bits."""
    assert isinstance(linear, PackedLinear)
    dense = linear.weight
    del _TABLE[int(linear.packed_handle)]
    linear.__class__ = nn.Linear  # type: ignore[assignment]
    del linear.packed_handle
    parameter = linear._parameters["weight"]
    assert parameter is not None
    parameter.data = dense


def packable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return those candidates that packing serves: plain bf16 CPU linears whose weight nobody else reads.

    fp32 is left alone (slower with one row), and so are subclasses (quantised, adapters) and tied weights: an embedding
    needs its rows dense (``layers/head.py`` serves that head).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in candidates
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module._parameters.get("weight")) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.bfloat16
        and module.weight.is_contiguous()
        and uses[module.weight.data_ptr()] == 1
    ]
