"""The operators ``torch.ops.omniserve.*``; importing this loads the compiled extension and starts nothing.

Each operator has a schema and a CPU kernel in C++ (``csrc``), a fake that tells torch.compile and opcheck the shape and
dtype of its result (below), and Triton kernels for CUDA if it moves rows between the tiers or adds LoRA adapters
(``cuda``, ``kernels``). Its slow reference and its samples are with the tests (``tests/ops/table.py``).

Legend: T packed tokens, D hidden, N query heads, H head size, P seats, R requests, I and O input and output features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILD_COMMAND = "python setup.py build_ext --inplace"


def _load_extension(package: Path) -> None:
    """Load ``_C*.so`` from the package's folder.

    Raises:
        ImportError: It is not there, or does not load; the message has the command that builds it.
    """
    libraries = sorted(package.glob("_C*.so"))
    if not libraries:
        raise ImportError(f"omniserve's C++ extension is not built: no _C*.so in {package}. Run `{BUILD_COMMAND}`.")
    if len(libraries) > 1:
        raise ImportError(
            f"several C++ extensions in {package}: {[path.name for path in libraries]}; delete the stale."
        )
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        raise ImportError(f"{libraries[0]} does not load ({error}). Rebuild it: `{BUILD_COMMAND}`.") from error


_load_extension(Path(__file__).parent.parent)

from omniserve.ops import cuda  # noqa: E402, F401  it registers for operators that must exist by now


def _no_result(*_: Any) -> None:
    return None


for _name in (
    "store_kv",
    "store_host_kv",
    "residual_store",
    "residual_fetch",
    "piggyback_receive",
    "piggyback_send",
    "pack_linear",
):
    torch.library.register_fake(f"omniserve::{_name}", _no_result)


@torch.library.register_fake("omniserve::paged_attention")
def _paged_attention(q_TNH: Tensor, *_: Any) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)


@torch.library.register_fake("omniserve::cpu_attention")
def _cpu_attention(q_RNH: Tensor, *_: Any) -> Tensor:
    return q_RNH.new_empty(q_RNH.shape)


@torch.library.register_fake("omniserve::piggyback_concat")
def _piggyback_concat(attn_TD: Tensor, results_RD: Tensor, rows_P: Tensor) -> Tensor:
    return attn_TD.new_empty((attn_TD.shape[0] + rows_P.shape[0], attn_TD.shape[1]))


@torch.library.register_fake("omniserve::packed_linear")
def _packed_linear(x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("omniserve::packed_heads")
def _packed_heads(x_TNI: Tensor, packed: Tensor, out_features: int) -> Tensor:
    return x_TNI.new_empty((x_TNI.shape[1], x_TNI.shape[0], out_features))


@torch.library.register_fake("omniserve::add_lora")
def _add_lora(y: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape)


@torch.library.register_fake("omniserve::packed_rows")
def _packed_rows(ids: Tensor, packed: Tensor, in_features: int, out_features: int) -> Tensor:
    return packed.new_empty((*ids.shape, in_features))


@torch.library.register_fake("omniserve::quantized_linear")
def _quantized_linear(x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("omniserve::int8_linear")
def _int8_linear(x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("omniserve::quantized_rows")
def _quantized_rows(ids: Tensor, packed: Tensor, in_features: int, *_: int) -> Tensor:
    return packed.new_empty((*ids.shape, in_features), dtype=torch.float32)
