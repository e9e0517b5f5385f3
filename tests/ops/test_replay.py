"""Replays: noted calls are made again in their order, on what their memory holds then."""

from __future__ import annotations

import math

import pytest
import torch

from omniserve.core.spec import AttentionSpec
from omniserve.layers.weights.quantized import QuantForm, QuantizedWeight, Scales, pack_quantized, packed_shape
from omniserve.ops.attention import AttentionMetadata
from omniserve.ops.replay import Replay
from tests.ops.reference import pack_int8


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def test_a_product_reads_what_its_rows_hold() -> None:
    weight, x, out = normal(5, 8), torch.zeros(3, 8), torch.empty(3, 5)
    packed = torch.empty(1, 8, 32)
    torch.ops.omniserve.pack_linear(weight, packed)
    replay = Replay()
    replay.add_linear(x, packed, normal(5), out)
    for values in (normal(3, 8), -normal(3, 8)):
        x.copy_(values)
        replay.run()
        assert torch.equal(out, torch.ops.omniserve.packed_linear(x, packed, normal(5), 5))


def test_a_product_in_int8_rounds_what_its_rows_hold() -> None:
    codes = torch.arange(-20, 20, dtype=torch.int8).view(5, 8)
    packed, x, out = pack_int8(codes, torch.full((5,), 0.01)), torch.zeros(3, 8), torch.empty(3, 5)
    replay = Replay()
    replay.add_int8_linear(x, packed, normal(5), None, out)
    for values in (normal(3, 8), -normal(3, 8)):
        x.copy_(values)
        replay.run()
        assert torch.equal(out, torch.ops.omniserve.int8_linear(x, packed, normal(5), 5))


def test_a_product_by_heads_reads_what_its_rows_hold() -> None:
    x, packed, out = torch.zeros(3, 2, 8), normal(2, 1, 8, 32), torch.empty(2, 3, 5)
    replay = Replay()
    replay.add_heads(x, packed, out)
    for values in (normal(3, 2, 8), -normal(3, 2, 8)):
        x.copy_(values)
        replay.run()
        assert torch.equal(out, torch.ops.omniserve.packed_heads(x, packed, 5))


def test_calls_keep_their_order() -> None:
    form = QuantForm(4, Scales.F16, 32)
    codes = torch.arange(5 * 64, dtype=torch.uint8).view(5, 64) % 16
    packed = torch.empty(packed_shape(form, 5, 64), dtype=torch.uint8)
    pack_quantized(QuantizedWeight(form, codes, (normal(5, 2).half(),)), packed)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    bias, x, between, out = normal(5), normal(3, 64), torch.empty(3, 5), torch.empty(3, 6)
    second = torch.empty(1, 5, 32)
    torch.ops.omniserve.pack_linear(normal(6, 5), second)
    replay = Replay()
    replay.add_quantized_linear(x, packed, bias, form.arguments, order, between)
    replay.add_linear(between, second, None, out)
    replay.run()
    first = torch.ops.omniserve.quantized_linear(x, packed, bias, 5, *form.arguments, order)
    assert torch.equal(between, first)
    assert torch.equal(out, torch.ops.omniserve.packed_linear(first, second, None, 6))


def test_attention_reads_blocks_and_lengths_of_now() -> None:
    k, v, q = normal(2, 1, 8), -normal(2, 1, 8), normal(2, 2, 8)
    k_cache, v_cache = normal(5, 1, 4, 8), -normal(5, 1, 4, 8)
    slots, lens = torch.tensor([2, 14]), torch.tensor([3, 3], dtype=torch.int32)
    table = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    metadata = AttentionMetadata(
        block_table_RM=table, query_start_loc_R1=torch.arange(3, dtype=torch.int32), seq_lens_R=lens
    )
    out, spec, replay = torch.empty(2, 2, 8), AttentionSpec(scale=0.5), Replay()
    replay.add_store_kv(k, v, k_cache, v_cache, slots)
    replay.add_attention(q, k_cache, v_cache, metadata, spec, out)
    for slot, length in ((14, 3), (15, 4), (8, 5)):
        slots[1], lens[1] = slot, length
        k_expected, v_expected = k_cache.clone(), v_cache.clone()
        torch.ops.omniserve.store_kv(k, v, k_expected, v_expected, slots)
        expected = torch.ops.omniserve.paged_attention(
            q, k_expected, v_expected, table, metadata.query_start_loc_R1, lens, 0.5, 0, 0.0
        )
        replay.run()
        assert torch.equal(k_cache, k_expected) and torch.equal(v_cache, v_expected)
        assert torch.equal(out, expected)


def test_what_an_operator_refuses_is_refused_in_a_replay() -> None:
    x, packed = torch.zeros(3, 8), torch.zeros(1, 8, 32)
    for out, complaint in (
        (torch.empty(2, 5), "out must have 5 features for each row of"),
        (torch.empty(3, 5, dtype=torch.bfloat16), "out must be"),
        (torch.empty(5, 3).t(), "out must be contiguous"),
    ):
        replay = Replay()
        replay.add_linear(x, packed, None, out)
        with pytest.raises(RuntimeError, match=complaint):
            replay.run()


def test_a_kernel_takes_tensors_and_numbers() -> None:
    with pytest.raises(ValueError, match="a kernel takes tensors and ints, got \\['bool', 'float'\\]"):
        Replay().add_kernel(None, [torch.zeros(1), 1, 1.0, True])
    with pytest.raises(RuntimeError, match="a kernel may have 48 arguments, got 49"):
        torch.ops.omniserve_replay.add_kernel(Replay()._handle, 1, list(range(49)))
    with pytest.raises(RuntimeError, match="a kernel must have an address"):
        torch.ops.omniserve_replay.add_kernel(Replay()._handle, 0, [])


def test_a_replay_that_is_gone_is_refused() -> None:
    handle = Replay()._handle
    with pytest.raises(RuntimeError, match=f"no replay has the handle {handle}"):
        torch.ops.omniserve_replay.run(handle)
