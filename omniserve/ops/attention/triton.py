"""``triton``: our own kernel over the pages. Letters as in `base`."""

from __future__ import annotations

from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import DEVICE_ATTENTION, AttentionMetadata, graph_safe


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
        q_TNH, k_cache_BKSH, v_cache_BKSH,
        metadata.block_table_RM, metadata.query_start_loc_R1, metadata.seq_lens_R,
        scale=spec.scale, window=spec.window, softcap=spec.softcap,
        reversed_RM=metadata.reversed_RM, one_query_each=metadata.one_query_each,
    )  # fmt: skip
