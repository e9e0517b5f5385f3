"""DEVICE_ATTENTION: the choice by name, and that the choices agree."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import DEVICE_ATTENTION, DeviceAttention, is_graph_safe, resolve_attention
from omniserve.ops.attention.base import gather_keys, head_pages, per_head, why_not_xformers
from omniserve.ops.attention.flex import attend_flex
from omniserve.ops.attention.native import attend_cpu, attend_triton
from omniserve.ops.attention.sdpa import attend_sdpa
from omniserve.ops.attention.xformers import attend_xformers
from tests.ops.checks import CPU, DTYPES, attention_call
from tests.ops.table import OPS, AttentionShape, attention_args, small_attention_samples
from tests.ops.tolerances import TORCH_HALF_ATTENTION

CUDA = torch.device("cuda")


def test_auto_takes_the_operator_on_the_cpu_and_never_on_cuda() -> None:
    assert resolve_attention("auto", CPU) is attend_cpu
    found = [name for name in ("triton", "xformers") if importlib.util.find_spec(name)]
    assert resolve_attention("auto", CUDA) is DEVICE_ATTENTION.get([*found, "sdpa"][0])


def test_auto_goes_on_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "xformers" else None)
    assert resolve_attention("auto", CUDA) is attend_xformers
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert resolve_attention("auto", CUDA) is attend_sdpa


def test_triton_runs_on_the_cpu_only_if_it_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_attention("triton", CPU) is attend_triton
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="'triton' runs on cuda"):
        resolve_attention("triton", CPU)


@pytest.mark.parametrize(("name", "device"), [("cpu", CUDA), ("xformers", CPU)])
def test_a_name_on_the_wrong_device_is_an_error(name: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"{name!r} runs on"):
        resolve_attention(name, device)


def test_a_name_that_reads_in_one_direction_is_refused_where_blocks_run_in_two() -> None:
    with pytest.raises(ValueError, match="set attention='triton' or 'sdpa'"):
        resolve_attention("xformers", CUDA, is_directed=True)
    assert resolve_attention("cpu", CPU, is_directed=True) is attend_cpu
    assert resolve_attention("sdpa", CUDA, is_directed=True) is DEVICE_ATTENTION.get("sdpa")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (AttentionSpec(scale=1.0, softcap=5.0), "soft-capped attention"),
        (AttentionSpec(scale=1.0, sinks=(0.5, 1.0)), "attention sinks"),
        (AttentionSpec(scale=1.0, alibi_slopes=(0.5, 0.25)), "ALiBi"),
        (AttentionSpec(scale=1.0, chunk=9), "attention within chunks"),
    ],
)
def test_xformers_is_neither_chosen_nor_taken_for_what_it_does_not_have(
    kind: AttentionSpec, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (AttentionSpec(scale=1.0), kind)
    with pytest.raises(ValueError, match=f"xformers has no {name}.*give attention='triton' or 'sdpa'"):
        resolve_attention("xformers", CUDA, layers)
    assert resolve_attention("xformers", CUDA, layers[:1]) is attend_xformers
    monkeypatch.setattr("omniserve.ops.attention.base.per_head", lambda values, device: None)  # there is no device
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "xformers" else None)
    assert resolve_attention("auto", CUDA, layers) is attend_sdpa


def test_a_layers_values_are_on_the_device_before_the_first_call() -> None:
    per_head.cache_clear()
    spec = AttentionSpec(scale=1.0, sinks=(0.5, 1.0), alibi_slopes=(0.5, 0.25))
    resolve_attention("cpu", CPU, (spec, spec))
    before = per_head.cache_info()
    assert before.currsize == 2
    assert per_head(spec.sinks, CPU).tolist() == [0.5, 1.0] and per_head(spec.alibi_slopes, CPU).tolist() == [0.5, 0.25]
    assert per_head.cache_info().misses == before.misses


def test_kv_of_int8_is_for_the_cpu_and_its_own_kernel() -> None:
    assert resolve_attention("auto", CPU, kv_dtype="int8") is attend_cpu
    for name, device, remedy in (("sdpa", CPU, "or attention to 'cpu'"), ("auto", CUDA, "a device that is a CPU")):
        with pytest.raises(ValueError, match=f"cannot read KV of int8: set kv_dtype to 'auto'.*{remedy}"):
            resolve_attention(name, device, kv_dtype="int8")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="cpu, flex, latent, sdpa, triton, xformers"):
        resolve_attention("flash9", CPU)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa_agrees_with_the_operator(dtype: torch.dtype, on_host: bool) -> None:
    rtol, atol = TORCH_HALF_ATTENTION[dtype]
    for sample in OPS["paged_attention"].samples(CPU, dtype):
        call = attention_call(sample.args, on_host=on_host)
        out, expected = attend_sdpa(*call), attend_cpu(*call)
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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_agrees_with_the_operator(dtype: torch.dtype) -> None:
    rtol, atol = TORCH_HALF_ATTENTION[dtype]
    # FlexAttention traces each one anew: these have every kind of attention.
    samples = list(small_attention_samples(CPU, dtype))
    for index in (0, 2, 5, 8, 11, 12, 14, 16, 17, 20) if dtype == torch.float32 else (0, 5, 15, 20):
        sample = samples[index]
        q, k, v, *rest = sample.args
        # It multiplies what it must not see by 0; large instead of NaN, a mistake still shows.
        call = attention_call((q, k.nan_to_num(1e3), v.nan_to_num(1e3), *rest))
        out, expected = attend_flex(*call), attend_cpu(*call)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol, msg=lambda m, s=sample: s.label + m)


def padded_decodes(window: int, directed: bool, has_kinds: bool = False) -> tuple[Any, ...]:
    """Return arguments of five decodes, the second and the last of which are padding."""
    chunks = ((1, 30), (1, 5), (1, 0), (1, 70), (1, 9))
    shape = AttentionShape(
        label="", chunks=chunks, heads=(4, 2, 16), block_size=16, window=window, directed=directed,
        chunk=25 * has_kinds, sinks=has_kinds, alibi=has_kinds,
    )  # fmt: skip
    args = attention_args(shape, CPU, torch.float32)
    args[3][[1, 4]] = 0
    args[5][[1, 4]] = 0
    return args


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attend", [attend_cpu, attend_sdpa, attend_flex, attend_triton])
@pytest.mark.parametrize(("window", "directed", "has_kinds"), [(0, False, False), (20, True, False), (0, True, True)])
def test_padding_gives_zeros_beside_one_query_each(
    attend: DeviceAttention, window: int, directed: bool, has_kinds: bool
) -> None:
    if attend is attend_triton:
        pytest.importorskip("triton")
    q, k, v, table, starts, lens, *rest = padded_decodes(window, directed, has_kinds)
    if attend is attend_flex:
        k, v = k.nan_to_num(1e3), v.nan_to_num(1e3)
    q[[1, 4]] = torch.nan
    args = (q, k, v, table, starts, lens, *rest)
    out = attend(*attention_call(args, on_host=not is_graph_safe(attend), one_query_each=True))
    assert torch.equal(out[[1, 4]], torch.zeros(2, 4, 16))
    for request in (0, 2, 3):
        only = slice(request, request + 1)
        numbers, directions, kinds = rest[:3], [table[only] for table in rest[3:4]], rest[4:]
        args = (q[only], k, v, table[only], torch.tensor([0, 1]).int(), lens[only], *numbers, *directions, *kinds)
        alone = attend_cpu(*attention_call(args))
        torch.testing.assert_close(out[only], alone, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("attend", [attend_sdpa, attend_xformers])
def test_who_needs_lengths_on_the_host_does_not_read_them_back(attend: DeviceAttention) -> None:
    if attend is attend_xformers:
        pytest.importorskip("xformers")
    args = padded_decodes(0, False)
    with pytest.raises(ValueError, match=r"nothing may be read back from.*attention='triton'"):
        attend(*attention_call(args, one_query_each=True))


def test_graph_safe_are_those_that_follow_from_shapes() -> None:
    known = [DEVICE_ATTENTION.get(name) for name in DEVICE_ATTENTION.names()]
    assert [attend for attend in known if is_graph_safe(attend)] == [attend_flex, attend_triton]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "xformers", "triton", "flex"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_agrees_with_the_operator(name: str, dtype: torch.dtype) -> None:
    if name == "xformers":
        pytest.importorskip("xformers")
    attend = resolve_attention(name, CUDA)
    rtol, atol = TORCH_HALF_ATTENTION[dtype]
    for sample in OPS["paged_attention"].samples(CPU, dtype):
        q, k, v, *rest = sample.args
        is_directed, spec = len(sample.args) > 9, attention_call(sample.args)[-1]
        block_size, head_size = k.shape[2:]
        if name == "xformers" and (is_directed or why_not_xformers(spec)):
            continue
        if name == "flex":
            if block_size < 16 or block_size & (block_size - 1) or head_size < 16:
                continue
            k, v = k.nan_to_num(1e3), v.nan_to_num(1e3)
        args = (q, k, v, *rest)
        out = attend(*attention_call([arg.cuda() if isinstance(arg, Tensor) else arg for arg in args]))
        expected = attend_cpu(*attention_call(args))
        torch.testing.assert_close(out.cpu(), expected, rtol=rtol, atol=atol, msg=lambda m, s=sample: s.label + m)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flex"])
def test_a_graph_follows_lengths_blocks_and_padding(name: str) -> None:
    attend = resolve_attention(name, CUDA)
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = torch.randn(2, 40, 2, 16, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    q = torch.randn(6, 8, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    table = torch.zeros(6, 6, dtype=torch.int32, device="cuda")
    lens = torch.ones(6, dtype=torch.int32, device="cuda")
    starts = torch.arange(7, dtype=torch.int32, device="cuda")
    args = (q, k, v, table, starts, lens, 0.125, 0, 0.0)
    call = attention_call(args, one_query_each=True)
    with torch.inference_mode():
        for _ in range(2):
            attend(*call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(*call)
    for seed, new_lens in enumerate(((1, 96, 33, 0, 16, 17), (90, 0, 0, 0, 0, 0), (5, 6, 7, 8, 9, 10))):
        table.copy_(torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:36].view(6, 6))
        lens.copy_(torch.tensor(new_lens))
        graph.replay()
        live = lens.cpu() > 0
        on_cpu = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
        expected = attend_cpu(*attention_call(on_cpu, one_query_each=True))
        assert not out[~live.cuda()].any()
        torch.testing.assert_close(out.cpu(), expected, rtol=2**-6, atol=3e-2)
