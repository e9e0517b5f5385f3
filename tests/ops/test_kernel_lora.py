"""The kernels of add_lora agree with its reference, whatever the tiles; without a GPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

from omniserve.ops.kernels import lora
from omniserve.ops.kernels.lora import Launch, add_lora, choose_launch
from tests.ops import reference
from tests.ops.checks import DTYPES, assert_same, op_named
from tests.ops.table import dense_lora_args

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MANY = (3, 0, 1, 2, 1, 9, 3, 0, 2, 2, 2, -1, 1)
SHAPES: tuple[tuple[str, tuple[int, ...], int, int, int], ...] = (
    ("no row", (), 32, 8, 8),
    ("no output feature", (1, 2), 32, 0, 8),
    ("no input", (1, 2), 0, 40, 8),
    ("no rank", (1, 2), 32, 40, 0),
    ("no row with an adapter", (0, 0), 40, 50, 8),
    ("slots that are none", (-1, 4, 2**31 - 1, -(2**31), 3), 40, 50, 8),
    ("odd sizes", MANY[:7], 45, 71, 24),
    ("odd rank, one of everything", (1, 2), 1, 1, 5),
    ("several tiles of the rank", (3, 1), 40, 130, 70),
    ("several pieces of the inputs", (1, 3), 1601, 40, 16),
)


def bits(tensor: Tensor) -> Tensor:
    """Return the bits: NaNs count, and so does the sign of zero."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def has_none(slots_T: Tensor) -> Tensor:
    return (slots_T < 1) | (slots_T > 3)


def check(args: tuple[Tensor, ...]) -> Tensor:
    """Compare with the reference; rows without an adapter to the bit."""
    result = add_lora(*args)
    y, slots_T = args[0], args[2]
    assert_same((result,), (reference.add_dense_lora(*args),), "add_lora", y.dtype)
    assert result.is_contiguous() and result.shape == y.shape
    none_T = has_none(slots_T)
    by_row = (tensor.reshape(len(slots_T), y.shape[-1])[none_T] for tensor in (result, y))
    assert torch.equal(*map(bits, by_row))
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("slots", "num_in", "num_out", "rank"), [pytest.param(*rest, id=label) for label, *rest in SHAPES]
)
def test_agrees_with_the_reference(
    slots: tuple[int, ...], num_in: int, num_out: int, rank: int, dtype: torch.dtype
) -> None:
    check(dense_lora_args(slots, num_in, num_out, rank, DEVICE, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_products_are_rounded(dtype: torch.dtype) -> None:
    little = torch.finfo(dtype).eps / 2  # 1 + little is 1
    x, a = torch.tensor([[1.0, little]]), torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    slots_T, one = torch.tensor([1], dtype=torch.int32), torch.ones(1)
    for y, b in ((0.0, [1.0, -1.0]), (-1.0, [1.0, little])):
        args = torch.tensor([[y]]).to(dtype), x.to(dtype), slots_T, a.to(dtype), torch.tensor([[b]]).to(dtype), one
        assert add_lora(*(arg.to(DEVICE) for arg in args)).tolist() == [[0.0]]


def test_no_adapter_is_a_copy() -> None:
    y, x, slots_T, a, b, scales = dense_lora_args((1, 0), 40, 30, 8, DEVICE, torch.float32)
    result = add_lora(y, x, slots_T, a[:0], b[:0], scales[:0])
    assert torch.equal(result, y) and result.data_ptr() != y.data_ptr()


def test_rows_of_rows_and_rows_that_lie_apart() -> None:
    y, x, *others = dense_lora_args((1, 0, 2, 3), 40, 30, 8, DEVICE, torch.float32)
    expected = check((y, x, *others))
    wide_y, wide_x = (torch.cat([rows, torch.full_like(rows, torch.nan)], 1) for rows in (y, x))
    for apart_y, apart_x in (
        (y.view(4, 1, 30), x.view(2, 2, 40)),
        (y.view(2, 2, 30).transpose(0, 1).contiguous().transpose(0, 1), x.view(2, 2, 40)),
        (y.T.contiguous().T, x.T.contiguous().T),
        (wide_y[:, :30], wide_x[:, :40]),
    ):
        assert torch.equal(add_lora(apart_y, apart_x, *others), expected.view(apart_y.shape))
    once = add_lora(y[:1].expand(4, 30), x[:1].expand(4, 40), *others)
    assert torch.equal(once, add_lora(y[:1].repeat(4, 1), x[:1].repeat(4, 1), *others))
    alone = add_lora(y[2], x[2], others[0][2:3], *others[1:])
    assert torch.equal(alone, expected[2])


LAUNCHES: tuple[dict[str, Any], ...] = (
    {"rows": 1, "is_split": True, "lanes": 1},
    {"rows": 4, "is_split": True, "lanes": 3},
    {"rows": 2, "is_split": False, "lanes": 2},
    {"rows": 32, "block_rows": 32, "is_split": False, "lanes": 1, "block_out": 128},
)


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter add products one after another, as a GPU does; BLAS has another order for other shapes."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[k].astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    if DEVICE.type == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_launch_gives_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, dots_in_order: None
) -> None:
    args = dense_lora_args((3, 0, 1, 2, 1, 9, 2, 2), 1100, 130, 24, DEVICE, dtype)
    results = []
    for options in LAUNCHES:

        def choose(*sizes: int, options: dict[str, Any] = options) -> Launch:
            return replace(choose_launch(*sizes), **options)

        monkeypatch.setattr(lora, "choose_launch", choose)
        results.append(check(args))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_row_does_not_depend_on_the_rows_beside_it(dots_in_order: None) -> None:
    y, x, slots_T, *stacks = dense_lora_args(MANY * 3, 1030, 40, 24, DEVICE, torch.bfloat16)
    together = add_lora(y, x, slots_T, *stacks)
    for row in range(0, len(slots_T), 7):
        some = [row, 7, (row + 1) % len(slots_T)]
        for rows in (some[:1], some):
            assert torch.equal(add_lora(y[rows], x[rows], slots_T[rows], *stacks)[0], together[row])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy: that is what is tried
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_rows_nor_adapters_that_are_not_finite_reach_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*sizes: int) -> Launch:
        return replace(choose_launch(*sizes), rows=16)

    monkeypatch.setattr(lora, "choose_launch", choose)
    args = dense_lora_args(MANY, 45, 21, 8, DEVICE, dtype)
    y, x, slots_T, a, b, scales = args
    expected = add_lora(*args)
    a[1], b[1, ::3], scales[1] = torch.inf, torch.nan, torch.inf
    x[0], y[2] = torch.nan, -torch.inf
    x[has_none(slots_T)] = torch.nan
    y[1] = torch.nan
    result = add_lora(*args)
    others = slots_T != 2
    others[[0, 1, 2]] = False
    assert torch.equal(result[others], expected[others]) and torch.equal(bits(result[1]), bits(y[1]))
    assert result[0].isnan().all() and (result[2] == -torch.inf).all() and not result[slots_T == 2].isfinite().any()


