"""Fakes: the shapes and dtypes of each operator's result, for torch.compile and opcheck.

Legend: T packed tokens, D hidden, N query heads, H head size, P seats, R requests, I and O input and output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _no_result(*_: Any) -> None:
    return None


for _name in ("store_kv", "store_host_kv", "residual_store", "residual_fetch", "piggyback_send"):
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


@torch.library.register_fake("omniserve::skinny_linear")
def _skinny_linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
