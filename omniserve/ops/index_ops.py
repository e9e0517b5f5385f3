"""The operators that only move rows, as index operations: their CUDA implementation.

They never wait for the device (no ``nonzero``, no ``item``), so they can be captured in a CUDA graph. An index out of
range is a device-side assertion, not an exception.

Legend: T packed tokens, D hidden, K KV heads, H head size, B blocks, S block size or slots, P piggyback seats.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _put_rows(destination: Tensor, indices: Tensor, rows: Tensor, slots: tuple[Tensor, ...]) -> None:
    """Write ``rows[i]`` to ``destination[slots[0][i], slots[1][i], ...]`` where ``indices[i] >= 0``.

    A row that is left out repeats a row that is written (equal values to one place: no race). If none is written, all
    put the first place's own content back.
    """
    if indices.numel() == 0:
        return
    valid = indices >= 0
    source = torch.where(valid, torch.arange(len(indices), device=indices.device), valid.long().argmax())
    places = tuple(slot[source].clamp(min=0) for slot in slots)
    keep = valid.any().view((1,) * rows.ndim)
    destination.index_put_(places, torch.where(keep, rows[source], destination[places]))


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, slot_mapping_T: Tensor) -> None:
    """Write each token's K and V to slot ``block * S + offset``; -1 leaves a token out."""
    block_size = k_cache_BKSH.shape[2]
    block = torch.div(slot_mapping_T, block_size, rounding_mode="floor")
    places = (block, slot_mapping_T % block_size)
    for rows, cache in ((k_TKH, k_cache_BKSH), (v_TKH, v_cache_BKSH)):
        _put_rows(cache.transpose(1, 2), slot_mapping_T, rows, places)


def piggyback_concat(attn_TD: Tensor, results_RD: Tensor, rows_P: Tensor) -> Tensor:
    """Return a new ``[T + P, D]``: attn, then results[rows]; zeros where a row is -1."""
    out_TD = attn_TD.new_zeros((attn_TD.shape[0] + rows_P.shape[0], attn_TD.shape[1]))
    out_TD[: attn_TD.shape[0]] = attn_TD
    if rows_P.numel() and results_RD.shape[0]:
        out_TD[attn_TD.shape[0] :] = torch.where(rows_P[:, None] >= 0, results_RD[rows_P.clamp(min=0)], 0)
    return out_TD


def residual_store(hidden_TD: Tensor, store_SD: Tensor, slots_P: Tensor) -> None:
    """Write the last P rows of hidden to store[slots]; -1 leaves a row out."""
    if slots_P.numel() and store_SD.shape[0]:
        _put_rows(store_SD, slots_P, hidden_TD[hidden_TD.shape[0] - slots_P.shape[0] :], (slots_P,))


def residual_fetch(store_SD: Tensor, slots_P: Tensor, hidden_TD: Tensor) -> None:
    """Write store[slots] to the last P rows of hidden; zeros where a slot is -1."""
    rows_PD = hidden_TD[hidden_TD.shape[0] - slots_P.shape[0] :]
    if slots_P.numel() and store_SD.shape[0]:
        rows_PD.copy_(torch.where(slots_P[:, None] >= 0, store_SD[slots_P.clamp(min=0)], 0))
    else:
        rows_PD.zero_()


for _function in (store_kv, piggyback_concat, residual_store, residual_fetch):
    torch.library.impl(f"omniserve::{_function.__name__}", "CUDA", _function)
