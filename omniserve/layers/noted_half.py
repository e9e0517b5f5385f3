"""Noting: the calls that a compiled half makes go into a ``Replay``, instead of being made.

What the compiler wrote for a half is a Python function: it allocates tensors, calls kernels and calls operators of this
package. It runs here with other globals, which allocate from a ``Buffers`` and note the calls. A function that calls
anything else cannot be noted.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from omniserve.ops.replay import Replay

_KERNEL = "kernel"
"""The name of every C function that the compiler makes."""
_ALLOCATE, _VIEW = "empty_strided_cpu", "reinterpret_tensor"
_HARMLESS = frozenset({_VIEW, "inf", "nan", "nanj", "math", "device"})


class NotNoted(Exception):
    """A half makes calls that cannot be noted; the message says which."""


class Buffers:
    """The memory of a replay's intermediate results: two sets, which layers take in turns.

    A layer reads what the layer before it wrote, and nothing older.
    """

    def __init__(self) -> None:
        self._sets: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._number = self._taken = 0

    def begin_layer(self) -> None:
        """Take the next tensors from the other set, from its first one on."""
        self._number, self._taken = 1 - self._number, 0

    def take(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that nothing else of this layer has; layers of one structure get the same ones."""
        buffers, wanted = self._sets[self._number], (tuple(size), tuple(stride), dtype)
        for place in range(self._taken, len(buffers)):
            found = buffers[place]
            if (tuple(found.shape), found.stride(), found.dtype) == wanted:
                buffers[place], buffers[self._taken] = buffers[self._taken], found
                break
        else:
            buffers.insert(self._taken, torch.empty_strided(*wanted[:2], dtype=dtype))
        self._taken += 1
        return buffers[self._taken - 1]

    def rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, as ``take`` does."""
        return self.take(shape, torch.empty(shape, device="meta").stride(), dtype)


class Noter:
    """Notes the calls of halves in a replay."""

    def __init__(self, replay: Replay, buffers: Buffers) -> None:
        self._replay, self._buffers = replay, buffers

    def begin_layer(self) -> None:
        """Begin with the next layer."""
        self._buffers.begin_layer()

    def note(self, call: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Tensor, ...]:
        """Note a half, which the compiler's function ``call`` computes; return the tensors that its results are in.

        Raises:
            NotNoted: It does something else than this module knows of.
        """
        function = getattr(call, "__func__", call)
        names = getattr(function, "__globals__", {})
        if getattr(function, "__name__", "") != "call" or _ALLOCATE not in names:
            raise NotNoted(f"{call} is not what the compiler wrote")
        noted = types.FunctionType(function.__code__, self._names(names))
        own = (call.__self__,) if isinstance(call, types.MethodType) else ()
        return tuple(noted(*own, arguments))

    def _names(self, names: dict[str, Any]) -> dict[str, Any]:
        """Return the globals with which a function notes its calls."""
        noted: dict[str, Any] = {}
        for name, value in names.items():
            if isinstance(value, types.BuiltinFunctionType) and value.__name__ == _KERNEL:
                noted[name] = self._kernel(value)
            elif name in _HARMLESS or name.startswith("__"):
                noted[name] = value
            else:
                noted[name] = _Refused(name)
        operators = _Refused(
            "torch.ops.omniserve",
            packed_linear=types.SimpleNamespace(default=self._packed_linear),
            packed_heads=types.SimpleNamespace(default=self._packed_heads),
            quantized_linear=types.SimpleNamespace(default=self._quantized_linear),
            int8_linear=types.SimpleNamespace(default=self._int8_linear),
            add_lora=types.SimpleNamespace(default=self._add_lora),
        )
        dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
        own_torch = _Refused("torch", ops=_Refused("torch.ops", omniserve=operators), **dtypes)
        return noted | {_ALLOCATE: self._buffers.take, "torch": own_torch}

    def _kernel(self, kernel: Any) -> Callable[..., None]:
        def note(*arguments: Tensor | int) -> None:
            try:
                self._replay.add_kernel(kernel, arguments)
            except ValueError as error:
                raise NotNoted(str(error)) from error

        return note

    def _packed_linear(self, x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int) -> Tensor:
        out = self._buffers.rows((*x.shape[:-1], out_features), x.dtype)
        self._replay.add_linear(x, packed, bias_O, out)
        return out

    def _packed_heads(self, x_TNI: Tensor, packed: Tensor, out_features: int) -> Tensor:
        out = self._buffers.rows((x_TNI.shape[1], x_TNI.shape[0], out_features), x_TNI.dtype)
        self._replay.add_heads(x_TNI, packed, out)
        return out

    def _add_lora(self, y: Tensor, x: Tensor, slots_T: Tensor, a: Tensor, b: Tensor, scales_S: Tensor) -> Tensor:
        out = self._buffers.rows(y.shape, y.dtype)
        self._replay.add_add_lora(y, x, slots_T, a, b, scales_S, out)
        return out

    def _quantized_linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias_O: Tensor | None,
        out_features: int,
        bits: int,
        scales: int,
        group: int,
        order_I: Tensor | None = None,
    ) -> Tensor:
        out = self._buffers.rows((*x.shape[:-1], out_features), x.dtype)
        self._replay.add_quantized_linear(x, packed, bias_O, (bits, scales, group), order_I, out)
        return out

    def _int8_linear(
        self, x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int, x_scale: Tensor | None = None
    ) -> Tensor:
        out = self._buffers.rows((*x.shape[:-1], out_features), x.dtype)
        self._replay.add_int8_linear(x, packed, bias_O, x_scale, out)
        return out


class _Refused:
    """Stands for what a half must not use if it is to be noted, but for the attributes that are given."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self._name = name
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotNoted(f"it uses {self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotNoted(f"it calls {self._name}")
