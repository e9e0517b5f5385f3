"""DEVICE_ATTENTION: the choice by name, and that the choices agree."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from omniserve.ops import OPS
from omniserve.ops.attention import (
    DEVICE_ATTENTION,
    HostLengths,
    attend_cpu,
    attend_sdpa,
    gather_keys,
    head_pages,
    resolve_attention,
)
from omniserve.spec import AttentionSpec
from tests.ops.checks import CPU, DTYPES
from tests.ops.tolerances import TORCH_HALF_ATTENTION

CUDA = torch.device("cuda")


def test_auto_takes_the_operator_on_the_cpu_and_never_on_cuda() -> None:
    assert resolve_attention("auto", CPU) is attend_cpu
    best = "xformers" if importlib.util.find_spec("xformers") else "sdpa"
    assert resolve_attention("auto", CUDA) is DEVICE_ATTENTION.get(best)


@pytest.mark.parametrize(("name", "device"), [("cpu", CUDA), ("xformers", CPU)])
def test_a_name_on_the_wrong_device_is_an_error(name: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"{name!r} runs on"):
        resolve_attention(name, device)


def test_a_name_that_reads_in_one_direction_is_refused_where_blocks_run_in_two() -> None:
    with pytest.raises(ValueError, match="set attention='sdpa'"):
        resolve_attention("xformers", CUDA, is_directed=True)
    assert resolve_attention("cpu", CPU, is_directed=True) is attend_cpu
    assert resolve_attention("sdpa", CUDA, is_directed=True) is DEVICE_ATTENTION.get("sdpa")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="cpu, sdpa, xformers"):
        resolve_attention("flash9", CPU)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa_agrees_with_the_operator(dtype: torch.dtype, on_host: bool) -> None:
    rtol, atol = TORCH_HALF_ATTENTION[dtype]
    for sample in OPS["paged_attention"].samples(CPU, dtype):
        q, k, v, table, starts, lens, scale, window, softcap, *directions = sample.args
        spec = AttentionSpec(scale=scale, window=window, softcap=softcap)
        lengths = HostLengths(query_lens=tuple(starts.diff().tolist()), seq_lens=tuple(lens.tolist()))
        args = (q, k, v, table, starts, lens, spec)
        reversed_RM = directions[0] if directions else None
        out = attend_sdpa(*args, lengths=lengths if on_host else None, reversed_RM=reversed_RM)
        expected = attend_cpu(*args, reversed_RM=reversed_RM)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol, msg=lambda m, s=sample: s.label + m)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 12), (3, 9), (4, 8), (5, 5)])
def test_gathered_keys_are_those_of_the_positions(first: int, end: int) -> None:
    cache_BKSH = torch.randn(6, 2, 4, 8)
    blocks = [5, 0, 3]
    blocks_M = torch.tensor([b if i >= first // 4 else -1 for i, b in enumerate(blocks)]).int()
    got = gather_keys(cache_BKSH, blocks_M, first, end)
    assert got.shape == (end - first, 2, 8)
    for row, position in zip(got, range(first, end), strict=True):
        assert torch.equal(row, cache_BKSH[blocks[position // 4], :, position % 4])


def test_head_pages_find_one_heads_rows() -> None:
    cache_BKSH = torch.randn(6, 3, 4, 8)
    table_RM = torch.tensor([[5, 2], [1, -1]]).int()
    pages = head_pages(table_RM, 3)
    rows = cache_BKSH.view(-1, 8)
    assert pages.shape == (6, 2)
    for request, head in ((0, 0), (0, 2), (1, 1)):
        page = int(pages[request * 3 + head, 0])
        expected: Tensor = cache_BKSH[table_RM[request, 0], head]
        assert torch.equal(rows[page * 4 : page * 4 + 4], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "xformers"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_operator(name: str) -> None:
    if name == "xformers":
        pytest.importorskip("xformers")
    attend, dtype = resolve_attention(name, CUDA), torch.bfloat16
    rtol, atol = TORCH_HALF_ATTENTION[dtype]
    for sample in OPS["paged_attention"].samples(CPU, dtype):
        *tensors, scale, window, softcap = sample.args[:9]
        reversed_RM = sample.args[9] if len(sample.args) > 9 else None
        if name == "xformers" and (softcap or reversed_RM is not None):
            continue
        spec = AttentionSpec(scale=scale, window=window, softcap=softcap)
        on_cuda = reversed_RM.cuda() if reversed_RM is not None else None
        out = attend(*(tensor.cuda() for tensor in tensors), spec, reversed_RM=on_cuda)
        torch.testing.assert_close(out.cpu(), attend_cpu(*tensors, spec, reversed_RM=reversed_RM), rtol=rtol, atol=atol)
