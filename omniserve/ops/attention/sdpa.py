"""``sdpa``: torch's scaled_dot_product_attention, request by request. Letters as in `base`; C keys of a request."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import DEVICE_ATTENTION, AttentionMetadata, gather_keys, host_lengths, per_head


@DEVICE_ATTENTION.register("sdpa")
def attend_sdpa(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Attend request by request with torch's SDPA over gathered KV (plain matrix products for
    layers that soft-cap their scores, or have sinks or ALiBi).

    One kernel launch per request: for correctness where nothing better is installed; not graph-safe. Not yet measured
    on CUDA.

    Raises:
        ValueError: ``one_query_each`` without ``host_lengths``.
    """
    sinks_N, slopes_N = per_head(spec.sinks, q_TNH.device), per_head(spec.alibi_slopes, q_TNH.device)
    lengths, block_table_RM, reversed_RM = host_lengths(metadata, "sdpa"), metadata.block_table_RM, metadata.reversed_RM
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    end = 0
    for request, (query_len, seq_len) in enumerate(zip(lengths.query_lens, lengths.seq_lens, strict=True)):
        begin, end = end, end + query_len
        if not query_len:
            continue
        if not seq_len:
            out_TNH[begin:end] = 0
            continue
        first = spec.first_key(seq_len - query_len)
        q_pos = torch.arange(seq_len - query_len, seq_len, device=q_TNH.device)[:, None]
        k_pos = torch.arange(first, seq_len, device=q_TNH.device)[None]
        seen = k_pos <= q_pos
        if spec.window:
            seen &= k_pos > q_pos - spec.window
        if spec.chunk:
            seen &= k_pos >= q_pos - q_pos % spec.chunk
        reversed_M = reversed_RM[request] if reversed_RM is not None else None
        k_CKH = gather_keys(k_cache_BKSH, block_table_RM[request], first, seq_len, reversed_M)
        v_CKH = gather_keys(v_cache_BKSH, block_table_RM[request], first, seq_len, reversed_M)
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q_TNH[begin:end], k_CKH, v_CKH))
        if spec.softcap or sinks_N is not None or slopes_N is not None:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = (q @ k.transpose(-1, -2)).float() * spec.scale
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if slopes_N is not None:
                scores = scores + slopes_N[:, None, None] * (k_pos - q_pos)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks_N is not None:
                scores = torch.cat([scores, sinks_N[None, :, None, None].expand(1, -1, query_len, 1)], dim=-1)
            out = scores.softmax(-1)[..., : seq_len - first].to(v.dtype) @ v
        else:
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=spec.scale, enable_gqa=True)
        out_TNH[begin:end] = out[0].transpose(0, 1)
    return out_TNH
