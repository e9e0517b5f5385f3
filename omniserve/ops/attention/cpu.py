"""``cpu``: the C++ operator. Letters as in `base`."""

from __future__ import annotations

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import DEVICE_ATTENTION, HostLengths


@DEVICE_ATTENTION.register("cpu")
def attend_cpu(
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
    """Attend with the C++ operator."""
    is_padding_R = None
    if one_query_each and not seq_lens_R.all():
        # The operator refuses a query without a key: give padding the first block's first row, and throw it away.
        is_padding_R = seq_lens_R == 0
        block_table_RM, seq_lens_R = block_table_RM.clamp(min=0), seq_lens_R.clamp(min=1)
    out_TNH: Tensor = torch.ops.omniserve.paged_attention.default(
        q_TNH, k_cache_BKSH, v_cache_BKSH, block_table_RM, query_start_R1, seq_lens_R,
        spec.scale, spec.window, spec.softcap, reversed_RM,
    )  # fmt: skip
    return out_TNH if is_padding_R is None else out_TNH.masked_fill_(is_padding_R[:, None, None], 0)
