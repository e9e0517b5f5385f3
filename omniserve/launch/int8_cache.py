"""Int8Cache: Transformers' KV cache with the rounding of int8 KV, to tell what that costs a model.

Legend: H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

_LARGEST_CODE = 127


class Int8Cache(DynamicCache):
    """A cache in which each token's K and V are rounded as ``kv_dtype`` ``int8`` does it, before anything attends them.

    The values are in the model's dtype, to which kernels that read codes do not round them again.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the K and V of tokens, and return all of a layer's."""
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def rounded(rows: Tensor) -> Tensor:
    """Return what int8 codes with a scale for each row stand for, ``[..., H]`` as ``rows``.

    As in ``ops/csrc/host_kv.h``: the scale is the largest magnitude of the row by 127, and a row with inf or NaN
    becomes NaN.
    """
    values = rows.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest.isfinite(), largest / _LARGEST_CODE, torch.nan)
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, 1 / scale)
    return ((values * inverse).round() * scale).to(rows.dtype)