def test_the_order_of_a_sum_does_not_depend_on_the_number_of_rows() -> None:
    for itemsize, num_in, rank in product((2, 4), (1, 31, 512, 1023, 1024, 4096, 14336, 28672), (1, 8, 24, 64, 256)):
        launches = [choose_launch(num_rows, num_in, rank, 5, itemsize) for num_rows in (1, 2, 33, 256, 257, 999, 9999)]
        orders = {(each.block_in, each.block_rank, each.piece, each.num_pieces) for each in launches}
        assert len(orders) == 1
        ((block_in, block_rank, piece, num_pieces),) = orders
        assert piece % block_in == 0 and (num_pieces - 1) * piece < num_in <= num_pieces * piece
        assert 16 <= block_rank and num_pieces <= 8
        for each in launches:
            assert each.rows <= each.block_rows < 64 and each.num_parts in (1, num_pieces) and each.lanes <= each.rows


def num_programs(num_rows: int, num_in: int = 4096, rank: int = 16) -> int:
    """Return how many programs of a first launch there are at least, with one adapter in each tile."""
    launch = choose_launch(num_rows, num_in, rank, 32, 2)
    return launch.num_parts * -(-num_rows // launch.rows) * -(-rank // launch.block_rank)


def test_decodes_have_programs_of_their_own_and_long_prompts_have_large_tiles() -> None:
    for num_rows in (1, 8, 32):
        assert choose_launch(num_rows, 4096, 16, 32, 2).rows == 1 and num_programs(num_rows) == 8 * num_rows
    assert num_programs(1, num_in=14336) == 8
    for num_rows in (64, 200, 512, 2048, 8192):
        assert 100 <= num_programs(num_rows) <= 300, num_rows
    assert choose_launch(8192, 4096, 16, 32, 2).block_rows == 32


def test_what_is_launched_follows_from_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **constants: Any) -> None:
                numbers = [arg.shape if isinstance(arg, Tensor) else arg for arg in args]
                launched.append((grid, numbers, constants))

            return launch

    for name in ("_shrink_kernel", "_expand_kernel"):
        monkeypatch.setattr(lora, name, Recorder())
    for slots in ((0,) * 300, (1,) * 300, (1, 2, 3) * 100):
        add_lora(*dense_lora_args(slots, 40, 70, 8, DEVICE, torch.float32))
    assert len(launched) == 6 and launched == launched[:2] * 3


