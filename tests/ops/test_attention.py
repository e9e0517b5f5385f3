"""Properties of the attention operators beyond agreeing with a reference on samples."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops import reference
from tests.ops.checks import CPU, check_against_reference, op_named
from tests.ops.host_layout import pack_blocks, quantize_cache
from tests.ops.table import (
    AttentionShape,
    Sample,
    attention_args,
    attention_options,
    cpu_attention_args,
    int8_attention_args,
)
from tests.ops.tolerances import ATTENTION, TORCH_HALF_ATTENTION, Tolerance

paged_attention = op_named("paged_attention")
cpu_attention = op_named("cpu_attention")


class Implementation(NamedTuple):
    """Something that attends as the operator does."""

    attend: Callable[..., Tensor]
    """Takes the operator's arguments."""
    tolerances: dict[torch.dtype, Tolerance]
    max_examples: int
    """Drawn shapes; the interpreter is slow."""


def interpreted(num_splits: int) -> Callable[..., Tensor]:
    """Return Triton's kernel, in the interpreter, with so many parts of the keys; few tokens make for few programs."""

    def attend(*args: Any) -> Tensor:
        from omniserve.ops.kernels.attention import paged_attention as launch

        num_parts = num_splits if args[0].shape[:2].numel() < 200 else 1
        return launch(*args[:6], num_splits=num_parts, **attention_options(args))

    return attend


needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="the kernels are not interpreted",
)
# Triton's kernel rounds weights to half precision on the way.
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(Implementation(paged_attention, ATTENTION, 60), id="cpu"),
        pytest.param(Implementation(interpreted(1), TORCH_HALF_ATTENTION, 4), id="triton", marks=needs_interpreter),
        pytest.param(
            Implementation(interpreted(2), TORCH_HALF_ATTENTION, 4), id="triton, two parts", marks=needs_interpreter
        ),
    ],
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


