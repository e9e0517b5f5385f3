"""Promises of quantized_linear and quantized_rows beyond agreeing with their references on samples.

``python -m tests.ops.test_quantized_linear`` checks what depends on the instruction set, which OMNISERVE_ISA forces.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omniserve.layers.weights.quantized import (
    QuantForm,
    QuantizedWeight,
    Scales,
    dense_of,
    pack_quantized,
    packed_shape,
)
from omniserve.ops.isa import instruction_set_in_use, instruction_sets
from tests.ops import reference
from tests.ops.checks import CPU, DTYPES, op_named
from tests.ops.table import CODE_FORMS, CodeForm, linear_args, packed_codes, packed_weight, random_codes
from tests.ops.test_isa import ISAS
from tests.rotation import rotating

packed_linear = op_named("packed_linear")
quantized_linear = op_named("quantized_linear")
quantized_rows = op_named("quantized_rows")

BLOCK_ROWS = {"amx_bf16": 4, "avx512_bf16": 12}
"""Instruction sets whose products are of bf16, and rows beside which they multiply any codes; more may be multiplied
with a weight that is rounded to bf16."""


def most_fixed_rows(form: CodeForm) -> int:
    """Return up to how many rows of bf16 are multiplied with codes as whole numbers of 16 bits."""
    return (8 if form.group >= 32 else 4) if instruction_set_in_use() == "avx2" else 0


def most_rows_of_codes(form: CodeForm) -> int:
    """Return up to how many rows of bf16 are multiplied with codes, not with the dense weight."""
    isa = instruction_set_in_use()
    if isa == "avx512_bf16" and form.group >= 32:
        return 10**9
    return BLOCK_ROWS.get(isa, most_fixed_rows(form))


def is_product_of_codes(form: CodeForm, x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.shape[0] <= most_rows_of_codes(form)


forms = st.sampled_from(CODE_FORMS)


def dense_weight(packed: Tensor, num_in: int, num_out: int, form: CodeForm) -> Tensor:
    """Return the weight that the bytes mean, ``[O, I]`` fp32, by the reference."""
    return reference.quantized_rows(torch.arange(num_out), packed, num_in, num_out, *form.arguments)


def weight_of_zeros(num_in: int, num_out: int, form: CodeForm) -> Tensor:
    """Return what `random_codes` would mean if all codes were zero: the offsets, where there are any."""
    codes, numbers = random_codes(form, num_out, num_in)
    packed = reference.pack_codes(torch.zeros_like(codes), numbers, *form.arguments)
    return dense_weight(packed, num_in, num_out, form)


def product_of_dense(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, form: CodeForm) -> Tensor | None:
    """Return what quantized_linear must return, to the bit; None where it multiplies codes."""
    if is_product_of_codes(form, x):
        return None
    if x.dtype is torch.bfloat16 and instruction_set_in_use() in BLOCK_ROWS:
        return packed_linear(x, packed_weight(weight_OI.bfloat16()), bias_O, weight_OI.shape[0])
    bias_O = None if bias_O is None else bias_O.float()
    return packed_linear(x.float(), packed_weight(weight_OI), bias_O, weight_OI.shape[0]).to(x.dtype)


def check_is_rounded_once(out: Tensor, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, form: CodeForm) -> None:
    """Check that ``out`` is the product in float64, with one rounding to bf16 beside those of fp32 sums.

    The weight's codes are `random_codes`.
    """
    num_out, num_in = weight_OI.shape
    exact = x.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
    # Codes times their scales, and offsets, are summed apart: a weight less its offset, and the offset.
    summed = weight_OI.abs() + 2 * weight_of_zeros(num_in, num_out, form).abs()
    sums = x.double().abs() @ summed.double().T
    # The rounding to 8 bits, and errors of 6e-8 in additions of fp32, most of which cancel. A weight rounded to bf16 is
    # a thousand times further away.
    errors = 2.0**-22 * sums
    if len(x) <= most_fixed_rows(form):
        # Of each input at most the largest one's of its part by 2^15; most are not rounded, and errors cancel.
        parts = x.double().abs().split(min(form.group, 128), dim=1)
        units = torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in parts], 1) if num_in else x.double()
        errors = errors + 2.0**-15 * ((units**2) @ (weight_OI.double().T ** 2)).sqrt()
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + errors).all()


@settings(max_examples=160, deadline=None, derandomize=True)
@given(
    form=forms,
    dtype=st.sampled_from(DTYPES),
    num_rows=st.one_of(st.integers(0, 13), st.integers(0, 70)),
    num_in=st.one_of(st.integers(0, 70), st.integers(0, 1100)),
    num_out=st.integers(0, 140),
    has_bias=st.booleans(),
)
def test_the_product_has_the_bits_of_the_dense_weights(
    form: CodeForm, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    x, _, bias = linear_args(num_rows, num_in, num_out, CPU, dtype, dtype)
    bias_O = bias if has_bias else None
    packed = packed_codes(form, num_out, num_in)
    weight_OI = dense_weight(packed, num_in, num_out, form)
    out = quantized_linear(x, packed, bias_O, num_out, *form.arguments)
    assert out.dtype is dtype and out.shape == (num_rows, num_out) and out.isfinite().all()
    expected = product_of_dense(x, weight_OI, bias_O, form)
    if expected is None:
        check_is_rounded_once(out, x, weight_OI, bias_O, form)
    else:
        assert torch.equal(out, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    form=forms,
    num_rows=st.one_of(st.integers(1, 13), st.integers(1, 150)),
    num_in=st.integers(1, 1100),
    num_out=st.integers(1, 70),
    has_bias=st.booleans(),
)
def test_products_of_codes_in_bf16_are_rounded_once(
    form: CodeForm, num_rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    if (most_rows := most_rows_of_codes(form)) > 0:  # else the dense weight in fp32 is multiplied, which is as exact
        num_rows = min(num_rows, most_rows)
    x, _, bias = linear_args(num_rows, num_in, num_out, CPU, torch.bfloat16, torch.bfloat16)
    bias_O = bias if has_bias else None
    packed = packed_codes(form, num_out, num_in)
    weight_OI = dense_weight(packed, num_in, num_out, form)
    out = quantized_linear(x, packed, bias_O, num_out, *form.arguments)
    check_is_rounded_once(out, x, weight_OI, bias_O, form)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    form=forms, num_rows=st.integers(1, 9), num_in=st.integers(1, 700), place=st.integers(0, 699),
    exponent=st.integers(-60, 60), outlier=st.integers(0, 12),
)  # fmt: skip
def test_rows_of_bf16_may_be_of_any_size_and_have_outliers(
    form: CodeForm, num_rows: int, num_in: int, place: int, exponent: int, outlier: int
) -> None:
    x, _, _ = linear_args(num_rows, num_in, 40, CPU, torch.bfloat16, torch.bfloat16)
    x[0, place % num_in] *= 2.0**outlier
    packed = packed_codes(form, 40, num_in)
    out = quantized_linear(x, packed, None, 40, *form.arguments)
    if is_product_of_codes(form, x):
        check_is_rounded_once(out, x, dense_weight(packed, num_in, 40, form), None, form)
    scaled = quantized_linear(x * 2.0**exponent, packed, None, 40, *form.arguments)
    assert torch.equal(scaled, out * 2.0**exponent), "a power of two changes no rounding"


def test_rows_of_bf16_at_the_ends_of_the_range() -> None:
    codes = torch.full((4, 64), 9, dtype=torch.uint8)  # 1 above the zero
    packed = reference.pack_codes(codes, (torch.ones(4, 2).half(),), 4, reference.F16, 32)
    for value in (0.0, 2.0**-100, 1.5 * 2.0**100, 2.0**120):
        x = torch.zeros(1, 64, dtype=torch.bfloat16)
        x[0, 5], x[0, 40] = value, -value / 2
        assert quantized_linear(x, packed, None, 4, 4, reference.F16, 32).tolist() == [[value / 2] * 4]
    x[0, 5] = torch.inf
    assert not quantized_linear(x, packed, None, 4, 4, reference.F16, 32).isfinite().any()
    x[0, 5], x[0, 40] = 2.0**-133, 0  # subnormal: zero, or itself
    assert quantized_linear(x, packed, None, 4, 4, reference.F16, 32).abs().max() <= 2.0**-133


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    form=forms,
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 40),
    num_in=st.one_of(st.integers(0, 70), st.integers(0, 1100)),
    num_out=st.integers(1, 70),
)
def test_an_order_is_that_of_the_columns(
    form: CodeForm, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int
) -> None:
    x, _, _ = linear_args(num_rows, num_in, num_out, CPU, dtype, dtype)
    packed = packed_codes(form, num_out, num_in)
    order = torch.randint(max(1, num_in), (num_in,), generator=torch.Generator().manual_seed(num_in)).int()
    out = quantized_linear(x, packed, None, num_out, *form.arguments, order)
    expected = quantized_linear(x[:, order.long()].contiguous(), packed, None, num_out, *form.arguments)
    assert torch.equal(out, expected)


@settings(max_examples=len(CODE_FORMS), deadline=None, derandomize=True)
@given(form=forms, num_in=st.integers(1, 700))
def test_codes_in_bf16_are_nearer_to_float64_than_the_weight_in_bf16(form: CodeForm, num_in: int) -> None:
    packed = packed_codes(form, 96, num_in)
    weight_OI = dense_weight(packed, num_in, 96, form)
    narrow = packed_weight(weight_OI.bfloat16())
    x, _, _ = linear_args(40, num_in, 96, CPU, torch.bfloat16, torch.bfloat16)

    def mean_square(outs: list[Tensor]) -> float:
        return float((torch.cat(outs).double() - x.double() @ weight_OI.double().T).square().mean())

    few = [quantized_linear(rows, packed, None, 96, *form.arguments) for rows in x.split(4)]
    dense = packed_linear(x, narrow, None, 96)
    assert mean_square(few) < mean_square([dense])
    assert mean_square([quantized_linear(x, packed, None, 96, *form.arguments)]) <= mean_square([dense])


@pytest.mark.parametrize("form", CODE_FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_threads_do_not_change_a_bit(form: CodeForm, dtype: torch.dtype) -> None:
    x, _, bias = linear_args(150, 1301, 203, CPU, dtype, dtype)
    codes, numbers = random_codes(form, 203, 1301)
    packed = reference.pack_codes(codes, numbers, *form.arguments)
    most_few = min(most_rows_of_codes(form), 150) if dtype is torch.bfloat16 else 0
    before = torch.get_num_threads()

    def product(rows: Tensor) -> Tensor:
        return quantized_linear(rows, packed, bias, 203, *form.arguments)

    try:
        torch.set_num_threads(2)
        whole, few = product(x), product(x[:most_few])
        torch.set_num_threads(1)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 25, 31, 149, 150):
            assert torch.equal(product(x[:count]), (few if count <= most_few else whole)[:count])
        alone = torch.cat([product(row) for row in x[:20].split(1)])
        # Of one row several panels are computed at once: of one, two, three and seven, here.
        for first, last in ((3, 30), (3, 67), (3, 90), (0, 203)):
            part = reference.pack_codes(codes[first:last], tuple(each[first:last] for each in numbers), *form.arguments)
            for rows, expected in ((x, whole), (x[:1], alone), (x[:2], alone)):
                out = quantized_linear(rows, part, bias[first:last].contiguous(), last - first, *form.arguments)
                assert torch.equal(out, expected[: len(rows), first:last])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone[:most_few], few[:20])
    assert torch.equal(alone, whole[:20]) != (0 < most_few < 150)


@pytest.mark.parametrize("num_rows", [4, 6, 14])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", CODE_FORMS, ids=str)
def test_nan_and_infinity_stay_where_they_belong(form: CodeForm, dtype: torch.dtype, num_rows: int) -> None:
    x, _, _ = linear_args(num_rows, 45, 11, CPU, dtype, dtype)
    codes, numbers = random_codes(form, 11, 45)

    def product() -> Tensor:
        return quantized_linear(x, reference.pack_codes(codes, numbers, *form.arguments), None, 11, *form.arguments)

    clean = product()
    x[2, 44], numbers[0][7, 0], numbers[0][8, 0] = torch.nan, torch.inf, torch.nan
    out = product()
    assert out[2].isnan().all()
    rows = [row for row in range(num_rows) if row != 2]
    assert not out[rows][:, [7, 8]].isfinite().any()
    features = [feature for feature in range(11) if feature not in (7, 8)]
    assert torch.equal(out[rows][:, features], clean[rows][:, features])


def test_sums_of_few_rows_of_bf16_are_kept_in_fp32() -> None:
    # 1 + 4095 * 2^-8: a bf16 sum would stop growing at 2, where half an ulp is 2^-8 * 2.
    x = torch.full((1, 4096), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0] = 1
    codes = torch.full((4, 4096), 9, dtype=torch.uint8)  # 1 above the zero
    packed = reference.pack_codes(codes, (torch.ones(4, 128).half(),), 4, reference.F16, 32)
    assert quantized_linear(x, packed, None, 4, 4, reference.F16, 32).tolist() == [[17.0] * 4]  # 16.996 to 8 bits


@settings(max_examples=60, deadline=None, derandomize=True)
@given(form=forms, num_in=st.integers(0, 700), num_out=st.integers(1, 140), seed=st.integers(0, 9))
def test_rows_of_codes_are_the_references_to_the_bit(form: CodeForm, num_in: int, num_out: int, seed: int) -> None:
    ids = torch.randint(num_out, (3, 5), generator=torch.Generator().manual_seed(seed))
    args = (ids, packed_codes(form, num_out, num_in), num_in, num_out, *form.arguments)
    assert torch.equal(quantized_rows(*args), reference.quantized_rows(*args))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(form=forms, num_in=st.integers(1, 700), num_out=st.one_of(st.integers(0, 140), st.just(2100)))
def test_what_pack_quantized_writes_means_what_dense_of_returns(form: CodeForm, num_in: int, num_out: int) -> None:
    codes, numbers = random_codes(form, num_out, num_in)
    weight = QuantizedWeight(QuantForm(form.bits, Scales(form.scales), form.group), codes, numbers)
    assert weight.form.arguments == form.arguments
    packed = torch.full(packed_shape(weight.form, num_out, num_in), 99, dtype=torch.uint8)
    pack_quantized(weight, packed)
    expected = reference.pack_codes(codes, numbers, *form.arguments)
    assert packed.shape == expected.shape
    dense = dense_weight(packed, num_in, num_out, form)
    assert torch.equal(dense, dense_weight(expected, num_in, num_out, form))
    assert torch.equal(dense, dense_of(weight))
    assert torch.equal(quantized_rows(torch.arange(num_out), packed, num_in, num_out, *form.arguments), dense)


OF_AN_INSTRUCTION_SET = (
    test_the_product_has_the_bits_of_the_dense_weights,
    test_products_of_codes_in_bf16_are_rounded_once,
    test_rows_of_bf16_may_be_of_any_size_and_have_outliers,
    test_rows_of_bf16_at_the_ends_of_the_range,
    test_an_order_is_that_of_the_columns,
    test_codes_in_bf16_are_nearer_to_float64_than_the_weight_in_bf16,
    test_sums_of_few_rows_of_bf16_are_kept_in_fp32,
)


@pytest.mark.parametrize("isa", rotating(ISAS, 1))
def test_the_promises_hold_on_each_instruction_set(isa: str) -> None:
    if isa not in {each.name for each in instruction_sets() if each.supported}:
        pytest.skip(f"this CPU lacks {isa}")
    # glibc then fills fresh memory with 0x7f7f7f7f, 3e38: an output that is left unwritten shows.
    env = {**os.environ, "OMNISERVE_ISA": isa, "MALLOC_PERTURB_": "128", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.ops.test_quantized_linear"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [isa], done.stderr[-4000:]


if __name__ == "__main__":
    for check in OF_AN_INSTRUCTION_SET:
        check()
    for each_form in CODE_FORMS:
        for each_dtype in DTYPES:
            test_batch_and_threads_do_not_change_a_bit(each_form, each_dtype)
            for each_count in (4, 6, 14):
                test_nan_and_infinity_stay_where_they_belong(each_form, each_dtype, each_count)
    print(instruction_set_in_use())
