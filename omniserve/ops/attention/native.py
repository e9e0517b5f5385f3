"""``cpu``, ``latent`` and ``triton``: attention by this project's own kernels, straight from the blocks.

Letters as in `base`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import DEVICE_ATTENTION, AttentionMetadata, graph_safe, per_head


@DEVICE_ATTENTION.register("cpu")
def attend_cpu(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Attend with the C++ operator."""
    block_table_RM, seq_lens_R, is_padding_R = metadata.block_table_RM, metadata.seq_lens_R, None
    if metadata.one_query_each and not seq_lens_R.all():
        # The operator refuses a query without a key, so padding attends to the first row of the first block.
        is_padding_R = seq_lens_R == 0
        block_table_RM, seq_lens_R = block_table_RM.clamp(min=0), seq_lens_R.clamp(min=1)
    out_TNH: Tensor = torch.ops.omniserve.paged_attention.default(
        q_TNH,
        k_cache_BKSH,
        v_cache_BKSH,
        block_table_RM,
        metadata.query_start_loc_R1,
        seq_lens_R,
        spec.scale,
        spec.window,
        spec.softcap,
        metadata.reversed_RM,
        spec.chunk,
        per_head(spec.sinks, q_TNH.device),
        per_head(spec.alibi_slopes, q_TNH.device),
    )
    return out_TNH if is_padding_R is None else out_TNH.masked_fill_(is_padding_R[:, None, None], 0)


DEVICE_ATTENTION.register("latent")(attend_cpu)


@DEVICE_ATTENTION.register("triton")
@graph_safe
def attend_triton(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Attend with the Triton kernel: chunks and decodes in one launch, straight from the blocks, in both directions.

    Never reads ``host_lengths``, and never waits for the device. Not yet run on a GPU.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit together.
        ImportError: triton is not installed; on CUDA it comes with torch.
    """
    from omniserve.ops.kernels.attention import paged_attention  # needs triton

    return paged_attention(
        q_TNH,
        k_cache_BKSH,
        v_cache_BKSH,
        metadata.block_table_RM,
        metadata.query_start_loc_R1,
        metadata.seq_lens_R,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        chunk=spec.chunk,
        sinks_N=per_head(spec.sinks, q_TNH.device),
        alibi_slopes_N=per_head(spec.alibi_slopes, q_TNH.device),
        reversed_RM=metadata.reversed_RM,
        one_query_each=metadata.one_query_each,
    )
