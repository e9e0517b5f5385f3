"""``attend_xformers`` asks of xformers what it takes, and returns what the operator computes; no GPU is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.ops.attention.native import attend_cpu
from omniserve.ops.attention.xformers import attend_xformers
from tests.ops import fake_xformers
from tests.ops.checks import CPU, attention_call
from tests.ops.table import OPS, AttentionShape, attention_args
from tests.ops.tolerances import TORCH_HALF_ATTENTION

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_xformers.install(monkeypatch)


def compare(args: Sequence[Any], *, on_host: bool = True, one_query_each: bool = False) -> None:
    call = attention_call(args[:9], on_host=on_host, one_query_each=one_query_each)
    expected, out = attend_cpu(*call), attend_xformers(*call)
    rtol, atol = TORCH_HALF_ATTENTION[out.dtype]
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_the_operator(stand_in: None, dtype: torch.dtype) -> None:
    for number, sample in enumerate(OPS["paged_attention"].samples(CPU, dtype)):
        if not sample.args[8] and len(sample.args) == 9:  # neither soft-capped nor in two directions
            compare(sample.args, on_host=number % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps(stand_in: None, seed: int, dtype: torch.dtype) -> None:
    """Decodes over pages of 64, windows, chunks of any lengths, groups of one and of several heads, many requests."""
    rng = random.Random(seed)
    is_decode, num_requests = rng.random() < 0.6, rng.choice([1, 3, 9, 20])
    chunks = tuple((1 if is_decode else rng.randint(0, 20), rng.randint(1, 200)) for _ in range(num_requests))
    group, kv_heads = rng.choice([1, 3, 8]), rng.choice([1, 2, 4])
    shape = AttentionShape(
        label="", chunks=chunks, heads=(group * kv_heads, kv_heads, rng.choice([16, 64, 80, 128])),
        block_size=rng.choice([16, 64, 64, 128]), window=rng.choice([0, 0, 33]), strided=rng.random() < 0.3,
    )  # fmt: skip
    compare(attention_args(shape, CPU, dtype), on_host=rng.random() < 0.7)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("block_size", [16, 64])
def test_padding_beside_decodes(stand_in: None, block_size: int, window: int) -> None:
    chunks = ((1, 30), (1, 5), (1, 0), (1, 70), (1, 9))
    shape = AttentionShape(label="", chunks=chunks, heads=(4, 2, 16), block_size=block_size, window=window)
    args = attention_args(shape, CPU, torch.bfloat16)
    args[3][[1, 4]] = -1
    args[5][[1, 4]] = 0
    args[1][0], args[2][0] = 0.5, 0.5  # what padding reads in place of nothing
    compare(args, one_query_each=True)


@pytest.mark.parametrize(("num_requests", "group", "kv_heads"), [(9, 4, 4), (8, 1, 2), (3, 4, 1)])
def test_decodes_are_read_from_their_pages_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, group: int, kv_heads: int
) -> None:
    """xformers by itself takes its only kernel with pages for few queries of several heads; else it finds none."""
    fake_xformers.install(monkeypatch)
    monkeypatch.setattr("omniserve.ops.attention.xformers.gather_keys", lambda *args: pytest.fail("it gathers"))
    chunks = tuple((1, 7 + 41 * i % 190) for i in range(num_requests))
    shape = AttentionShape(label="", chunks=chunks, heads=(group * kv_heads, kv_heads, 64), block_size=64)
    compare(attention_args(shape, CPU, torch.bfloat16))


def test_kernels_are_launched_on_the_device_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which may be another one."""
    entered: list[Tensor] = []

    class Noted(torch.cuda.device_of):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            entered.append(tensor)

    fake_xformers.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_of", Noted)
    args = attention_args(AttentionShape(label="", chunks=((1, 9),), heads=(2, 2, 16)), CPU, torch.float32)
    compare(args)
    assert [tensor is args[0] for tensor in entered] == [True]


# -- the stand-in beside the package, where it is installed -------------------------------------------------------


def real_lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    query_lens = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    return query_lens, [n + rng.randint(0, 20) for n in query_lens]


