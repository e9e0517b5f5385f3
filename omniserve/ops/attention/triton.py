"""``triton``: our own kernel over the pages. Letters as in `base`."""

from __future__ import annotations

from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import DEVICE_ATTENTION, HostLengths, graph_safe


@DEVICE_ATTENTION.register("triton")
@graph_safe
def attend_triton(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    spec: AttentionSpec,
    *,
    lengths: HostLengths | None = None,
    reversed_RM: Tensor | None = None,
    one_query_each: bool = False,
) -> Tensor:
    """Attend with the Triton kernel: chunks and decodes in one launch, straight from the blocks, in both directions.

    Never reads ``lengths``, and never waits for the device. Not yet run on a GPU.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit together.
        ImportError: triton is not installed; on CUDA it comes with torch.
    """
    from omniserve.ops.kernels.attention import paged_attention  # needs triton

    return paged_attention(
        q_TNH, k_cache_BKSH, v_cache_BKSH, block_table_RM, query_start_R1, seq_lens_R,
        scale=spec.scale, window=spec.window, softcap=spec.softcap,
        reversed_RM=reversed_RM, one_query_each=one_query_each,
    )  # fmt: skip
