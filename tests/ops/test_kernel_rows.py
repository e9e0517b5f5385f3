"""The kernels that move rows agree with the references; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.ops import cuda
from omniserve.ops.kernels import mailbox as post
from omniserve.ops.kernels import rows
from tests.ops import reference
from tests.ops.checks import CPU, DTYPES, assert_same, check_against_reference, op_named
from tests.ops.table import OPS
from tests.ops.tolerances import EXACT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel(name: str) -> Callable[..., Any]:
    """Return what launches the kernel of a name."""
    launch: Callable[..., Any] = getattr(post if hasattr(post, name) else rows, name)
    return launch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cuda.ROW_OPERATORS)
def test_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    for sample in OPS[name].samples(DEVICE, dtype):
        check_against_reference(kernel(name), name, sample, dtype)


class Rows:
    """Random tensors, most of them cut out of larger ones, with NaN around."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.dtype = DTYPES[seed % len(DTYPES)]

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.rng))

    def rows(self, num_rows: int, *shape: int) -> Tensor:
        """Return ``[num_rows, *shape]`` with a distance between rows, and between heads if there are any."""
        padding = [self.below(2) for _ in shape]
        padding[-1] += 8 * self.below(2)
        whole = torch.full((num_rows, *(n + p for n, p in zip(shape, padding, strict=True))), torch.nan)
        part = whole[tuple(slice(n) for n in (num_rows, *shape))]
        part.copy_(torch.randn(part.shape, generator=self.rng))
        return whole.to(DEVICE, self.dtype)[tuple(slice(n) for n in (num_rows, *shape))]

    def slots(self, num: int, among: int) -> Tensor:
        """Return different slots, some of them -1."""
        slots = torch.randperm(among, generator=self.rng)[:num]
        slots[torch.rand(num, generator=self.rng) < 0.3] = -1
        return slots.to(DEVICE)


def copy_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@pytest.mark.parametrize("seed", range(6))
def test_a_history_of_steps_leaves_what_the_references_leave(seed: int) -> None:
    draw = Rows(seed)
    num_slots, width = 7, 1 + draw.below(40) * (1 + 60 * draw.below(2))
    kv_heads, block_size, head_size = 1 + draw.below(3), 1 + draw.below(6), (1, 5, 16, 24, 80)[draw.below(5)]
    caches = torch.full((2, 4, kv_heads, block_size, head_size), torch.nan, dtype=draw.dtype, device=DEVICE)
    letters = draw.rows(num_slots, 3 * kv_heads * head_size)
    state = (*caches, draw.rows(num_slots, width), letters, torch.zeros(num_slots, dtype=torch.int64, device=DEVICE))
    wanted = tuple(copy_of(tensor) for tensor in state)
    for step in range(1, 7):
        number = torch.tensor([step], device=DEVICE)
        num_rows = draw.below(6)
        seats = draw.below(min(num_rows, num_slots) + 1)
        hidden, results, slots = draw.rows(num_rows, width), draw.rows(num_slots, width), draw.slots(seats, num_slots)
        k, v = draw.rows(num_rows, kv_heads, head_size), draw.rows(num_rows, kv_heads, head_size)
        mapping = draw.slots(num_rows, 4 * block_size) if num_rows <= 4 * block_size else None
        there = copy_of(hidden)
        for module, sender, (*cache, residuals, letters, flags), rows_TD in (
            (rows, post, state, hidden),
            (reference, reference, wanted, there),
        ):
            if mapping is not None:
                module.store_kv(k, v, *cache, mapping)
            sender.piggyback_send(rows_TD, v, k, v, slots, residuals, letters, flags, number)
            module.residual_fetch(residuals, slots.flip(0), rows_TD)
        got, expected = (module.piggyback_concat(hidden, results, slots) for module in (rows, reference))
        assert_same((got, hidden, *state), (expected, there, *wanted), "store_kv", draw.dtype)


