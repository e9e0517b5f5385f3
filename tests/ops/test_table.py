"""Every operator is in OPS, has samples that meet its schema, and agrees with its reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.ops.checks import DTYPES, check_against_reference, op_named
from tests.ops.table import OPS, Sample, cpu_samples


@cache
def samples_of(name: str, dtype: torch.dtype) -> list[Sample]:
    return list(cpu_samples(name, dtype))


SAMPLES = [
    pytest.param(name, index, id=f"{name}-{sample.label}")
    for name in OPS
    for index, sample in enumerate(samples_of(name, torch.float32))
]


_COLLECTIVES = {"all_reduce", "all_gather"}
"""Operators of ranks; tests/parallel runs them."""


def test_every_registered_operator_has_a_reference_and_samples() -> None:
    registered = {
        schema.name.removeprefix("omniserve::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("omniserve::")
    }
    assert registered - _COLLECTIVES == set(OPS)
    for name in OPS:
        assert len(samples_of(name, torch.float32)) >= 4


@pytest.mark.parametrize("name", OPS)
def test_samples_include_an_empty_one(name: str) -> None:
    arguments = [arg for sample in samples_of(name, torch.float32) for arg in sample.args]
    assert any(isinstance(arg, torch.Tensor) and arg.numel() == 0 for arg in arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_agrees_with_its_reference(name: str, index: int, dtype: torch.dtype) -> None:
    check_against_reference(op_named(name), name, samples_of(name, dtype)[index], dtype)


def _kinds(sample: Sample) -> tuple[Any, ...]:
    return tuple((arg.dtype, arg.ndim) if isinstance(arg, torch.Tensor) else type(arg) for arg in sample.args)


def _form(sample: Sample) -> tuple[Any, ...]:
    tensors = [arg for arg in sample.args if isinstance(arg, torch.Tensor)]
    return (_kinds(sample), *((tensor.is_contiguous(), tensor.numel() == 0) for tensor in tensors))


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    """Schema and fakes are checked with one sample of each form, and traced graphs with one of the same kinds.

    For another size the checks run no other code; kinds are arguments' types and dtypes, and a form has strides, too.
    """
    samples = samples_of(name, torch.float32)
    for sample in {_form(sample): sample for sample in samples}.values():
        torch.library.opcheck(op_named(name), sample.clone(), test_utils=("test_schema", "test_faketensor"))
    for sample in {_kinds(sample): sample for sample in samples}.values():
        torch.library.opcheck(op_named(name), sample.clone())


def test_concat_without_seats_is_a_copy() -> None:
    attn_TD = torch.ones(2, 4)
    out_TD = torch.ops.omniserve.piggyback_concat(attn_TD, torch.ones(1, 4), torch.empty(0, dtype=torch.int64))
    out_TD.zero_()
    assert attn_TD.eq(1).all()


def test_a_send_large_enough_for_several_threads_agrees_with_its_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(70, 3000, generator=generator)
    q, k, v = torch.randn(70, 40, 64, generator=generator).split([24, 8, 8], 1)
    slots_P = torch.randperm(80, generator=generator)[:64]
    slots_P[5] = -1
    stores = torch.full((80, 3000), torch.nan), torch.full((80, 40 * 64), torch.nan), torch.zeros(80).long()
    sample = Sample(label="large", args=(hidden_TD, q, k, v, slots_P, *stores, torch.tensor([2**40])))
    check_against_reference(op_named("piggyback_send"), "piggyback_send", sample, torch.float32)