ARGS: dict[str, Tensor] = {
    "y": torch.zeros(3, 5),
    "x": torch.zeros(3, 8),
    "slots": torch.tensor([0, 2, 1], dtype=torch.int32),
    "a": torch.zeros(2, 4, 8),
    "b": torch.zeros(2, 5, 4),
    "scales": torch.ones(2),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(3, 8).double(), "x is torch.float64; expected float32, bfloat16 or float16"),
        ("x", torch.zeros(2, 8), r"x must have 3 rows, as slots has; got \[2, 8\]"),
        ("x", torch.tensor(1.0), r"x, slots and a must be \[\*, O\], \[\*, I\], \[T\] and \[S, R, I\]"),
        ("y", torch.zeros(3, 5).half(), "y is torch.float16 and x torch.float32; expected one dtype"),
        ("y", torch.zeros(5), r"y must have 3 rows, as slots has; got \[5\]"),
        ("y", torch.zeros(3, 6), r"b must be torch.float32 of shape \[2, 6, 4\], contiguous"),
        ("slots", torch.tensor([0, 2, 1]), "slots must be torch.int32 .*; got torch.int64"),
        ("slots", torch.zeros(6, dtype=torch.int32)[::2], "slots must be .* contiguous"),
        ("slots", torch.zeros(1, 3, dtype=torch.int32), r"got \[3, 5\], \[3, 8\], \[1, 3\]"),
        ("a", torch.zeros(2, 4, 9), r"a must be .*\[2, 4, 8\]"),
        ("a", torch.zeros(2, 8, 4).mT, "a must be .* contiguous"),
        ("a", torch.zeros(2, 1, 8, 32), r"must be .*\[S, R, I\]; got .*\[2, 1, 8, 32\]"),
        ("b", torch.zeros(3, 5, 4), r"b must be .*\[2, 5, 4\]"),
        ("b", torch.zeros(2, 5, 4).bfloat16(), "b must be torch.float32 .* got torch.bfloat16"),
        ("scales", torch.ones(3), r"scales must be .*\[2\]"),
        ("scales", torch.ones(2).half(), "scales must be torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Tensor, message: str) -> None:
    add_lora(*(tensor.to(DEVICE) for tensor in ARGS.values()))
    with pytest.raises(ValueError, match=message):
        add_lora(*(tensor.to(DEVICE) for tensor in (ARGS | {name: value}).values()))


def drawn(num_rows: int, num_in: int, num_out: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return arguments on the GPU: decodes with any slots, and then a prompt of the first adapter."""
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randint(-1, 5, (num_rows,), generator=generator)
    slots[num_rows // 3 :] = 1
    return dense_lora_args(tuple(slots.tolist()), num_in, num_out, rank, torch.device("cuda"), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out", "rank"),
    [(1, 4096, 4096, 16), (32, 4095, 1023, 24), (200, 2048, 4096, 64), (700, 1000, 3000, 8), (5000, 1024, 1024, 256)],
)
def test_cuda_agrees_with_the_reference(
    num_rows: int, num_in: int, num_out: int, rank: int, dtype: torch.dtype
) -> None:
    args = drawn(num_rows, num_in, num_out, rank, dtype)
    result, expected = op_named("add_lora")(*args), reference.add_dense_lora(*(arg.cpu() for arg in args))
    assert_same((result.cpu(),), (expected,), "add_lora", dtype)
    none_T = has_none(args[2])
    assert torch.equal(bits(result[none_T]), bits(args[0][none_T]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_in", "num_out", "rank"), [(4096, 1024, 128), (2001, 999, 24)])
def test_cuda_gives_a_row_the_same_bits_beside_any_number_of_rows(
    num_in: int, num_out: int, rank: int, dtype: torch.dtype
) -> None:
    y, x, slots_T, *stacks = drawn(4500, num_in, num_out, rank, dtype)
    together = add_lora(y, x, slots_T, *stacks)
    for num_rows in (1, 3, 17, 64, 250, 257, 1100, 2300):
        for first in (0, 768, 2048):
            rows = slice(first, first + num_rows)
            some = add_lora(y[rows], x[rows], slots_T[rows], *stacks)
            assert torch.equal(some, together[rows]), f"{num_rows} rows from {first}"


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [4, 600])
def test_a_graph_replays_with_what_its_tensors_hold_by_then(num_rows: int) -> None:
    y, x, slots_T, *stacks = drawn(num_rows, 1024, 2048, 16, torch.bfloat16)
    of_all = slots_T.clone()
    slots_T.zero_()
    add_lora(y, x, slots_T, *stacks)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = add_lora(y, x, slots_T, *stacks)
    for slots in (of_all, of_all.flip(0), torch.zeros_like(of_all)):
        slots_T.copy_(slots)
        x.normal_()
        graph.replay()
        assert torch.equal(result, add_lora(y, x, slots_T, *stacks))
