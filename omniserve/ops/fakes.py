"""Fakes: what torch.compile and opcheck need to know of each operator, shapes and dtypes.

Legend: T packed tokens, D hidden, N query heads, K KV heads, H head size, B blocks, S block size or slots, P seats,
R requests, M blocks per request, W a slot's q, k and v side by side, I and O input and output features.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("omniserve::store_kv")
def _store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, slot_mapping_T: Tensor) -> None:
    return None


@torch.library.register_fake("omniserve::paged_attention")
def _paged_attention(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    scale: float,
    window: int,
    softcap: float,
    reversed_RM: Tensor | None = None,
) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)


@torch.library.register_fake("omniserve::cpu_attention")
def _cpu_attention(
    q_RNH: Tensor,
    pool_BK2SH: Tensor,
    scales_BK2S: Tensor | None,
    block_table_RM: Tensor,
    seq_lens_R: Tensor,
    scale: float,
    window: int,
    softcap: float,
    num_threads: int,
) -> Tensor:
    return q_RNH.new_empty(q_RNH.shape)


@torch.library.register_fake("omniserve::store_host_kv")
def _store_host_kv(
    k_TKH: Tensor, v_TKH: Tensor, pool_BK2SH: Tensor, scales_BK2S: Tensor | None, slot_mapping_T: Tensor
) -> None:
    return None


@torch.library.register_fake("omniserve::piggyback_concat")
def _piggyback_concat(attn_TD: Tensor, results_RD: Tensor, rows_P: Tensor) -> Tensor:
    return attn_TD.new_empty((attn_TD.shape[0] + rows_P.shape[0], attn_TD.shape[1]))


@torch.library.register_fake("omniserve::residual_store")
def _residual_store(hidden_TD: Tensor, store_SD: Tensor, slots_P: Tensor) -> None:
    return None


@torch.library.register_fake("omniserve::residual_fetch")
def _residual_fetch(store_SD: Tensor, slots_P: Tensor, hidden_TD: Tensor) -> None:
    return None


@torch.library.register_fake("omniserve::piggyback_send")
def _piggyback_send(
    hidden_TD: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    slots_P: Tensor,
    residuals_SD: Tensor,
    mailbox_SW: Tensor,
    flags_S: Tensor,
    step_1: Tensor,
) -> None:
    return None


@torch.library.register_fake("omniserve::skinny_linear")
def _skinny_linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
