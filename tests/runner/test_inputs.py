"""Inputs of a shape: who is there is where it belongs, and nobody elsewhere."""

from __future__ import annotations

import dataclasses

import torch

from omniserve.core.plan import DeviceChunk, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.host.tier import result_flag
from omniserve.runner.cuda_graphs.inputs import InputMemory, StaticInputs
from omniserve.runner.cuda_graphs.shapes import StepShape
from omniserve.runner.step_inputs import make_device_rows

LAYERS, BLOCK = 3, 4


def chunk(request_id: str, tokens: tuple[int, ...], start: int, blocks: tuple[int, ...]) -> DeviceChunk:
    return DeviceChunk(request_id=request_id, token_ids=tokens, start=start, block_ids=blocks, samples=True)


def fill(inputs: StaticInputs, plan: StepPlan, *, decodes: bool = True) -> None:
    inputs.fill(plan, make_device_rows(plan, block_size=BLOCK), decodes=decodes)


def memory(*, is_directed: bool = False) -> InputMemory:
    return InputMemory(
        StepShape(8, 4), num_layers=LAYERS, max_blocks=5, device=torch.device("cpu"), is_directed=is_directed
    )


def test_decodes_entries_and_joins_are_in_their_places() -> None:
    shared = memory()
    inputs = StaticInputs(StepShape(4, 2), shared)
    for tensor in (shared.longs, shared.seq_lens, shared.block_table):
        tensor.fill_(77)  # what the last step left
    plan = StepPlan(
        step_id=0,
        chunks=(chunk("a", (5,), 6, (3, 1)), chunk("b", (9,), 0, (2,))),
        entries=(PiggybackEntry(request_id="c", token_id=8, position=11, slot=7, epoch=1, block_ids=(0,)),),
        joins=(
            PiggybackJoin(request_id="d", position=20, slot=4, epoch=1, layer=0),
            PiggybackJoin(request_id="e", position=21, slot=5, epoch=1, layer=2),
            PiggybackJoin(request_id="f", position=22, slot=6, epoch=1, layer=2, is_ready=False),
        ),
        num_piggyback_seats=2,
    )
    fill(inputs, plan)
    assert [inputs.wanted(layer).tolist() for layer in range(LAYERS)] == [[0, 0], [0, 0], [0, result_flag(1, 2, 22)]]
    assert inputs.as_one_1.tolist() == [0]
    assert inputs.token_ids_T.tolist() == [5, 9, 0, 0, 8, 0]
    assert inputs.positions_T.tolist() == [6, 0, 0, 0, 11, 0]
    assert inputs.slot_mapping_T.tolist() == [1 * BLOCK + 2, 2 * BLOCK, -1, -1]
    assert inputs.attention.seq_lens_R.tolist() == [7, 1, 0, 0]
    assert inputs.attention.block_table_RM[0, :2].tolist() == [3, 1] and inputs.attention.block_table_RM[1, 0] == 2
    assert inputs.attention.block_table_RM[2:, 0].tolist() == [0, 0], "padding names a block that exists"
    assert (inputs.attention.block_table_RM[:, 2:] == 77).all(), "no wider than the longest request of the step"
    assert inputs.attention.query_start_loc_R1.tolist() == [0, 1, 2, 3, 4]
    assert inputs.rows_leaving(0).tolist() == [7, -1]
    inputs.joined_LP[0, 1] = 9  # as the step writes it
    assert inputs.rows_leaving(1).tolist() == [-1, 9], "who has joined leaves again"
    joining = [inputs.rows_joining(layer).tolist() for layer in range(LAYERS)]
    assert joining == [[4, -1], [-1, -1], [5, 6]]
    assert inputs.seat_positions.view(LAYERS, 2).tolist() == [[11, 0], [20, 0], [0, 0]]


def test_a_step_leaves_nothing_of_the_one_before() -> None:
    inputs = StaticInputs(StepShape(4, 2), memory())
    full = tuple(chunk(str(i), (i + 1,), 9, (0, 1, 2)) for i in range(4))
    joins = tuple(
        PiggybackJoin(request_id=f"j{i}", position=3, slot=i, epoch=1, layer=1, is_ready=False) for i in range(2)
    )
    fill(inputs, StepPlan(step_id=0, chunks=full, joins=joins, joins_as_one=True, num_piggyback_seats=2))
    assert inputs.as_one_1.tolist() == [1]
    fill(inputs, StepPlan(step_id=1, chunks=(chunk("x", (3,), 1, (4,)),)))
    assert inputs.token_ids_T.tolist() == [3, 0, 0, 0, 0, 0]
    assert inputs.slot_mapping_T.tolist() == [4 * BLOCK + 1, -1, -1, -1]
    assert inputs.attention.seq_lens_R.tolist() == [2, 0, 0, 0]
    assert (inputs.rows_leaving(0) == -1).all()
    assert all((inputs.wanted(layer) == 0).all() for layer in range(LAYERS))
    assert all((inputs.rows_joining(layer) == -1).all() for layer in range(LAYERS))


def test_rows_of_chunks_and_views_that_stay_where_they_are() -> None:
    shared = memory()
    inputs = StaticInputs(StepShape(8, 0), shared)
    before = [t.data_ptr() for t in (inputs.token_ids_T, inputs.slot_mapping_T, inputs.attention.block_table_RM)]
    fill(inputs, StepPlan(step_id=0, chunks=(chunk("a", (1, 2, 3), 3, (2, 4)),)), decodes=False)
    assert inputs.positions_T.tolist() == [3, 4, 5, 0, 0, 0, 0, 0]
    assert inputs.slot_mapping_T[:3].tolist() == [2 * BLOCK + 3, 4 * BLOCK, 4 * BLOCK + 1]
    assert [
        t.data_ptr() for t in (inputs.token_ids_T, inputs.slot_mapping_T, inputs.attention.block_table_RM)
    ] == before
    assert shared.longs.data_ptr() == before[0]


def test_directions_of_a_step_and_none_of_the_one_before() -> None:
    inputs = StaticInputs(StepShape(4, 0), memory(is_directed=True))
    assert inputs.attention.reversed_RM is not None
    left = chunk("a", (5,), 6, (3, 1))
    right = dataclasses.replace(chunk("b", (9,), 9, (2, 0, 4)), is_reversed=True)
    fill(inputs, StepPlan(step_id=0, chunks=(left, right)))
    assert inputs.attention.reversed_RM[:, :3].tolist() == [[False] * 3, [True] * 3, [False] * 3, [False] * 3]
    assert inputs.slot_mapping_T.tolist() == [1 * BLOCK + 2, 4 * BLOCK + BLOCK - 1 - 1, -1, -1]
    fill(inputs, StepPlan(step_id=1, chunks=(left, left)))
    assert not inputs.attention.reversed_RM[:, :2].any()
    assert StaticInputs(StepShape(4, 0), memory()).attention.reversed_RM is None
