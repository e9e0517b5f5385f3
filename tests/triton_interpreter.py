"""Triton's kernels on CPU tensors."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import Any


def interpret_triton() -> None:
    """Have triton interpret its kernels; call before anything imports triton."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    # Assertions of the kernels hold here whether they are asked for (`debug`, TRITON_DEBUG) or not.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=False)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # triton 3.6 says int(array([3])) to a loop's bounds, which numpy 2.4 refuses; later tritons do this:
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