@pytest.mark.parametrize("seed", range(6))
def test_gather_writes_the_rows_of_its_slots_and_no_other(seed: int) -> None:
    draw = Rows(seed)
    num_slots, width = 1 + draw.below(6), 1 + draw.below(50) * (1 + 60 * draw.below(2))
    source, destination = draw.rows(num_slots, width).cpu(), draw.rows(num_slots, width)
    if DEVICE.type == "cuda":
        source = source.pin_memory()
    slots = draw.slots(draw.below(num_slots + 1), num_slots)
    expected = copy_of(destination)
    for slot in slots.tolist():
        if slot >= 0:
            expected[slot] = source[slot].to(DEVICE)
    rows.gather_rows(source, slots, destination)
    assert_same((destination,), (expected,), "gather_rows", draw.dtype)


@pytest.mark.parametrize("seed", range(9))
def test_receive_lets_join_what_is_there_and_skips_the_rest(seed: int) -> None:
    draw = Rows(seed)
    num_slots, width = 1 + draw.below(70), 1 + draw.below(50) * (1 + 60 * draw.below(2))
    host, results = draw.rows(num_slots, width).cpu(), draw.rows(num_slots, width)
    slots = draw.slots(draw.below(num_slots + 1), num_slots)
    flags = torch.randint(1, 3, (num_slots,), generator=draw.rng) + 2**40
    wanted = torch.randint(0, 3, (len(slots),), generator=draw.rng)
    wanted = torch.where(wanted > 0, wanted + 2**40, 0).to(DEVICE)
    if draw.below(3) == 0 and len(slots):  # all are there
        wanted = torch.where(wanted > 0, flags.to(DEVICE)[slots], 0)
    wanted[torch.rand(len(slots), generator=draw.rng) < (0.0, 0.4)[draw.below(2)]] = -1
    as_one, step = torch.tensor([draw.below(2)], device=DEVICE), torch.tensor([2**40 + draw.below(9)], device=DEVICE)
    skips, joined = torch.full((num_slots,), 7), torch.full_like(slots, 5)
    expected = copy_of(results), copy_of(skips), copy_of(joined)
    reference.piggyback_receive(slots, wanted, as_one, step, flags, host, *expected)
    if DEVICE.type == "cuda":
        host, flags, skips = host.pin_memory(), flags.pin_memory(), skips.pin_memory()
    post.piggyback_receive(slots, wanted, as_one, step, flags, host, results, skips, joined)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert_same((results, skips, joined), expected, "piggyback_receive", draw.dtype)


def send_args(draw: Rows, num_slots: int, seats: int) -> tuple[Tensor, ...]:
    """Return piggyback_send's arguments, q, k and v cut from one tensor."""
    num_heads, kv_heads, head_size = 1 + draw.below(5), 1 + draw.below(2), (1, 5, 16, 24)[draw.below(4)]
    width, num_rows = 1 + draw.below(100), seats + draw.below(3)
    qkv = draw.rows(num_rows, num_heads + 2 * kv_heads, head_size).split([num_heads, kv_heads, kv_heads], 1)
    letters = torch.full((num_slots, (num_heads + 2 * kv_heads) * head_size + 3), torch.nan, dtype=draw.dtype)
    flags = torch.full((num_slots,), 7)
    if DEVICE.type == "cuda":
        letters, flags = letters.pin_memory(), flags.pin_memory()
    step = torch.tensor([2**40 + draw.below(99)], device=DEVICE)
    hidden, residuals, slots = draw.rows(num_rows, width), draw.rows(num_slots, width), draw.slots(seats, num_slots)
    return (
        hidden,
        *qkv,
        slots,
        residuals,
        letters[:, :-3] if draw.below(2) else letters[:, :-3].contiguous(),
        flags,
        step,
    )


