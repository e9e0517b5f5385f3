"""The layouts of KV that are not plain: converts between blocks and plain tensors of K and V.

Legend: L layers, B blocks, K KV heads, S block size, H head size. A block is ``[K, 2, S, H]``: per KV head a plane of K
and one of V. V of a bf16 pool with an even S lies in token pairs, ``[S/2, H, 2]``; everything else in rows. An int8
pool has scales ``[..., K, 2, S]``: a row's values are int8 * scale. ``host_layout`` in ``ops/csrc/attention.h`` says
why. The device's caches of int8 are ``[..., K, S, H + 4]`` bytes, K and V apart: the scales of a head lie behind its
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omniserve.core.spec import SCALE_BYTES

INT8_LEVELS = 127


def has_v_pairs(dtype: torch.dtype, block_size: int) -> bool:
    """Tell whether a pool of this dtype keeps V in token pairs."""
    return dtype == torch.bfloat16 and block_size % 2 == 0


def read_blocks(pool: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return copies of K and V, ``[..., K, S, H]`` each, in the pool's dtype, or float32 for an int8 pool.

    The pool is ``[..., K, 2, S, H]``; the scales of an int8 pool are ``[..., K, 2, S]`` float32.
    """
    k, v = pool.unbind(-3)
    if has_v_pairs(pool.dtype, pool.shape[-2]):
        v = v.reshape(*v.shape[:-2], v.shape[-2] // 2, v.shape[-1], 2).transpose(-1, -2).reshape(k.shape)
    if scales is None:
        return k.clone(), v.clone()
    k_scales, v_scales = scales.unbind(-2)
    return k * k_scales[..., None], v * v_scales[..., None]


def pack_blocks(k: Tensor, v: Tensor) -> Tensor:
    """Return ``[..., K, 2, S, H]`` from K and V, ``[..., K, S, H]`` each."""
    if has_v_pairs(v.dtype, v.shape[-2]):
        v = v.reshape(*v.shape[:-2], v.shape[-2] // 2, 2, v.shape[-1]).transpose(-1, -2).reshape(v.shape)
    return torch.stack([k, v], -3)


def quantize_blocks(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 pool ``[..., K, 2, S, H]`` and the scales ``[..., K, 2, S]`` of K and V, ``[..., K, S, H]`` each.

    A row with an inf or a NaN gets the scale NaN.
    """
    both = torch.stack([k, v], -3).float()
    largest = both.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / INT8_LEVELS, torch.nan)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    values = (both * inverse[..., None]).round()
    return torch.where(scales.isfinite()[..., None], values, 0.0).to(torch.int8), scales


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes ``[..., H]`` and scales ``[...]`` of rows, as `quantize_blocks`."""
    codes, scales = quantize_blocks(rows[..., None, :], rows[..., None, :])
    return codes[..., 0, 0, :], scales[..., 0, 0]


def quantize_cache(cache: Tensor) -> Tensor:
    """Return a device cache of int8, ``[..., K, S, H + 4]``, of K or V, ``[..., K, S, H]``."""
    codes, scales = quantize_rows(cache)
    parts = [codes.flatten(-2), scales.contiguous().view(torch.int8)]
    return torch.cat(parts, -1).view(*cache.shape[:-1], cache.shape[-1] + SCALE_BYTES)


def parts_of_cache(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes ``[..., K, S, H]`` and of the scales ``[..., K, S]`` of a device cache of int8."""
    block_size, row_size = cache.shape[-2:]
    head_size = row_size - SCALE_BYTES
    codes, scales = cache.flatten(-2).split([block_size * head_size, block_size * SCALE_BYTES], -1)
    return codes.unflatten(-1, (block_size, head_size)), scales.view(torch.float32)


def read_cache(cache: Tensor) -> Tensor:
    """Return K or V ``[..., K, S, H]`` of a device cache: itself, or in float32 what int8 stands for."""
    if cache.dtype != torch.int8:
        return cache
    codes, scales = parts_of_cache(cache)
    return codes * scales[..., None]
