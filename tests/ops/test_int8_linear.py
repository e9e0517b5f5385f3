"""Promises of int8_linear beyond agreeing with its reference, which has its bits, on samples.

``python -m tests.ops.test_int8_linear`` checks what depends on the instruction set, which OMNISERVE_ISA forces.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniserve.layers.weights.int8_modules import (
    MOST_INPUTS,
    codes_of_rows,
    form_of_inputs,
    pack_int8,
    rounded,
    unpack_int8,
)
from omniserve.layers.weights.quantized import QuantizedWeight
from omniserve.ops.isa import instruction_set_in_use, instruction_sets
from tests.ops import reference
from tests.ops.checks import CPU, DTYPES, op_named
from tests.ops.table import int8_weight, linear_args
from tests.ops.test_isa import ISAS
from tests.rotation import rotating

int8_linear = op_named("int8_linear")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.one_of(st.integers(0, 13), st.integers(0, 150)),
    num_in=st.one_of(st.integers(0, 70), st.integers(0, 2300)),
    num_out=st.integers(0, 140),
    has_bias=st.booleans(),
    x_scale=st.sampled_from([None, 0.001, 0.02]),
)
def test_the_product_has_the_bits_of_the_definition(
    dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, has_bias: bool, x_scale: float | None
) -> None:
    x, _, bias = linear_args(num_rows, num_in, num_out, CPU, dtype, dtype)
    fixed = None if x_scale is None else torch.tensor([x_scale])
    args = (x, reference.pack_int8(*int8_weight(num_out, num_in)), bias if has_bias else None, num_out, fixed)
    out = int8_linear(*args)
    assert out.dtype is dtype and out.shape == (num_rows, num_out) and out.isfinite().all()
    assert torch.equal(out, reference.int8_linear(*args))


def test_the_largest_sums_are_exact() -> None:
    codes = torch.full((33, MOST_INPUTS), -128, dtype=torch.int8)
    codes[1] = 127
    packed, one = reference.pack_int8(codes, torch.ones(33)), torch.ones(1)
    x = torch.full((3, MOST_INPUTS), -128.0)
    x[1] = 127
    out = int8_linear(x, packed, None, 33, one)
    sums = torch.tensor([-128.0, 127, -128]).double()[:, None] * codes[:, 0].double() * MOST_INPUTS
    assert torch.equal(out, sums.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    x, _, bias = linear_args(150, 1301, 203, CPU, dtype, dtype)
    codes, scales = int8_weight(203, 1301)
    packed = reference.pack_int8(codes, scales)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = int8_linear(x, packed, bias, 203)
        torch.set_num_threads(1)
        for count in (1, 2, 5, 6, 7, 12, 13, 25, 33, 150):
            assert torch.equal(int8_linear(x[:count], packed, bias, 203), whole[:count])
        part = int8_linear(x[:7], reference.pack_int8(codes[3:90], scales[3:90]), bias[3:90].contiguous(), 87)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(part, whole[:7, 3:90])


@pytest.mark.parametrize("x_scale", [None, 0.02])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, x_scale: float | None) -> None:
    x, _, _ = linear_args(6, 45, 11, CPU, dtype, dtype)
    fixed = None if x_scale is None else torch.tensor([x_scale])
    packed = reference.pack_int8(*int8_weight(11, 45))
    clean = int8_linear(x, packed, None, 11, fixed)
    x[2, 44], x[3, 7], x[3, 8], x[4, 0] = torch.nan, torch.inf, torch.nan, -torch.inf
    out = int8_linear(x, packed, None, 11, fixed)
    assert out[[2, 3]].isnan().all()
    # By a fixed scale infinity is rounded to the largest code.
    assert out[4].isnan().all() if x_scale is None else out[4].isfinite().all()
    assert torch.equal(out[[0, 1, 5]], clean[[0, 1, 5]])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(num_in=st.integers(0, 300), num_out=st.integers(1, 140))
def test_what_pack_int8_writes_is_the_references(num_in: int, num_out: int) -> None:
    codes, scales = int8_weight(num_out, num_in)
    weight = QuantizedWeight(form_of_inputs(num_in), codes.view(torch.uint8) ^ 0x80, (scales[:, None],))
    packed = pack_int8(weight)
    assert torch.equal(packed, reference.pack_int8(codes, scales))
    read, of_features = unpack_int8(packed, num_out, num_in)
    assert torch.equal(read, codes) and torch.equal(of_features, scales)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_rounded_as_compressed_tensors_does(static: bool, dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    x = torch.randn(2, 7, 300, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    x[1, 3] = 0
    args = quantization.QuantizationArgs(num_bits=8, strategy="tensor" if static else "token", dynamic=not static)
    if static:
        scale, zero = torch.tensor([0.02]), torch.zeros(1, dtype=torch.int8)
    else:
        scale, zero = utils.compute_dynamic_scales_and_zp(x, args, None)
    codes = forward.quantize(x, scale, zero, args, dtype=torch.int8)
    assert torch.equal(codes_of_rows(x, scale if static else None)[0], codes.float())
    assert torch.equal(rounded(x, scale if static else None), forward.fake_quantize(x, scale, zero, args))


OF_AN_INSTRUCTION_SET = (test_the_product_has_the_bits_of_the_definition, test_the_largest_sums_are_exact)


@pytest.mark.parametrize("isa", rotating(ISAS, 1))
def test_the_promises_hold_on_each_instruction_set(isa: str) -> None:
    if isa not in {each.name for each in instruction_sets() if each.supported}:
        pytest.skip(f"this CPU lacks {isa}")
    # glibc then fills fresh memory with 0x7f7f7f7f, 3e38: an output that is left unwritten shows.
    env = {**os.environ, "OMNISERVE_ISA": isa, "MALLOC_PERTURB_": "128", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.ops.test_int8_linear"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [isa], done.stderr[-4000:]


if __name__ == "__main__":
    for check in OF_AN_INSTRUCTION_SET:
        check()
    for each_dtype in DTYPES:
        test_batch_and_threads_do_not_change_a_bit(each_dtype)
        for each_scale in (None, 0.02):
            test_nan_and_infinity_stay_in_their_row(each_dtype, each_scale)
    print(instruction_set_in_use())