def dense(mask: Any, num_keys: int) -> Tensor:
    """Return which query sees which row of K, by the stand-in."""
    seen = torch.zeros(sum(mask.query_lens), num_keys, dtype=torch.bool)
    for queries, rows_C, seen_QC in mask.sequences():
        seen[queries, rows_C] = seen_QC
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_masks_of_the_stand_in_are_those_of_xformers(seed: int) -> None:
    real = pytest.importorskip("xformers.ops.fmha.attn_bias")
    rng = random.Random(seed)
    query_lens, key_lens = real_lengths(rng)
    name = "BlockDiagonalCausalFromBottomRightMask"
    ours, theirs = (
        getattr(module, name).from_seqlens(query_lens, key_lens, device=CPU) for module in (fake_xformers, real)
    )
    shape = (sum(query_lens), sum(key_lens))
    assert torch.equal(dense(ours, shape[1]), theirs.materialize(shape) == 0)
    ours, theirs = (mask.make_local_attention_from_bottomright(7) for mask in (ours, theirs))
    assert torch.equal(dense(ours, shape[1]), theirs.materialize(shape) == 0)

    num_requests, pages, page_size = len(query_lens), 3, 16
    tables = torch.randperm(num_requests * pages).view(num_requests, pages).int()
    name = "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
    ours, theirs = (
        getattr(module, name).from_seqlens(query_lens, key_lens, tables, page_size, device=CPU)
        for module in (fake_xformers, real)
    )
    num_keys = num_requests * pages * page_size
    assert torch.equal(dense(ours, num_keys), theirs.materialize((shape[0], num_keys)) == 0)


@pytest.mark.parametrize("seed", range(40))
def test_operators_of_the_stand_in_refuse_what_those_of_xformers_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("xformers.ops.fmha")
    from xformers.ops.fmha import common, cutlass, dispatch, flash, triton_splitk

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(cutlass, "_minimum_gemm_alignment", lambda d: 8 if d.query.itemsize == 2 else 4)
    rng = random.Random(seed)
    query_lens = [1] * rng.choice([1, 8, 40]) if rng.random() < 0.6 else [3, 1, 17]
    key_lens = [n + rng.randint(0, 100) for n in query_lens]
    groups, heads, head_size = rng.choice([1, 2]), rng.choice([1, 4]), rng.choice([12, 16, 80, 128, 512])
    dtype, page_size = rng.choice(DTYPES), rng.choice([16, 64])
    if is_paged := rng.random() < 0.5:
        tables = torch.arange(len(query_lens) * 8).view(-1, 8).int()
        arguments: tuple[Any, ...] = (query_lens, key_lens, tables, page_size)
        num_keys = tables.numel() * page_size + rng.choice([0, 0, 1])
    else:
        arguments, num_keys = (query_lens, key_lens), sum(key_lens)
    name = fake_xformers.PAGED.__name__ if is_paged else "BlockDiagonalCausalFromBottomRightMask"
    ours, theirs = (
        getattr(module, name).from_seqlens(*arguments, device=CPU) for module in (fake_xformers, real.attn_bias)
    )
    q = torch.zeros(1, sum(query_lens), groups, heads, head_size, dtype=dtype)
    k = torch.zeros(1, num_keys, groups, 1, head_size, dtype=dtype).expand(-1, -1, -1, heads, -1)
    given = common.Inputs(q, k, k, attn_bias=theirs, scale=1.0)
    given.validate_inputs()
    fake_xformers.validate(q, k, k, ours)
    for operator, stand_in in (
        (triton_splitk.FwOp, fake_xformers.TritonSplitK),
        (flash.FwOp, fake_xformers.Flash),
        (cutlass.FwOp, fake_xformers.Cutlass),
    ):
        reasons = [
            reason
            for reason in operator.not_supported_reasons(given)
            if not any(word in reason for word in ("device=", "A100+", "wasn't built", "not available"))
        ]
        if is_paged and operator is flash.FwOp:
            continue  # torch's flash kernels, which a GPU would have here, know no pages
        assert bool(reasons) == stand_in.refuses(q, k, k, ours), (operator, reasons)
    listed = triton_splitk.FwOp in dispatch._dispatch_fw_priority_list(given, needs_gradient=False)
    assert listed == (fake_xformers.TritonSplitK in fake_xformers.dispatched(q, k))
