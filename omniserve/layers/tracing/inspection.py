"""Watches of one run of a layer: the operators (OperatorLog) and the linears (LinearWatch) that it calls."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


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

    def called_on(self, num_rows: int) -> list[nn.Linear]:
        """Return the linears that were called once, on so many rows."""
        called = Counter(id(linear) for _, linears in self._calls for linear in linears)
        return [
            linear
            for rows, linears in self._calls
            for linear in linears
            if called[id(linear)] == 1 and rows.numel() == num_rows * linear.in_features
        ]

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