shapes = st.builds(
    lambda chunks, kv_heads, group, head_size, block_size, window, softcap, strided, directed, kinds: AttentionShape(
        label="drawn",
        chunks=tuple(chunks),
        heads=(kv_heads * group, kv_heads, head_size),
        block_size=block_size,
        window=window,
        softcap=softcap,
        strided=strided,
        directed=directed,
        chunk=kinds[0],
        sinks=kinds[1],
        alibi=kinds[2],
    ),
    chunks=st.lists(st.tuples(st.sampled_from((0, 1, 1, 2, 7, 40)), st.integers(0, 200)), max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((*range(1, 10), 16, 20)),
    head_size=st.integers(1, 32).map(lambda n: 8 * n),
    block_size=st.sampled_from((1, 2, 8, 32, 73, 128)),
    window=st.sampled_from((0, 0, 1, 5, 64)),
    softcap=st.sampled_from((0.0, 0.0, 4.0)),
    strided=st.booleans(),
    directed=st.booleans(),
    kinds=st.tuples(st.sampled_from((0, 0, 1, 7, 64)), st.booleans(), st.booleans()),
)


@each_implementation
def test_any_shape_agrees_with_the_reference(implementation: Implementation) -> None:
    @settings(max_examples=implementation.max_examples, deadline=None, derandomize=True)
    @given(shape=shapes, dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    def check(shape: AttentionShape, dtype: torch.dtype) -> None:
        sample = Sample(label=shape.label, args=attention_args(shape, CPU, dtype))
        tolerance = implementation.tolerances[dtype]
        check_against_reference(implementation.attend, "paged_attention", sample, dtype, tolerance)

    check()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=shapes, dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
def test_any_shape_of_int8_agrees_with_the_reference(shape: AttentionShape, dtype: torch.dtype) -> None:
    sample = Sample(label=shape.label, args=int8_attention_args(shape, CPU, dtype))
    check_against_reference(paged_attention, "paged_attention", sample, dtype)


decode_shapes = st.builds(
    lambda shape, contexts: replace(shape, directed=False, chunks=tuple((1, context) for context in contexts)),
    shape=shapes,
    contexts=st.lists(st.integers(0, 700), max_size=4),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    shape=decode_shapes,
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    int8=st.booleans(),
    num_threads=st.integers(1, 2),
)
def test_any_decode_agrees_with_the_reference(
    shape: AttentionShape, dtype: torch.dtype, int8: bool, num_threads: int
) -> None:
    args = cpu_attention_args(shape, CPU, dtype, int8=int8, num_threads=num_threads)
    check_against_reference(cpu_attention, "cpu_attention", Sample(label=shape.label, args=args), dtype)


def test_nan_in_a_key_stays_with_its_request() -> None:
    shape = AttentionShape(label="", chunks=((1, 90), (1, 33)), heads=(8, 2, 64), block_size=16)
    q, pool, scales, table, *rest = cpu_attention_args(shape, CPU, torch.bfloat16)
    clean = cpu_attention(q, pool, scales, table, *rest)
    pool[table[0, 2], 1, 0, 5] = torch.nan
    out = cpu_attention(q, pool, scales, table, *rest)
    assert out[0, 4:].isnan().all()
    assert torch.equal(out[0, :4], clean[0, :4]) and torch.equal(out[1], clean[1])


def sequence(seq_len: int, dtype: torch.dtype, block_size: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, K cache, V cache and block table of one sequence, 4 query heads on 2 KV heads of size 24."""
    shape = AttentionShape(label="", chunks=((seq_len, 0),), heads=(4, 2, 24), block_size=block_size)
    return attention_args(shape, CPU, dtype)[:4]


SINKS, SLOPES = torch.tensor([2.0, -1.0, 0.5, 4.0]), torch.tensor([0.5, 0.0, 0.1, 0.02])
KINDS = {
    "plain": (),
    "sinks": (None, 0, SINKS, None),
    "ALiBi": (None, 0, None, SLOPES),
    "chunks": (None, 70, None, None),
}


def chunk(q: Tensor, k: Tensor, v: Tensor, table: Tensor, begin: int, end: int, window: int, *kinds: Any) -> Tensor:
    starts, lens = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
    return paged_attention(q[begin:end], k, v, table, starts, lens, 0.2, window, 0.0, *kinds)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunking_does_not_change_a_bit(dtype: torch.dtype, int8: bool, window: int, kinds: tuple[Any, ...]) -> None:
    q, k, v, table = sequence(300, dtype)
    if int8:
        k, v = quantize_cache(k), quantize_cache(v)
    whole = chunk(q, k, v, table, 0, 300, window, *kinds)
    cuts = [0, 2, 77, 140, 298, 300]
    parts = [chunk(q, k, v, table, a, b, window, *kinds) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_sink_that_outweighs_all_keys_leaves_nothing_of_their_values() -> None:
    q, k, v, table = sequence(90, torch.float32)
    for begin in (0, 89):  # a chunk, and a decode
        out = chunk(q, k, v, table, begin, 90, 0, None, 0, torch.tensor([80.0, -80.0, 80.0, 0.0]))
        plain = chunk(q, k, v, table, begin, 90, 0)
        assert out[:, [0, 2]].abs().max() < 1e-25
        torch.testing.assert_close(out[:, 1], plain[:, 1])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("window", [0, 700])
def test_number_of_threads_and_the_batch_do_not_change_a_bit(window: int) -> None:
    q, k, v, table = sequence(3000, torch.float32)
    lens = torch.tensor([3000, 5, 129, 2500, 1]).int()
    tables = table.repeat(5, 1)
    queries = q[lens.long() - 1]
    starts = torch.arange(6).int()
    batch = paged_attention(queries, k, v, tables, starts, lens, 0.2, window, 0.0)
    pool = pack_blocks(k, v)
    assert torch.equal(cpu_attention(queries, pool, None, tables, lens, 0.2, window, 0.0, 1), batch)
    assert torch.equal(cpu_attention(queries, pool, None, tables, lens, 0.2, window, 0.0, 2), batch)
    for i in range(5):
        alone = cpu_attention(queries[i : i + 1], pool, None, table, lens[i : i + 1], 0.2, window, 0.0, 1)
        assert torch.equal(alone[0], batch[i])


def test_block_placement_does_not_change_a_bit() -> None:
    q, k, v, table = sequence(200, torch.float32)
    order = torch.randperm(k.shape[0], generator=torch.Generator().manual_seed(1))
    moved = order.argsort()[table.long()].int()
    here, there = (
        chunk(q, *kv, 0, 200, 0) for kv in ((k, v, table), (k[order].contiguous(), v[order].contiguous(), moved))
    )
    assert torch.equal(here, there)


@each_implementation
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_huge_scores_do_not_overflow(implementation: Implementation, sign: float) -> None:
    q, k, v, table = sequence(100, torch.float32)
    starts, lens = torch.tensor([0, 100]).int(), torch.tensor([100]).int()
    args = (q * 3e3 * sign, k, v, table, starts, lens, 1.0, 0, 0.0)
    # Scores of 1e4 are apart by more than exp's range, but near ties differ by fp32's rounding of a score, 1e-3.
    torch.testing.assert_close(implementation.attend(*args), reference.paged_attention(*args), rtol=0, atol=2e-2)


def test_huge_scores_do_not_overflow_in_a_decode() -> None:
    q, k, v, table = sequence(100, torch.float32)
    lens = torch.tensor([100]).int()
    args = (q * 3e3, k, v, table, torch.tensor([0, 100]).int(), lens, 1.0, 0, 0.0)
    one = cpu_attention(args[0][-1:], pack_blocks(k, v), None, table, lens, 1.0, 0, 0.0, 1)
    torch.testing.assert_close(one, reference.paged_attention(*args)[-1:], rtol=0, atol=2e-2)


@each_implementation
def test_nan_in_a_query_stays_with_that_query(implementation: Implementation) -> None:
    q, k, v, table = sequence(45, torch.float32)
    rest = (k, v, table, torch.tensor([0, 45]).int(), torch.tensor([45]).int(), 0.2, 0, 0.0)
    clean = implementation.attend(q, *rest)
    q = q.clone()
    q[33, 1] = torch.nan
    out = implementation.attend(q, *rest)
    assert out[33, 1].isnan().all()
    out[33, 1] = clean[33, 1]
    assert torch.equal(out, clean)


def test_nan_in_a_query_of_one_token_is_in_its_result() -> None:
    q, k, v, table = sequence(70, torch.float32)
    q[33, 1] = torch.nan
    assert chunk(q, k, v, table, 33, 34, 0)[0, 1].isnan().all()
