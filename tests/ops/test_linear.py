"""Properties of skinny_linear beyond agreeing with its reference on samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.checks import CPU, DTYPES, check_against_reference, op_named
from tests.ops.table import Sample, linear_args

skinny_linear = op_named("skinny_linear")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(0, 20),
    num_in=st.integers(0, 600),
    num_out=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_agrees_with_the_reference(num_rows: int, num_in: int, num_out: int, dtype: torch.dtype) -> None:
    sample = Sample(label="drawn", args=linear_args(num_rows, num_in, num_out, CPU, dtype))
    check_against_reference(skinny_linear, "skinny_linear", sample, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    x, weight = linear_args(18, 200, 203, CPU, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    whole = skinny_linear(x, weight)
    torch.set_num_threads(1)
    alone = torch.cat([skinny_linear(x[t : t + 1], weight) for t in range(18)])
    of_some_features = skinny_linear(x[:5], weight[3:90])
    torch.set_num_threads(before)
    assert torch.equal(alone, whole)
    assert torch.equal(of_some_features, whole[:5, 3:90])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_where_they_belong(dtype: torch.dtype) -> None:
    x, weight = linear_args(6, 45, 11, CPU, dtype)
    clean = skinny_linear(x, weight)
    x[2, 44], weight[7, 0] = torch.nan, torch.inf
    out = skinny_linear(x, weight)
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
    x, weight = linear_args(num_rows, num_in, num_out, CPU, torch.float32)
    narrow = weight.bfloat16()
    assert torch.equal(skinny_linear(x, narrow), skinny_linear(x, narrow.float()))


def test_bf16_sums_are_kept_in_fp32() -> None:
    # 1 + 4095 * 2^-8: a bf16 sum would stop growing at 2, where half an ulp is 2^-8 * 2.
    x = torch.full((1, 4096), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0] = 1
    out = skinny_linear(x, torch.ones(4, 4096, dtype=torch.bfloat16))
    assert out.tolist() == [[17.0] * 4]  # 16.996 to 8 bits