@pytest.mark.parametrize("seed", range(6))
def test_send_leaves_residual_letter_and_flag_of_each_seat(seed: int) -> None:
    draw = Rows(seed)
    num_slots = 1 + draw.below(6)
    args = send_args(draw, num_slots, draw.below(num_slots + 1))
    hidden, q, k, v, slots, residuals, mailbox, flags, step = args
    expected = copy_of(residuals), copy_of(mailbox), copy_of(flags)
    for seat, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = len(hidden) - len(slots) + seat
            expected[0][slot] = hidden[row]
            expected[1][slot] = torch.cat([part[row].flatten() for part in (q, k, v)])
            expected[2][slot] = step[0]
    post.piggyback_send(*args)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert_same((residuals, mailbox, flags), expected, "piggyback_send", draw.dtype)


def good(name: str) -> list[Any]:
    """Return arguments that are right."""
    kv, index = torch.zeros(3, 2, 8), torch.tensor([0, -1, 5])
    store, seats = torch.zeros(6, 4), torch.tensor([2, -1])
    return {
        "store_kv": [kv, kv, torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8), index],
        "piggyback_concat": [torch.zeros(3, 4), store, seats],
        "residual_fetch": [store, seats, torch.zeros(3, 4)],
        "gather_rows": [torch.zeros(6, 4), seats, store],
        "piggyback_receive": [
            seats, seats, torch.tensor([0]), torch.tensor([1]), torch.zeros(6).long(), torch.zeros(6, 4), store,
            torch.zeros(6).long(), seats.clone(),
        ],
        "piggyback_send": [
            torch.zeros(3, 4), kv, kv, kv, seats, store, torch.zeros(6, 48), torch.zeros(6).long(), torch.tensor([1]),
        ],
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("store_kv", 0, torch.zeros(3, 2, 16)[..., ::2], "k must be .* with contiguous rows"),
        ("store_kv", 1, torch.zeros(3, 1, 8), r"v must be .*\[3, 2, 8\], .* got torch.float32 \[3, 1, 8\]"),
        ("store_kv", 1, torch.zeros(3, 2, 8).half(), "v must be torch.float32 .* got torch.float16"),
        ("store_kv", 2, torch.zeros(2, 4, 2, 8).transpose(1, 2), "k_cache must be .* contiguous; got"),
        ("store_kv", 4, torch.tensor([0]), r"slot_mapping must be torch.int64 of shape \[3\]"),
        ("piggyback_concat", 1, torch.zeros(6, 5), r"results must be .*\[6, 4\]"),
        ("piggyback_concat", 2, torch.tensor([0], dtype=torch.int32), "rows must be torch.int64"),
        ("residual_fetch", 0, torch.zeros(6, 4).half(), "store must be torch.float32"),
        ("residual_fetch", 1, torch.zeros(4).long(), "there are 4 slots but only 3 rows of hidden"),
        ("gather_rows", 0, torch.zeros(5, 4), r"source must be .*\[6, 4\]"),
        ("piggyback_receive", 1, torch.tensor([0]), r"wanted must be torch.int64 of shape \[2\]"),
        ("piggyback_receive", 4, torch.zeros(5).long(), r"result_flags must be .*\[6\]"),
        ("piggyback_receive", 5, torch.zeros(6, 5), r"host_results must be .*\[6, 4\]"),
        ("piggyback_receive", 8, torch.zeros(2), "joined must be torch.int64"),
        ("piggyback_send", 1, torch.zeros(2, 2, 8), r"hidden must be .*\[2, 4\]"),
        ("piggyback_send", 6, torch.zeros(6, 40), r"mailbox must be .*\[6, 48\]"),
        ("piggyback_send", 7, torch.zeros(5).long(), r"flags must be .*\[6\]"),
        ("piggyback_send", 8, torch.zeros(1), "step must be torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, index: int, value: Tensor, message: str) -> None:
    args = good(name)
    kernel(name)(*args)
    args[index] = value
    with pytest.raises(ValueError, match=message):
        kernel(name)(*args)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device-side assertion ends the process's use of CUDA")
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("store_kv", 4, [0, -1, 8]),
        ("piggyback_concat", 2, [6]),
        ("residual_fetch", 1, [6]),
        ("gather_rows", 1, [6]),
        ("piggyback_receive", 0, [6, 0]),
        ("piggyback_send", 4, [6, 0]),
    ],
)
def test_an_index_out_of_range_fails_an_assertion(name: str, index: int, value: list[int]) -> None:
    args = good(name)
    args[index] = torch.tensor(value)
    with pytest.raises(Exception, match="out of range"):
        kernel(name)(*args)


