"""Wrong arguments are errors that name the argument and its numbers, never a read or write out of bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from omniserve.core.spec import HEAD_SIZE_STEP, MAX_LATENT_SIZE
from tests.ops.checks import op_named


def good(name: str) -> list[Any]:
    """Return arguments that the operator takes: 2 requests, 3 tokens, 5 blocks of 4, 2 query heads on 1 of size 8."""
    cache = torch.zeros(5, 1, 4, 8)
    table, lens = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([7, 3]).int()
    return {
        "store_kv": [torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), cache, cache.clone(), torch.tensor([0, -1, 19])],
        "paged_attention": [
            torch.zeros(3, 2, 8), cache, cache, table, torch.tensor([0, 2, 3]).int(), lens, 1.0, 0, 0.0,
            None, 0, None, None,
        ],
        "cpu_attention": [
            torch.zeros(2, 2, 8), torch.zeros(5, 1, 2, 4, 8), None, table, lens, 1.0, 0, 0.0, 1, 0, None, None,
        ],
        "store_host_kv": [
            torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), torch.zeros(5, 1, 2, 4, 8), None, torch.tensor([0, -1, 19]),
        ],
        "piggyback_concat": [torch.zeros(3, 8), torch.zeros(4, 8), torch.tensor([3, -1])],
        "residual_store": [torch.zeros(3, 8), torch.zeros(4, 8), torch.tensor([3, -1])],
        "residual_fetch": [torch.zeros(4, 8), torch.tensor([3, -1]), torch.zeros(3, 8)],
        "piggyback_send": [
            torch.zeros(3, 8), torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), torch.tensor([3, -1]),
            torch.zeros(4, 8), torch.zeros(4, 32), torch.zeros(4, dtype=torch.int64), torch.tensor([1]),
        ],
        "pack_linear": [torch.zeros(5, 8), torch.zeros(1, 8, 32)],
        "packed_linear": [torch.zeros(3, 8), torch.zeros(1, 8, 32), torch.zeros(5), 5],
        "packed_heads": [torch.zeros(3, 2, 8), torch.zeros(2, 1, 8, 32), 5],
        "packed_rows": [torch.tensor([4, 0]), torch.zeros(1, 8, 32), 8, 5],
        "add_lora": [
            torch.zeros(3, 5), torch.zeros(3, 8), ints(0, 2, 1), torch.zeros(1, 8, 32), torch.zeros(2, 1, 16, 32),
            torch.ones(2),
        ],
        "quantized_linear": [torch.zeros(3, 40), octets(1, 2 * 576), torch.zeros(5), 5, 4, 0, 32, None],
        "int8_linear": [torch.zeros(3, 40), octets(1, 256 + 2048), torch.zeros(5), 5, torch.ones(1)],
        "quantized_rows": [torch.tensor([4, 0]), octets(1, 2 * 576), 40, 5, 4, 0, 32],
    }[name]  # fmt: skip


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def octets(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def misaligned(*shape: int) -> torch.Tensor:
    """Return zeros that begin one byte off."""
    size = 4 * math.prod(shape)
    return torch.frombuffer(bytearray(size + 1), dtype=torch.float32, offset=1, count=size // 4).view(shape)


CASES = [
    ("store_kv", 4, torch.tensor([0, 1, 20]), r"slot_mapping\[2\] is 20; it must be -1 or in \[0, 20\)"),
    ("store_kv", 4, torch.tensor([0, -2, 1]), r"slot_mapping\[1\] is -2"),
    ("store_kv", 4, torch.tensor([0, 1]), "slot_mapping has 2 entries for 3 tokens"),
    ("store_kv", 4, ints(0, 1, 2), "slot_mapping must be Long, got Int"),
    ("store_kv", 1, torch.zeros(3, 1, 16), r"v must be \[3, 1, 8\] to fit the cache, got \[3, 1, 16\]"),
    ("store_kv", 0, torch.zeros(3, 1, 8).half(), "k must be Float, got Half"),
    ("store_kv", 0, torch.zeros(3, 8), "k must have 3 dimensions"),
    ("store_kv", 0, torch.zeros(3, 1, 16)[..., ::2], "k must have contiguous heads"),
    ("store_kv", 3, torch.zeros(5, 1, 8, 8), "differ in shape"),
    ("store_kv", 2, torch.zeros(5, 1, 4, 16)[..., ::2], "k_cache must be contiguous"),
    ("paged_attention", 0, torch.zeros(3, 2, 16), "q must have the cache's head size 8"),
    ("paged_attention", 0, torch.zeros(3, 2, 8).double(), "q must be float32, bfloat16 or float16, got Double"),
    ("paged_attention", 3, ints([0, 5], [2, 3]), r"block_table\[0\] holds block 5 .* the cache has 5 blocks"),
    ("paged_attention", 3, ints([0, -1], [2, 3]), r"block_table\[0\] holds block -1"),
    ("paged_attention", 3, ints([0, 1]), "block_table has 1 rows for 2 requests"),
    ("paged_attention", 3, torch.tensor([[0, 1], [2, 3]]), "block_table must be Int, got Long"),
    ("paged_attention", 4, ints(0, 2), "query_start must have 3 entries for 2 requests, got 2"),
    ("paged_attention", 4, ints(0, 2, 4), "query_start must go from 0 to the 3 tokens of q, got 0 to 4"),
    ("paged_attention", 4, ints(1, 2, 3), "query_start must go from 0"),
    ("paged_attention", 4, ints(0, 4, 3), "query_start is no prefix sum"),
    ("paged_attention", 4, ints(0, -1, 3), "query_start is no prefix sum"),
    ("paged_attention", 5, ints(9, 3), r"seq_lens\[0\] is 9; .* it must be in \[2, 8\]"),
    ("paged_attention", 5, ints(1, 3), r"seq_lens\[0\] is 1;"),
    ("paged_attention", 5, ints(-5, 3), r"seq_lens\[0\] is -5;"),
    ("paged_attention", 7, -1, "window must be >= 0"),
    ("paged_attention", 8, -1.0, "softcap must be >= 0"),
    ("paged_attention", 10, -1, "chunk must be >= 0"),
    ("paged_attention", 11, torch.zeros(3), "sinks must have one entry for each of the 2 query heads, got 3"),
    ("paged_attention", 11, torch.tensor([0.0, torch.nan]), r"sinks\[1\] must be finite, got nan"),
    ("paged_attention", 12, torch.zeros(2).double(), "alibi_slopes must be Float, got Double"),
    ("cpu_attention", 0, torch.zeros(3, 2, 8), "seq_lens has 2 entries for 3 query tokens"),
    ("cpu_attention", 4, ints(0, 3), r"seq_lens\[0\] is 0; .* it must be in \[1, 8\]"),
    ("cpu_attention", 3, ints([0, 1], [7, 3]), r"block_table\[1\] holds block 7"),
    ("cpu_attention", 8, 0, "num_threads must be in"),
    ("cpu_attention", 9, -1, "chunk must be >= 0"),
    ("cpu_attention", 10, torch.zeros(4)[::2], "sinks must be contiguous"),
    ("cpu_attention", 11, torch.zeros(1), "alibi_slopes must have one entry for each of the 2 query heads, got 1"),
    ("cpu_attention", 0, torch.zeros(2, 2, 8).half(), "q must have the cache's dtype, got Half"),
    ("cpu_attention", 0, misaligned(2, 2, 8), "q must be aligned to its elements of 4 bytes"),
    ("cpu_attention", 1, misaligned(5, 1, 2, 4, 8), "pool must be aligned to its elements of 4 bytes"),
    ("cpu_attention", 1, torch.zeros(5, 1, 4, 8), "pool must have 5 dimensions"),
    ("cpu_attention", 1, torch.zeros(5, 1, 3, 4, 8), r"pool must be \[B, K, 2, S, H\]"),
    ("cpu_attention", 1, torch.zeros(5, 1, 2, 4, 8).to(torch.int8), "an int8 pool needs scales"),
    ("cpu_attention", 1, torch.zeros(5, 1, 2, 4, 16)[..., ::2], "pool must be contiguous"),
    ("cpu_attention", 2, torch.zeros(5, 1, 2, 4), "no other pool has any; the pool is Float"),
    ("cpu_attention", 3, ints([0, -1], [2, 3]), r"block_table\[0\] holds block -1"),
    ("store_host_kv", 4, torch.tensor([0, 1, 20]), r"slot_mapping\[2\] is 20; it must be -1 or in \[0, 20\)"),
    ("store_host_kv", 4, torch.tensor([0, 1]), "slot_mapping has 2 entries for 3 tokens"),
    ("store_host_kv", 0, torch.zeros(3, 1, 16), r"k must be \[3, 1, 8\]"),
    ("store_host_kv", 1, torch.zeros(3, 1, 8).half(), "v must have the pool's dtype"),
    ("piggyback_concat", 2, torch.tensor([4]), r"rows\[0\] is 4; it must be -1 or in \[0, 4\)"),
    ("piggyback_concat", 1, torch.zeros(4, 7), r"results must have attn's width 8, got \[4, 7\]"),
    ("piggyback_concat", 1, torch.zeros(4, 8).half(), "results must be Float, got Half"),
    ("piggyback_concat", 0, torch.zeros(3, 2, 4), "attn must have 2 dimensions"),
    ("residual_store", 2, torch.tensor([0, 4]), r"slots\[1\] is 4"),
    ("residual_store", 2, torch.tensor([0, 1, 2, 3]), "there are 4 slots but only 3 rows of hidden"),
    ("residual_store", 1, torch.zeros(4, 16)[:, ::2], "store must have contiguous rows"),
    ("residual_fetch", 1, torch.tensor([-2, 0]), r"slots\[0\] is -2"),
    ("residual_fetch", 0, torch.zeros(4, 9), "store must have hidden's width 8"),
    ("piggyback_send", 0, torch.zeros(3, 9), r"residuals must have hidden's width 9, got \[4, 8\]"),
    ("piggyback_send", 0, torch.zeros(4, 8), r"q must be \[4, 2, 8\], got \[3, 2, 8\]"),
    ("piggyback_send", 1, torch.zeros(3, 2, 8).half(), "q must be Float, got Half"),
    ("piggyback_send", 1, torch.zeros(3, 16), "q must have 3 dimensions"),
    ("piggyback_send", 1, torch.zeros(3, 3, 8), r"mailbox must be \[4, 40\], a row of q, k and v .*, got \[4, 32\]"),
    ("piggyback_send", 2, torch.zeros(3, 1, 16)[..., ::2], "k must have contiguous heads"),
    ("piggyback_send", 2, torch.zeros(3, 2, 8), r"v must be \[3, 2, 8\], got \[3, 1, 8\]"),
    ("piggyback_send", 3, torch.zeros(3, 1, 4), r"v must be \[3, 1, 8\], got \[3, 1, 4\]"),
    ("piggyback_send", 4, torch.tensor([0, 4]), r"slots\[1\] is 4; it must be -1 or in \[0, 4\)"),
    ("piggyback_send", 4, torch.tensor([-2]), r"slots\[0\] is -2"),
    ("piggyback_send", 4, torch.tensor([0, 1, 2, 3]), "there are 4 slots but only 3 rows of hidden"),
    ("piggyback_send", 4, ints(0), "slots must be Long, got Int"),
    ("piggyback_send", 5, torch.zeros(5, 8), r"mailbox must be \[5, 32\]"),
    ("piggyback_send", 6, torch.zeros(4, 64)[:, ::2], "mailbox must have contiguous rows"),
    ("piggyback_send", 6, torch.zeros(4, 32).half(), "mailbox must be Float, got Half"),
    ("piggyback_send", 7, torch.zeros(5, dtype=torch.int64), "flags must have residuals' 4 slots"),
    ("piggyback_send", 7, ints(0, 0, 0, 0), "flags must be Long, got Int"),
    ("piggyback_send", 7, torch.zeros(8, dtype=torch.int64)[::2], "flags must be contiguous"),
    ("piggyback_send", 8, torch.tensor([1, 2]), r"step must be \[1\], got \[2\]"),
    ("piggyback_send", 8, torch.tensor([1.0]), "step must be Long, got Float"),
    ("pack_linear", 0, torch.zeros(8), "weight must have 2 dimensions"),
    ("pack_linear", 0, torch.zeros(8, 5).T, "weight must be contiguous"),
    ("pack_linear", 0, torch.zeros(5, 8).half(), "packed must be Half, got Float"),
    ("pack_linear", 1, torch.zeros(2, 8, 32), r"packed must be \[1, 8, 32\] for 8 inputs and 5 outputs"),
    ("packed_linear", 0, torch.tensor(1.0), "x must have a last dimension"),
    ("packed_linear", 0, torch.zeros(3, 9), r"packed must be \[1, 9, 32\] for 9 inputs and 5 outputs"),
    ("packed_linear", 0, torch.zeros(3, 8).half(), "packed must be Half, got Float"),
    ("packed_linear", 0, torch.zeros(3, 8).long(), "x must be float32, bfloat16 or float16, got Long"),
    ("packed_linear", 1, torch.zeros(1, 32, 8).transpose(1, 2), "packed must be contiguous"),
    ("packed_linear", 1, torch.zeros(1, 4, 64).half(), r"packed must be \[1, 8, 32\]"),
    ("packed_linear", 2, torch.zeros(6), r"bias must have 5 elements, got \[6\]"),
    ("packed_linear", 2, torch.zeros(5).half(), "bias must be Float, got Half"),
    ("packed_linear", 3, 33, r"packed must be \[2, 8, 32\]"),
    ("packed_linear", 3, -1, "out_features must not be negative"),
    ("packed_heads", 0, torch.zeros(3, 8), "x must have 3 dimensions"),
    ("packed_heads", 0, torch.zeros(3, 4, 8), r"packed must be \[4, 1, 8, 32\] for 4 heads, 8 inputs and 5 outputs"),
    ("packed_heads", 0, torch.zeros(3, 2, 8).half(), "packed must be Half, got Float"),
    ("packed_heads", 1, torch.zeros(1, 8, 32), "packed must have 4 dimensions"),
    ("packed_heads", 1, torch.zeros(2, 1, 4, 64).half(), "packed must be Float"),
    ("packed_heads", 2, 33, r"packed must be \[2, 2, 8, 32\]"),
    ("packed_heads", 2, -1, "out_features must not be negative"),
    ("packed_rows", 0, torch.tensor([0, 5]), "ids must be from 0 to 4, got 5"),
    ("packed_rows", 0, torch.tensor([-1]), "ids must be from 0 to 4, got -1"),
    ("packed_rows", 0, ints(0), "ids must be Long, got Int"),
    ("packed_rows", 2, 9, r"packed must be \[1, 9, 32\]"),
    ("add_lora", 0, torch.zeros(4, 5), "x and y must have 3 rows, as slots has"),
    ("add_lora", 0, torch.zeros(3, 5).half(), "y must be Float, got Half"),
    ("add_lora", 0, torch.zeros(3, 33), r"b must be \[2, 2, 16, 32\] for 2 adapters and 33 outputs"),
    ("add_lora", 1, torch.tensor(1.0), "x and y must have a last dimension"),
    ("add_lora", 1, torch.zeros(3, 9), r"a must be \[1, 9, 32\] for 9 inputs and 2 adapters of rank 16"),
    ("add_lora", 2, torch.zeros(3), "slots must be Int, got Float"),
    ("add_lora", 2, ints(1, 0, 1, 0), "x and y must have 4 rows"),
    ("add_lora", 3, torch.zeros(2, 8, 32), r"a must be \[1, 8, 32\]"),
    ("add_lora", 3, torch.zeros(1, 8, 32).half(), "a must be Float, got Half"),
    ("add_lora", 4, torch.zeros(2, 16, 32), "b must have 4 dimensions"),
    ("add_lora", 4, torch.zeros(3, 1, 16, 32), "b must be"),
    ("add_lora", 4, torch.zeros(2, 1, 15, 32), "the rank must be even and at most 1024, got 15"),
    ("add_lora", 5, torch.ones(2).half(), "scales must be Float, got Half"),
    ("add_lora", 5, torch.ones(3), r"a must be \[2, 8, 32\]"),
    ("int8_linear", 0, torch.tensor(1.0), "x must have a last dimension"),
    ("int8_linear", 0, torch.zeros(3, 65), r"packed must be \[1, 4352\] for 65 inputs and 5 outputs"),
    ("int8_linear", 0, torch.zeros(3, 40).double(), "x must be float32, bfloat16 or float16, got Double"),
    ("int8_linear", 0, torch.zeros(1, 65537), "x must have at most 65536 inputs, got 65537"),
    ("int8_linear", 1, torch.zeros(1, 2304), "packed must be Byte, got Float"),
    ("int8_linear", 1, octets(2, 2304), r"packed must be \[1, 2304\] .*, got \[2, 2304\]"),
    ("int8_linear", 1, octets(1, 4608)[:, ::2], "packed must be contiguous"),
    ("int8_linear", 1, octets(2305)[1:].view(1, 2304), "packed must be aligned to 4 bytes"),
    ("int8_linear", 2, torch.zeros(6), r"bias must have 5 elements, got \[6\]"),
    ("int8_linear", 2, torch.zeros(5).half(), "bias must be Float, got Half"),
    ("int8_linear", 3, 33, r"packed must be \[2, 2304\]"),
    ("int8_linear", 3, -1, "out_features must not be negative"),
    ("int8_linear", 4, torch.ones(2), r"x_scale must be one number, or one for each row, got \[2\]"),
    ("int8_linear", 4, torch.ones(2, 2), r"x_scale must be one number, \[1\], or contiguous with one for each row"),
    ("int8_linear", 4, torch.ones(1).half(), "x_scale must be Float, got Half"),
    ("int8_linear", 4, torch.zeros(1), "x_scale must be positive and finite, got 0"),
    ("int8_linear", 4, torch.tensor([torch.inf]), "x_scale must be positive and finite, got inf"),
    ("quantized_linear", 0, torch.tensor(1.0), "x must have a last dimension"),
    ("quantized_linear", 0, torch.zeros(3, 65), r"packed must be \[1, 1728\] for 65 inputs and 5 outputs"),
    ("quantized_linear", 0, torch.zeros(3, 32), r"packed must be \[1, 576\] for 32 inputs"),
    ("quantized_linear", 0, torch.zeros(3, 40).double(), "x must be float32, bfloat16 or float16, got Double"),
    ("quantized_linear", 1, torch.zeros(1, 2 * 576), "packed must be Byte, got Float"),
    ("quantized_linear", 1, torch.zeros(1, 2 * 576).to(torch.int8), "packed must be Byte, got Char"),
    ("quantized_linear", 1, octets(2, 576), r"packed must be \[1, 1152\] .*, got \[2, 576\]"),
    ("quantized_linear", 1, octets(1, 2, 576), "packed must have 2 dimensions"),
    ("quantized_linear", 1, octets(1, 2 * 1152)[:, ::2], "packed must be contiguous"),
    ("quantized_linear", 1, octets(1153)[1:].view(1, 1152), "packed must be aligned to 4 bytes"),
    ("quantized_linear", 2, torch.zeros(6), r"bias must have 5 elements, got \[6\]"),
    ("quantized_linear", 2, torch.zeros(5).half(), "bias must be Float, got Half"),
    ("quantized_linear", 2, torch.zeros(10)[::2], "bias must be contiguous"),
    ("quantized_linear", 3, 33, r"packed must be \[2, 1152\]"),
    ("quantized_linear", 3, -1, "out_features must not be negative"),
    ("quantized_linear", 4, 3, "no weight of 3 bits with scales of the kind 0 and groups of 32"),
    ("quantized_linear", 4, 6, "no weight of 6 bits with scales of the kind 0 and groups of 32"),
    ("quantized_linear", 4, 5, r"packed must be \[1, 1408\]"),
    ("quantized_linear", 5, 4, r"packed must be \[1, 4736\]"),
    ("quantized_linear", 5, 5, "no weight of 4 bits with scales of the kind 5 and groups of 32"),
    ("quantized_linear", 5, -1, "no weight of 4 bits with scales of the kind -1"),
    ("quantized_linear", 5, 2**32, "no weight of 4 bits with scales of the kind 4294967296"),
    ("quantized_linear", 6, 0, "no weight of 4 bits .* and groups of 0"),
    ("quantized_linear", 6, -32, "no weight of 4 bits .* and groups of -32"),
    ("quantized_linear", 6, 2**59, "no weight of 4 bits .* and groups of 576460752303423488"),
    ("quantized_linear", 6, 20, "no weight of 4 bits .* and groups of 20"),
    ("quantized_linear", 6, 64, r"packed must be \[1, 1088\]"),
    ("quantized_linear", 7, torch.zeros(40), "order must be Int, got Float"),
    ("quantized_linear", 7, torch.zeros(40, dtype=torch.int64), "order must be Int, got Long"),
    ("quantized_linear", 7, ints(*range(39)), r"order must have 40 elements, got \[39\]"),
    ("quantized_linear", 7, ints(*range(80))[::2], "order must be contiguous"),
    ("quantized_linear", 7, ints(*range(1, 41)), "order must be of numbers from 0 to 39, got 40"),
    ("quantized_linear", 7, ints(-1, *range(39)), "order must be of numbers from 0 to 39, got -1"),
    ("quantized_rows", 0, torch.tensor([0, 5]), "ids must be from 0 to 4, got 5"),
    ("quantized_rows", 0, torch.tensor([-1]), "ids must be from 0 to 4, got -1"),
    ("quantized_rows", 0, ints(0), "ids must be Long, got Int"),
    ("quantized_rows", 0, torch.tensor([0, 1, 2])[::2], "ids must be contiguous"),
    ("quantized_rows", 1, torch.zeros(1, 2 * 576), "packed must be Byte, got Float"),
    ("quantized_rows", 1, octets(1153)[1:].view(1, 1152), "packed must be aligned to 4 bytes"),
    ("quantized_rows", 2, 65, r"packed must be \[1, 1728\]"),
    ("quantized_rows", 3, 33, r"packed must be \[2, 1152\]"),
    ("quantized_rows", 4, 7, "no weight of 7 bits"),
    ("quantized_rows", 5, 6, "scales of the kind 6"),
    ("quantized_rows", 6, 36, "groups of 36"),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_the_arguments_that_cases_spoil_are_fine(name: str) -> None:
    op_named(name)(*good(name))


@pytest.mark.parametrize(("name", "index", "value", "message"), CASES)
def test_raises(name: str, index: int, value: Any, message: str) -> None:
    args = good(name)
    args[index] = value
    with pytest.raises(RuntimeError, match=message):
        op_named(name)(*args)


@pytest.mark.parametrize("head_size", [4, 12, 584])
def test_an_unsupported_head_size_is_named(head_size: int) -> None:
    pool = torch.zeros(1, 1, 2, 4, head_size)
    args = (torch.zeros(1, 1, head_size), pool, None, ints([0]), ints(1), 1.0, 0, 0.0, 1)
    with pytest.raises(
        RuntimeError, match=rf"multiple of {HEAD_SIZE_STEP} in \[8, {MAX_LATENT_SIZE}\], got {head_size}"
    ):
        op_named("cpu_attention")(*args)


def test_heads_that_do_not_divide_are_named() -> None:
    pool = torch.zeros(1, 2, 2, 4, 8)
    with pytest.raises(RuntimeError, match="got 3 and 2"):
        op_named("cpu_attention")(torch.zeros(1, 3, 8), pool, None, ints([0]), ints(1), 1.0, 0, 0.0, 1)


def test_an_error_leaves_the_cache_untouched() -> None:
    args = good("store_kv")
    args[0] += 1
    args[4] = torch.tensor([0, 1, 99])
    with pytest.raises(RuntimeError):
        op_named("store_kv")(*args)
    assert not args[2].any()


@pytest.mark.parametrize(
    "form", [(5, 0, 40), (4, 4, 64), (5, 4, 16), (6, 5, 32), (8, 2, 32), (8, 4, 32), (5, 1, 32), (5, 3, 32)], ids=str
)
def test_there_are_no_other_forms_of_codes(form: tuple[int, int, int]) -> None:
    bits, scales, group = form
    message = f"no weight of {bits} bits with scales of the kind {scales} and groups of {group}"
    with pytest.raises(RuntimeError, match=message):
        op_named("quantized_linear")(torch.zeros(3, 0), octets(1, 0), None, 5, *form)
    with pytest.raises(RuntimeError, match=message):
        op_named("quantized_rows")(torch.tensor([0]), octets(1, 0), 0, 5, *form)
