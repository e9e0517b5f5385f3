"""The operators inside torch.compile(fullgraph=True): no graph break, mutations kept, any number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.checks import CPU, assert_same, check_against_reference, op_named
from tests.ops.table import OPS


@pytest.mark.parametrize("name", OPS)
def test_each_operator_traces_without_a_break(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(op_named(name), fullgraph=True, dynamic=True, backend="aot_eager")
    samples = list(OPS[name].samples(CPU, torch.float32))
    for sample in samples[:: max(1, len(samples) // 3)][:3]:  # an empty one, and two that differ much
        check_against_reference(compiled, name, sample, torch.float32)


def one_layer(
    kv: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    pool: Tensor,
    slots: Tensor,
    attention: tuple,
    seats: tuple,
    sent: tuple,
) -> Tensor:
    """Use every operator as a layer does, between dense operations that a compiler would like to reorder."""
    ops = torch.ops.omniserve
    store_SD, results_RD, rows_P, slots_P = seats
    q_TNH, table, starts, lens = attention
    ops.store_kv(kv[0] * 2, kv[1] + 1, *caches, slots)
    attn_TD = ops.paged_attention(q_TNH, *caches, table, starts, lens, 0.25, 0, 0.0).flatten(1)
    ops.store_host_kv(kv[0] * 2, kv[1] + 1, pool, None, slots)
    host_RNH = ops.cpu_attention(q_TNH[-1:], pool, None, table[-1:], lens[-1:], 0.25, 0, 0.0, 1)
    hidden_TD = ops.piggyback_concat(attn_TD, results_RD + host_RNH.flatten(1), rows_P).relu()
    ops.residual_store(hidden_TD, store_SD, slots_P)
    hidden_TD = hidden_TD * 3
    k_TKH, v_TKH = (torch.cat([rows + 2, rows[:2]]) for rows in kv)  # device rows and seats, as hidden
    ops.piggyback_send(hidden_TD, torch.cat([k_TKH, v_TKH], 1), k_TKH, v_TKH, slots_P, *sent)
    ops.residual_fetch(store_SD, slots_P.flip(0), hidden_TD)
    return hidden_TD + 1


def layer_args(num_tokens: int) -> tuple:
    generator = torch.Generator().manual_seed(num_tokens)
    kv = torch.randn(2, num_tokens, 1, 16, generator=generator)
    caches = torch.full((2, 3, 1, 16, 16), torch.nan)
    attention = (
        torch.randn(num_tokens, 2, 16, generator=generator),
        torch.tensor([[2]], dtype=torch.int32),
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
    )
    seats = (torch.full((4, 32), torch.nan), torch.ones(3, 32), torch.tensor([2, -1]), torch.tensor([3, 1]))
    pool = torch.full((3, 1, 2, 16, 16), torch.nan)
    sent = (torch.full((4, 32), torch.nan), torch.full((4, 64), torch.nan), torch.zeros(4).long(), torch.tensor([3]))
    return tuple(kv), tuple(caches), pool, 32 + torch.arange(num_tokens), attention, seats, sent


def test_a_layer_of_all_operators_compiles_to_the_same_result() -> None:
    torch.compiler.reset()
    compiled = torch.compile(one_layer, fullgraph=True, dynamic=True)
    for num_tokens in (5, 2, 9):
        mine, wanted = layer_args(num_tokens), layer_args(num_tokens)
        result, expected = compiled(*mine), one_layer(*wanted)
        got = (result, *mine[1], mine[2], mine[5][0], *mine[6])
        assert result.isfinite().all()
        assert_same(got, (expected, *wanted[1], wanted[2], wanted[5][0], *wanted[6]), "paged_attention", torch.float32)
