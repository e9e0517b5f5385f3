"""The Triton attention kernels: interpreted on the CPU, and compiled (not run) for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omniserve.ops import OPS, reference
from omniserve.ops.table import AttentionShape, attention_args
from tests.ops.checks import CPU
from tests.ops.tolerances import TORCH_HALF_ATTENTION

pytest.importorskip("triton")

from omniserve.ops.kernels import attention
from omniserve.ops.kernels.attention import paged_attention
from omniserve.ops.kernels.attention_launch import HOPPER, Tile, choose_launch

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted")

SMALL = replace(HOPPER, target_programs=4)
"""Few parts: the interpreter runs programs one after another."""


def attend(args: tuple[Any, ...], **options: Any) -> Tensor:
    *tensors, scale, window, softcap = args[:9]
    reversed_RM = args[9] if len(args) > 9 else None
    return paged_attention(
        *tensors, scale=scale, window=window, softcap=softcap, reversed_RM=reversed_RM, **{"tuning": SMALL} | options
    )


def check(args: tuple[Any, ...], label: str, **options: Any) -> None:
    """Compare with the fp64 reference; poison must not leak."""
    out = attend(args, **options)
    rtol, atol = TORCH_HALF_ATTENTION[args[0].dtype]  # weights are rounded to half precision on the way
    torch.testing.assert_close(
        out, reference.paged_attention(*args), rtol=rtol, atol=atol, msg=lambda m: f"{label}, {options}: {m}"
    )


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype) -> None:
    samples = list(OPS["paged_attention"].samples(CPU, dtype))
    for sample in samples[:: 1 if dtype == torch.float32 else 3]:
        check(sample.args, sample.label, num_splits=2 if sample.args[0].shape[:2].numel() < 200 else 1)


@interpreted
@pytest.mark.parametrize("num_splits", [2, 4])
@pytest.mark.parametrize(("window", "softcap", "directed"), [(0, 0.0, False), (40, 3.0, True)])
def test_parts_of_the_keys_add_up(num_splits: int, window: int, softcap: float, directed: bool) -> None:
    shape = AttentionShape(
        label="", chunks=((1, 199), (3, 90), (1, 0), (0, 5), (1, 17)), heads=(6, 2, 16), block_size=16,
        window=window, softcap=softcap, directed=directed,
    )  # fmt: skip
    args = attention_args(shape, CPU, torch.float32)
    check(args, "parts", num_splits=num_splits)
    assert attend(args, num_splits=num_splits).isfinite().all()


@interpreted
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("block_m", [16, 64])
def test_any_tile_agrees_with_the_reference(block_m: int, block_n: int) -> None:
    tuning = replace(SMALL, tiles=(Tile(block_m=block_m, num_warps=4, num_stages=2),), max_block_n=block_n,
                     max_fp32_block_m=block_m)  # fmt: skip
    shape = AttentionShape(label="", chunks=((1, 200), (50, 70)), heads=(7, 1, 40), block_size=64, window=77)
    check(attention_args(shape, CPU, torch.float32), "tile", tuning=tuning)


shapes = st.builds(
    lambda chunks, kv_heads, group, head_size, block_size, window, softcap, strided, directed: AttentionShape(
        label="drawn",
        chunks=tuple(chunks),
        heads=(kv_heads * group, kv_heads, head_size),
        block_size=block_size,
        window=window,
        softcap=softcap,
        strided=strided,
        directed=directed,
    ),
    chunks=st.lists(st.tuples(st.sampled_from((0, 1, 1, 2, 20)), st.integers(0, 150)), max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 2, 3, 7, 16, 20)),
    head_size=st.sampled_from((8, 16, 24, 80)),
    block_size=st.sampled_from((1, 4, 16, 73, 128)),
    window=st.sampled_from((0, 0, 1, 5, 64)),
    softcap=st.sampled_from((0.0, 0.0, 4.0)),
    strided=st.booleans(),
    directed=st.booleans(),
)


@interpreted
@settings(max_examples=10, deadline=None, derandomize=True)
@given(shape=shapes, dtype=st.sampled_from((torch.float32, torch.bfloat16)), num_splits=st.sampled_from((1, 2)))
def test_any_shape_agrees_with_the_reference(shape: AttentionShape, dtype: torch.dtype, num_splits: int) -> None:
    args = attention_args(shape, CPU, dtype)
    check(args, str(shape), num_splits=num_splits if args[0].shape[:2].numel() < 200 else 1)


@interpreted
def test_a_tile_writes_no_row_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(label="", chunks=((12, 20),), heads=(3, 1, 16), block_size=16)
    args = attention_args(shape, CPU, torch.float32)
    whole = attend(args, num_splits=1)
    choose = attention.choose_launch
    monkeypatch.setattr(attention, "choose_launch", lambda **shapes: replace(choose(**shapes), grid=(1, 1, 1)))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full(tensor.shape, torch.nan))
    tuning = replace(SMALL, tiles=SMALL.tiles[:1])  # 16 rows: 5 queries of 3 heads, and one row left
    first = attend(args, num_splits=1, tuning=tuning)
    assert torch.equal(first[:5], whole[:5]) and first[5:].isnan().all()


@interpreted
@pytest.mark.parametrize("num_splits", [1, 4])
def test_one_query_each_never_reads_where_queries_begin(num_splits: int) -> None:
    shape = AttentionShape(label="", chunks=((1, 99), (1, 0), (1, 33)), heads=(4, 2, 16), block_size=16, window=50)
    q, k, v, table, starts, *rest = args = attention_args(shape, CPU, torch.float32)
    out = attend((q, k, v, table, starts.fill_(-99), *rest), one_query_each=True, num_splits=num_splits)
    args[4].copy_(torch.arange(4))
    torch.testing.assert_close(out, reference.paged_attention(*args), rtol=2e-6, atol=2e-5)


@interpreted
def test_nan_in_a_query_stays_with_that_query() -> None:
    shape = AttentionShape(label="", chunks=((9, 40),), heads=(4, 2, 16), block_size=16)
    args = attention_args(shape, CPU, torch.float32)
    for num_splits in (1, 2):
        clean = attend(args, num_splits=num_splits)
        q = args[0].clone()
        q[4, 1] = torch.nan
        out = attend((q, *args[1:]), num_splits=num_splits)
        assert out[4, 1].isnan().all()
        out[4, 1] = clean[4, 1]
        assert torch.equal(out, clean)


@interpreted
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_huge_scores_do_not_overflow(sign: float) -> None:
    shape = AttentionShape(label="", chunks=((20, 80),), heads=(4, 2, 16), block_size=16)
    q, *rest = attention_args(shape, CPU, torch.float32)
    args = (q * 3e3 * sign, *rest)
    # Near ties differ by fp32's rounding of a score, 1e-3.
    torch.testing.assert_close(attend(args, num_splits=2), reference.paged_attention(*args), rtol=0, atol=2e-2)


@interpreted
def test_what_is_launched_follows_from_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                launched[-1].append((grid, constants, [a.shape for a in args if isinstance(a, Tensor)]))
                self.kernel[grid](*args, **constants)

            return launch

    for name in ("_attend", "_combine"):
        monkeypatch.setattr(attention, name, Recorder(getattr(attention, name)))
    for lens in ((1, 0, 90), (90, 90, 90), (0, 0, 0)):
        shape = AttentionShape(label="", chunks=((1, 89),) * 3, heads=(4, 2, 16), block_size=16)
        args = attention_args(shape, CPU, torch.float32)
        args[5].copy_(torch.tensor(lens))
        for one_query_each in (True, False):
            launched.append([])
            attend(args, one_query_each=one_query_each, num_splits=2)
    assert launched[0::2] == [launched[0]] * 3 and launched[1::2] == [launched[1]] * 3
    assert [grid for grid, _, _ in launched[0]] == [(3, 2, 2), (12,)]


LLAMA_8B: dict[str, Any] = {
    "num_heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 64, "itemsize": 2, "one_query_each": True,
}  # fmt: skip


def test_few_decodes_are_split_until_the_device_is_full_and_many_are_not() -> None:
    def num_splits(requests: int, table_width: int = 128) -> int:
        shapes = LLAMA_8B | {"num_tokens": requests, "num_requests": requests, "table_width": table_width}
        return choose_launch(**shapes).num_splits

    assert [num_splits(n) for n in (1, 4, 16, 64, 256)] == [32, 8, 2, 1, 1]
    assert num_splits(1, table_width=4) == 4  # no more than there are tiles of keys
    assert num_splits(64, table_width=2048) == 8  # one of them may be long


def test_only_what_the_device_is_full_with_is_cut_however_short_it_is() -> None:
    def full_splits(requests: int, table_width: int) -> tuple[int, int]:
        shapes = LLAMA_8B | {"num_tokens": requests, "num_requests": requests, "table_width": table_width}
        launch = choose_launch(**shapes)
        return launch.full_splits, launch.num_splits

    assert [full_splits(n, 2048) for n in (1, 8, 16, 64, 256)] == [(32, 32), (4, 8), (2, 8), (1, 8), (1, 8)]
    assert full_splits(1, 4) == (4, 4)


@interpreted
def test_parts_that_stay_empty_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def empty(*args: Any, **settings: Any) -> Tensor:
        made.append(torch.full(*args, float("nan"), **settings))
        return made[-1]

    monkeypatch.setattr(attention.torch, "empty", empty)
    shape = AttentionShape(label="", chunks=((1, 15), (1, 99), (1, 299), (1, 0)), heads=(2, 1, 16), block_size=16)
    args = attention_args(shape, CPU, torch.float32)
    # One part of up to 64 keys, as the device is full: 4 parts only of what is longer than 4 * 64.
    tuning = replace(HOPPER, target_programs=1, max_split_keys=64, max_skew_splits=4, max_block_n=16)
    out = attend(args, one_query_each=True, tuning=tuning)
    partial, lse = made
    assert partial.shape == (4, 2, 4, 16)
    used = (lse != float("-inf"))[:, 0].tolist()
    assert used == [[True, False, False, False], [True, True, False, False], [True] * 4, [True, False, False, False]]
    assert partial[:, 0].isfinite().all(-1).tolist() == used, "nothing is written for an empty part"
    torch.testing.assert_close(out, reference.paged_attention(*args))


def test_chunks_take_larger_tiles_and_a_tile_of_keys_lies_in_one_block() -> None:
    shapes = LLAMA_8B | {"num_requests": 4, "table_width": 128, "one_query_each": False}
    rows = [choose_launch(num_tokens=n, **shapes).tile.block_m for n in (4, 40, 2048)]
    assert rows == [16, 64, 128]
    launch = choose_launch(num_tokens=2048, **shapes)
    assert launch.block_n == 64 and launch.grid == (2048 // 32 + 4, 8, 1)


def test_a_group_larger_than_any_tile_gets_one_of_its_own() -> None:
    tuning = replace(HOPPER, tiles=HOPPER.tiles[:1])
    shapes = LLAMA_8B | {"num_heads": 71, "kv_heads": 1, "num_tokens": 2, "num_requests": 2, "table_width": 8}
    assert choose_launch(**shapes, tuning=tuning).tile.block_m == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, *rest: (q.half(), k, v, *rest), "expected one dtype"),
        (lambda q, k, v, *rest: (q[:, :, :8], k, v, *rest), "do not fit a cache"),
        (lambda q, k, v, *rest: (q[:, :3], k, v, *rest), "do not fit a cache"),
        (lambda q, k, v, *rest: (q, k, v[:3], *rest), "K and V caches differ"),
        (lambda q, k, v, table, *rest: (q, k, v, table.long(), *rest), "block_table is torch.int64"),
        (lambda q, k, v, table, starts, *rest: (q, k, v, table, starts[:1], *rest), "query_start"),
        (lambda *args: (*args, torch.ones(1, 1, dtype=torch.bool)), "expected bool, as block_table"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: Any, message: str) -> None:
    shape = AttentionShape(label="", chunks=((1, 40),), heads=(4, 2, 16), block_size=16)
    with pytest.raises(ValueError, match=message):
        attend(change(*attention_args(shape, CPU, torch.float32)))


def test_one_query_each_with_more_queries_is_an_error() -> None:
    shape = AttentionShape(label="", chunks=((2, 40),), heads=(4, 2, 16), block_size=16)
    with pytest.raises(ValueError, match="2 query tokens for 1 requests"):
        attend(attention_args(shape, CPU, torch.float32), one_query_each=True)


@pytest.mark.skipif(sys.platform != "linux", reason="triton compiles on Linux")
def test_kernels_compile_for_hopper_and_fit_its_shared_memory() -> None:
    program = Path(__file__).with_name("compile_attention.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("async True" in line for line in lines)
    assert "wgmma True" in lines[1] and "spilled 0" in lines[0] and "spilled 0" in lines[1]
