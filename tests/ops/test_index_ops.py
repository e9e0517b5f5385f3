"""The index operations that serve CUDA; their logic runs on any device."""

from __future__ import annotations

import pytest
import torch

from omniserve.ops import OPS, index_ops
from tests.ops.checks import CPU, check_against_reference, op_named
from tests.ops.tolerances import EXACT

NAMES = ["store_kv", "piggyback_concat", "residual_store", "residual_fetch"]


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_reference(name: str) -> None:
    for sample in OPS[name].samples(CPU, torch.bfloat16):
        check_against_reference(getattr(index_ops, name), name, sample, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    for sample in OPS[name].samples(CPU, torch.bfloat16):
        args = sample.clone()
        on_cuda = [arg.cuda() for arg in args]
        got, expected = op_named(name)(*on_cuda), op_named(name)(*args)
        pairs = list(zip(on_cuda, args, strict=True)) + ([(got, expected)] if expected is not None else [])
        for mine, wanted in pairs:
            torch.testing.assert_close(mine.cpu(), wanted, rtol=EXACT.rtol, atol=EXACT.atol, equal_nan=True)
