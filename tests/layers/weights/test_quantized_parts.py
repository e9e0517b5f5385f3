"""Parts of weights of codes: their dense values are the weight's, bit for bit, in forms that the kernels know."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from omniserve.layers.weights.quantized import (
    QuantForm,
    Scales,
    dense_of,
    pack_quantized,
    packed_shape,
    remember,
    remembered,
    still_quantized,
)
from omniserve.layers.weights.quantized_parts import form_of_inputs, inputs_of, remember_inputs, remember_outputs
from tests.parity.formats import CODES, random_codes


@pytest.mark.parametrize("name", CODES)
def test_inputs_have_the_values_of_the_whole(name: str) -> None:
    rng = random.Random(name)
    for seed in range(12):
        num_in = rng.choice((64, 96, 512, 768, 1000, 2816))
        whole = random_codes(CODES[name], 7, num_in, seed=seed)
        begin = rng.choice((0, 256, 8 * rng.randrange(num_in // 8)))
        end = rng.choice((num_in, min(num_in, begin + 8 * rng.randrange(1, 40))))
        if begin >= end:
            continue
        part = inputs_of(whole, begin, end)
        assert torch.equal(dense_of(part).view(torch.int32), dense_of(whole)[:, begin:end].view(torch.int32))
        packed = torch.empty(packed_shape(part.form, *part.shape), dtype=torch.uint8)
        pack_quantized(part, packed)
        rows = torch.ops.omniserve.quantized_rows(torch.arange(7), packed, end - begin, 7, *part.form.arguments)
        assert torch.equal(rows, dense_of(part))


def test_records_that_are_whole_keep_their_form() -> None:
    for name in ("Q4_K", "Q6_K", "Q8_0"):
        form = CODES[name]
        assert form_of_inputs(form, 1024, 256, 768) == form == form_of_inputs(form, 1000, 512, 1000)
    assert form_of_inputs(CODES["Q4_K"], 688, 344, 688) == QuantForm(4, Scales.AFFINE32, 8)
    assert form_of_inputs(CODES["Q6_K"], 1376, 688, 1376) == QuantForm(8, Scales.F32, 16)
    assert form_of_inputs(CODES["Q5_0"], 96, 48, 96) == QuantForm(8, Scales.F16, 16)


def test_no_form_has_groups_of_fewer_than_eight() -> None:
    whole = random_codes(CODES["Q4_0"], 5, 64)
    assert form_of_inputs(whole.form, 64, 0, 12) is None
    with pytest.raises(ValueError, match="no form has the inputs 0 to 12"):
        inputs_of(whole, 0, 12)


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_what_is_noted_of_a_part_is_read_of_the_part(is_in_memory: bool) -> None:
    codes, order = random_codes(CODES["4 bits"], 12, 64), torch.randperm(64).int()
    weight = nn.Parameter(dense_of(codes))
    remember(weight, codes.form, lambda: codes, is_in_memory=is_in_memory)
    noted = remembered(weight)
    assert noted is not None
    part = nn.Parameter(weight.detach()[:, 32:].clone())
    assert remember_inputs(part, noted, 64, 32, 64)
    assert (read := still_quantized(part)) is not None and torch.equal(read.codes, codes.codes[:, 32:])
    outputs = torch.tensor([3, 4, 9])
    part = nn.Parameter(weight.detach()[outputs].clone())
    remember_outputs(part, noted, outputs)
    assert (read := still_quantized(part)) is not None and torch.equal(read.codes, codes.codes[outputs])
    # Inputs that belong to groups in another order have no form.
    remember(weight, codes.form, lambda: codes, is_in_memory=is_in_memory, order=order)
    noted = remembered(weight)
    assert noted is not None and not remember_inputs(part, noted, 64, 32, 64)