def test_without_triton_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        cuda.kernels("rows")


def test_the_operators_that_are_named_have_a_cuda_form_and_others_have_none() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert {name for name in OPS if has_kernel(f"omniserve::{name}", "CUDA")} == set(cuda.OPERATORS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cuda.ROW_OPERATORS)
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    for dtype in DTYPES:
        for sample in OPS[name].samples(CPU, dtype):
            args = sample.clone()
            on_cuda = [arg.cuda() for arg in args]
            got, expected = op_named(name)(*on_cuda), op_named(name)(*args)
            pairs = list(zip(on_cuda, args, strict=True)) + ([(got, expected)] if expected is not None else [])
            for mine, wanted in pairs:
                torch.testing.assert_close(mine.cpu(), wanted, rtol=EXACT.rtol, atol=EXACT.atol, equal_nan=True)


@pytest.mark.gpu
def test_a_graph_replays_with_what_its_tensors_hold_by_then() -> None:
    store, hidden = torch.zeros(6, 4096, device="cuda"), torch.zeros(8, 4096, device="cuda")
    slots = torch.full((4,), -1, device="cuda")
    rows.residual_fetch(store, slots, hidden)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.residual_fetch(store, slots, hidden)
        joined = rows.piggyback_concat(hidden, store, slots)
    slots.copy_(torch.tensor([5, -1, 0, 2]))
    store.copy_(torch.arange(6.0, device="cuda")[:, None].expand(6, 4096))
    hidden.fill_(9)
    graph.replay()
    assert hidden[:, 7].tolist() == [9] * 4 + [5, 0, 0, 2]
    assert joined[:, 4095].tolist() == [*hidden[:, 7].tolist(), 5, 0, 0, 2]


@pytest.mark.gpu
def test_a_cpu_thread_that_sees_a_flag_sees_the_letter() -> None:
    num_slots, heads, head_size, steps = 64, (32, 8), 128, 300
    num_heads, kv_heads = heads
    mailbox = torch.zeros(num_slots, (num_heads + 2 * kv_heads) * head_size, dtype=torch.bfloat16).pin_memory()
    flags, read = torch.zeros(num_slots, dtype=torch.int64).pin_memory(), threading.Event()
    residuals = torch.zeros(num_slots, 4096, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(num_slots).cuda()
    torn: list[int] = []

    def watch() -> None:
        seen, letters = flags.numpy(), mailbox.view(torch.int16).numpy()
        for step in range(1, steps + 1):
            for slot in reversed(range(num_slots)):
                while seen[slot] != step:
                    pass
                if (letters[slot] != step).any():
                    torn.append(step)
            read.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    number = torch.zeros(1, dtype=torch.int64, device="cuda")
    letter = torch.zeros(num_slots, num_heads + 2 * kv_heads, head_size, dtype=torch.int16, device="cuda")
    hidden = torch.zeros(num_slots, 4096, dtype=torch.bfloat16, device="cuda")
    for step in range(1, steps + 1):
        number.fill_(step)
        qkv = letter.fill_(step).view(torch.bfloat16).split([num_heads, kv_heads, kv_heads], 1)
        post.piggyback_send(hidden, *qkv, slots, residuals, mailbox, flags, number)
        assert read.wait(60), f"step {step} has not come: {flags}"
        read.clear()
    thread.join(60)
    assert not thread.is_alive() and not torn
