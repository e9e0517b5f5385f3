"""Properties of packed_linear beyond agreeing with its reference on samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import CPU, DTYPES, check_against_reference, op_named
from tests.ops.table import Sample, linear_args, packed_weight

packed_linear = op_named("packed_linear")

FORMS = [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16)]
"""(rows, weight)."""


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(0, 40),
    num_in=st.integers(0, 600),
    num_out=st.integers(0, 140),
    form=st.sampled_from(FORMS),
    has_bias=st.booleans(),
)
def test_any_shape_agrees_with_the_reference(
    num_rows: int, num_in: int, num_out: int, form: tuple[torch.dtype, torch.dtype], has_bias: bool
) -> None:
    x, weight, bias = linear_args(num_rows, num_in, num_out, CPU, *form)
    sample = Sample(label="drawn", args=(x, packed_weight(weight), bias if has_bias else None, num_out))
    check_against_reference(packed_linear, "packed_linear", sample, form[0])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_in", [201, 2100])  # one piece of the inputs, and several
def test_batch_and_threads_do_not_change_a_bit(form: tuple[torch.dtype, torch.dtype], num_in: int) -> None:
    x, weight, bias = linear_args(150, num_in, 203, CPU, *form)
    packed = packed_weight(weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = packed_linear(x, packed, bias, 203)
        torch.set_num_threads(1)
        for count in (1, 2, 3, 6, 7, 12, 13, 25):
            assert torch.equal(packed_linear(x[:count], packed, bias, 203), whole[:count])
        alone = torch.cat([packed_linear(row, packed, bias, 203) for row in x.split(1)])
        of_some_features = packed_linear(x[:5], packed_weight(weight[3:90]), bias[3:90].contiguous(), 87)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, whole)
    assert torch.equal(of_some_features, whole[:5, 3:90])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nan_and_infinity_stay_where_they_belong(form: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, _ = linear_args(6, 45, 11, CPU, *form)
    clean = packed_linear(x, packed_weight(weight), None, 11)
    x[2, 44], weight[7, 0] = torch.nan, torch.inf
    out = packed_linear(x, packed_weight(weight), None, 11)
    assert out[2].isnan().all()
    rows = [0, 1, 3, 4, 5]
    assert out[rows, 7].isinf().all()
    features = [f for f in range(11) if f != 7]
    assert torch.equal(out[rows][:, features], clean[rows][:, features])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(num_rows=st.integers(0, 20), num_in=st.integers(0, 600), num_out=st.integers(0, 70))
def test_a_bf16_weight_beside_fp32_rows_gives_the_bits_of_the_widened_weight(
    num_rows: int, num_in: int, num_out: int
) -> None:
    x, weight, _ = linear_args(num_rows, num_in, num_out, CPU, torch.float32, torch.bfloat16)
    narrow = packed_linear(x, packed_weight(weight), None, num_out)
    assert torch.equal(narrow, packed_linear(x, packed_weight(weight.float()), None, num_out))


def test_bf16_sums_are_kept_in_fp32() -> None:
    # 1 + 4095 * 2^-8: a bf16 sum would stop growing at 2, where half an ulp is 2^-8 * 2.
    x = torch.full((1, 4096), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0] = 1
    out = packed_linear(x, packed_weight(torch.ones(4, 4096, dtype=torch.bfloat16)), None, 4)
    assert out.tolist() == [[17.0] * 4]  # 16.996 to 8 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_not_further_from_float64_than_torchs_product(dtype: torch.dtype) -> None:
    x, weight, bias = linear_args(40, 1500, 96, CPU, dtype, dtype)
    exact = x.double() @ weight.double().T + bias.double()
    ours = packed_linear(x, packed_weight(weight), bias, 96).double() - exact
    # A copy, for with AMX oneDNN multiplies what lies behind a row by zero, which is NaN here.
    torchs = torch.nn.functional.linear(x.contiguous(), weight, bias).double() - exact
    assert ours.square().mean() <= torchs.square().mean() * 1.001
