"""torchao's own weights: the codes of its tensors, for the linears and embeddings of a model that transformers loaded.

``Int8Tensor`` and ``IntxUnpackedToInt8Tensor`` have a signed code for each weight, with a scale and a zero point for a
row or for some of its inputs. Other layouts are those of torchao's own kernels, which go on computing with them; so are
tensors that round their rows, too.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omniserve.layers.weights.loaded_model import in_adapters
from omniserve.layers.weights.quantized import QuantizedWeight, affine_weight, dense_of, itself, remember


class TakenCodes(NamedTuple):
    """What ``take_codes`` did."""

    num_weights: int
    """Weights that have codes now."""
    left: dict[str, int]
    """How many weights torchao computes with, by the name of their class."""


def take_codes(model: nn.Module) -> TakenCodes:
    """Replace torchao's tensors in the linears and embeddings of a model on the CPU by dense weights of noted codes.

    What adapters wrap is left, for they compute with torchao's tensors.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.utils import TorchAOBaseTensor  # type: ignore[import-untyped, unused-ignore]

    taken: dict[int, nn.Parameter] = {}
    left = Counter[str]()
    adapted, seen = in_adapters(model), set[int]()
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if not isinstance(weight, TorchAOBaseTensor):
            continue
        if id(weight) not in seen:
            seen.add(id(weight))
            takes = type(module) in (nn.Linear, nn.Embedding) and id(module) not in adapted
            codes = _codes_of(weight) if takes else None
            if codes is None:
                left[type(weight).__name__] += 1
            else:
                dense = nn.Parameter(dense_of(codes).to(weight.dtype), requires_grad=False)
                remember(dense, codes.form, functools.partial(itself, codes), is_in_memory=True)
                taken[id(weight)] = dense
        if id(weight) in taken:
            module._parameters["weight"] = taken[id(weight)]
    return TakenCodes(len(taken), dict(left))


def _codes_of(weight: Any) -> QuantizedWeight | None:
    """Return the codes of one of torchao's tensors; None if its layout, its groups or its rows are others."""
    from torchao.quantization import (  # type: ignore[import-untyped, unused-ignore]
        Int8Tensor,
        IntxUnpackedToInt8Tensor,
    )

    rounds_rows: tuple[Any, ...]
    if type(weight) is Int8Tensor:
        rounds_rows, bits = (weight.act_quant_kwargs, weight.act_quant_scale, weight.act_pre_scale), 8
    elif type(weight) is IntxUnpackedToInt8Tensor:
        rounds_rows = (weight.activation_quantization,)
        bits = 4 if int(str(weight.target_dtype).removeprefix("torch.int")) <= 4 else 8
    else:
        return None
    if weight.device.type != "cpu" or weight.dim() != 2 or any(each is not None for each in rounds_rows):
        return None
    num_out, num_in = weight.shape
    rows, group = weight.block_size
    if rows not in (1, num_out) or num_in % group or group % 8:
        return None

    def by_group(values: Tensor) -> Tensor:
        return values.reshape(num_out // rows, num_in // group).repeat_interleave(rows, 0)

    middle = 2 ** (bits - 1)
    codes = (weight.qdata.short() + middle).to(torch.uint8)
    scale = by_group(weight.scale)
    zeros = torch.zeros_like(scale) if weight.zero_point is None else by_group(weight.zero_point)
    return affine_weight(bits, group, codes, scale, zeros.float() + middle)
