"""Quantises the weights of a loaded model to codes of 8 or 4 bits, by torchao's algorithms, for ``quantized_linear``.

``int8``: symmetric, a scale for each output feature. ``int4``: with a zero point, a scale for each 64 inputs (fewer
where 64 do not divide them); the embedding and the head, which are the most sensitive, get 8 bits.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from omniserve.layers.weights.groups import is_plain
from omniserve.layers.weights.loaded_model import in_adapters
from omniserve.layers.weights.quantized import QuantForm, QuantizedWeight, Scales, dense_of, itself, remember

Quantize = Literal["int8", "int4"]
"""What ``quantize_weights`` knows."""

_GROUPS = (64, 32, 16, 8)


class QuantizedModel(NamedTuple):
    """What ``quantize_weights`` did."""

    num_weights: int
    left: list[str]
    """Names of the matrices that are as they were: of adapters, of experts that are one tensor, of odd sizes."""


def quantize_weights(model: nn.Module, how: Quantize) -> QuantizedModel:
    """Quantise the linears and the embedding of a model on the CPU, in place.

    Each dense weight gets the values of its codes, so that the model computes the same before and after it is patched.
    When it is patched, the codes take the place of the dense weights.

    Raises:
        ImportError: torchao is not installed.
        ValueError: The model is not on the CPU, or nothing of it can be quantised.
    """
    done: dict[int, bool] = {}
    adapted = in_adapters(model)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    fine = embeddings | ({id(head.weight)} if isinstance(head, nn.Linear) else set())
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or id(module) in adapted:
            continue
        weight = module.weight
        if id(weight) not in done:
            takes = is_plain(module) if isinstance(module, nn.Linear) else type(weight) is nn.Parameter
            codes = _quantized(weight.detach(), "int8" if id(weight) in fine else how) if takes else None
            if codes is not None:
                weight.data.copy_(dense_of(codes))
                remember(weight, codes.form, functools.partial(itself, codes), is_in_memory=True)
            done[id(weight)] = codes is not None
    left = [name for name, weight in model.named_parameters() if weight.dim() > 1 and not done.get(id(weight))]
    if not any(done.values()):
        raise ValueError("nothing of the model can be quantised: it has no plain linear on the CPU")
    return QuantizedModel(sum(done.values()), left)


def _quantized(weight: Tensor, how: Quantize) -> QuantizedWeight | None:
    """Return the codes of a weight ``[O, I]``; None where no form has its inputs."""
    from torchao.quantization.quant_primitives import (  # type: ignore[import-untyped, unused-ignore]
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    num_in = weight.shape[1]
    if weight.device.type != "cpu":
        raise ValueError("weights are quantised on the CPU alone; give --device cpu")
    group = next((each for each in _GROUPS if num_in % each == 0), 0)
    if not group:
        return None
    values = weight.float()
    if how == "int8":
        block, bounds, kind, to = (1, num_in), (-127, 127), MappingType.SYMMETRIC, torch.int8
    else:
        block, bounds, kind, to = (1, group), (0, 15), MappingType.ASYMMETRIC, torch.uint8
    scale, zero = choose_qparams_affine(
        values, kind, block, to, *bounds, scale_dtype=torch.float32, zero_point_dtype=torch.int32
    )
    codes = quantize_affine(values, block, scale, zero, to, *bounds)
    if how == "int8":
        form = QuantForm(8, Scales.F32, num_in)
        return QuantizedWeight(form, codes.view(torch.uint8) ^ 0x80, (scale.reshape(-1, 1),))
    return QuantizedWeight(QuantForm(4, Scales.AFFINE32, group), codes, (scale, -(scale * zero)))
