"""The CUDA implementations of the operators: Triton kernels, which are imported at the first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

ROW_OPERATORS = {
    "store_kv": "rows",
    "piggyback_concat": "rows",
    "residual_fetch": "rows",
    "piggyback_receive": "mailbox",
    "piggyback_send": "mailbox",
}
"""Operators that only move rows, and the modules of their kernels. `residual_store` has no CUDA form: on a GPU rows
leave through the mailbox, with `piggyback_send`."""

OPERATORS = ROW_OPERATORS | {"add_lora": "lora"}
"""All operators with a CUDA form, and the modules of their kernels."""


@functools.cache
def kernels(name: str) -> ModuleType:
    """Return the module ``omniserve.ops.kernels.<name>``.

    Raises:
        ImportError: Triton is not installed.
    """
    try:
        import_module("triton")
    except ImportError as error:
        raise ImportError(
            "on CUDA omniserve's operators are Triton kernels, but triton does not import; CUDA builds of torch "
            "bring it along: reinstall torch from PyPI, or `pip install triton`"
        ) from error
    return import_module(f"omniserve.ops.kernels.{name}")


def _operator(name: str, module: str) -> Callable[..., Tensor | None]:
    def call(*args: Tensor) -> Tensor | None:
        result: Tensor | None = getattr(kernels(module), name)(*args)
        return result

    return call


for _name, _module in OPERATORS.items():
    torch.library.impl(f"omniserve::{_name}", "CUDA", _operator(_name, _module))
