"""The Triton attention kernels, interpreted on the CPU. What they share with the operator is in `test_attention`."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import reference
from tests.ops.checks import CPU
from tests.ops.compile_cases import DEVICES
from tests.ops.table import AttentionShape, attention_args, attention_options, small_attention_samples
from tests.ops.tolerances import TORCH_HALF_ATTENTION

pytest.importorskip("triton")

from omniserve.ops.kernels import attention
from omniserve.ops.kernels.attention import paged_attention
from omniserve.ops.kernels.attention_launch import NARROW, WIDE, Device, Tile, choose_launch, shared_bytes, tuning_for

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted")

SMALL = Device(multiprocessors=2)
"""Few parts: the interpreter runs programs one after another."""
H200 = DEVICES[90]


def attend(args: tuple[Any, ...], **options: Any) -> Tensor:
    return paged_attention(*args[:6], **attention_options(args) | {"device": SMALL} | options)


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
    samples = list(enumerate(small_attention_samples(CPU, dtype)))
    for index, sample in samples[:: 1 if dtype == torch.float32 else 3]:
        check(sample.args, sample.label, num_splits=1 + index % 2)


@interpreted
@pytest.mark.parametrize(
    ("num_splits", "window", "softcap", "directed", "has_kinds"),
    [(2, 0, 0.0, False, False), (4, 40, 3.0, True, False), (4, 0, 0.0, True, True)],
)
def test_parts_of_the_keys_add_up(
    num_splits: int, window: int, softcap: float, directed: bool, has_kinds: bool
) -> None:
    shape = AttentionShape(
        label="", chunks=((1, 199), (3, 90), (1, 0), (0, 5), (1, 17)), heads=(6, 2, 16), block_size=16,
        window=window, softcap=softcap, directed=directed,
        chunk=70 * has_kinds, sinks=has_kinds, alibi=has_kinds,
    )  # fmt: skip
    check(attention_args(shape, CPU, torch.float32), "parts", num_splits=num_splits)


@interpreted
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("block_m", [16, 64])
def test_any_tile_agrees_with_the_reference(block_m: int, block_n: int) -> None:
    tuning = replace(NARROW, fp32_tiles=(Tile(block_m=block_m, num_warps=4, num_stages=2),), max_block_n=block_n)
    shape = AttentionShape(label="", chunks=((1, 150), (20, 85)), heads=(7, 1, 40), block_size=64, window=77)
    check(attention_args(shape, CPU, torch.float32), "tile", tuning=tuning)


@interpreted
def test_a_tile_writes_no_row_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(label="", chunks=((12, 20),), heads=(3, 1, 16), block_size=16)
    args = attention_args(shape, CPU, torch.float32)
    whole = attend(args, num_splits=1)
    choose = attention.choose_launch
    monkeypatch.setattr(attention, "choose_launch", lambda **shapes: replace(choose(**shapes), grid=(1, 1, 1)))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full(tensor.shape, torch.nan))
    tuning = replace(NARROW, fp32_tiles=NARROW.fp32_tiles[:1])  # 16 rows: 5 queries of 3 heads, and one row left
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
    "device": H200,
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
    tuning = replace(NARROW, programs_per_multiprocessor=1, max_split_keys=64, max_skew_splits=4, max_block_n=16)
    out = attend(args, one_query_each=True, tuning=tuning, device=Device(multiprocessors=1))
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
    tuning = replace(WIDE, tiles=WIDE.tiles[:1])
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
        (
            lambda *args: (*args, None, 0, torch.zeros(3)),
            r"sinks_N is torch.float32 \(3,\); expected float32, 4 entries",
        ),
        (lambda *args: (*args, None, 0, None, torch.zeros(4).half()), "alibi_slopes_N is torch.float16"),
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


@interpreted
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("bad", [-1, 99])
def test_a_block_id_outside_of_the_cache_fails_an_assertion(bad: int, block_size: int) -> None:
    shape = AttentionShape(label="", chunks=((1, 99), (3, 150)), heads=(4, 2, 16), block_size=block_size)
    args = attention_args(shape, CPU, torch.float32)
    attend(args)
    args[3][1, 1] = bad
    with pytest.raises(Exception, match="block_table is out of range"):
        attend(args)


SUPPORTED = list(product((2, 4), (8, 16, 64, 80, 96, 128, 256), (1, 4, 7, 8, 16), (1, 9, 2048), (16, 64, 128)))
"""(bytes of an element, H, G, query tokens of each request, S)."""


@pytest.mark.parametrize("device", [*DEVICES.values(), Device()], ids=[*(f"sm_{c}" for c in DEVICES), "unknown"])
def test_no_launch_takes_more_shared_memory_than_the_device_has(device: Device) -> None:
    for itemsize, head_size, group, tokens, block_size in SUPPORTED:
        shape = f"{itemsize} bytes, H {head_size}, G {group}, {tokens} tokens, S {block_size}"
        launch = choose_launch(
            num_tokens=4 * tokens, num_requests=4, num_heads=2 * group, kv_heads=2, head_size=head_size,
            block_size=block_size, table_width=128, itemsize=itemsize, one_query_each=tokens == 1, device=device,
        )  # fmt: skip
        padded_head = max(16, 1 << (head_size - 1).bit_length())
        taken = shared_bytes(launch.tile, launch.block_n, padded_head, itemsize, device)
        assert taken <= device.shared_bytes, shape
        assert launch.tile.block_m >= group and launch.block_n >= 16, shape
        if launch.tile.block_m == 16 and itemsize == 2:
            together = tuning_for(device).programs_per_multiprocessor
            assert together * taken <= device.shared_bytes, f"{shape}: {together} programs do not fit"


def test_an_unknown_device_has_the_least_of_all() -> None:
    assert attention.describe(CPU) == Device()
    assert Device().shared_bytes == min(device.shared_bytes for device in DEVICES.values())
    assert not Device().has_wide_tensor_cores


@pytest.mark.parametrize(
    ("capability", "is_wide"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_a_device_is_described_by_its_properties(
    capability: tuple[int, int], is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(
        shared_memory_per_block_optin=7777, multi_processor_count=11, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    got = attention.describe.__wrapped__(torch.device("cuda", 1))
    assert got == Device(shared_bytes=7777, multiprocessors=11, has_wide_tensor_cores=is_wide)


@pytest.mark.gpu
def test_a_device_says_how_much_shared_memory_a_program_may_take() -> None:
    assert attention.describe(torch.device("cuda", 0)).shared_bytes >= 99 << 10
