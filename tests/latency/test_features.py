"""Features of a plan: sums over its chunks, windows, piggyback rows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniserve.core.plan import DeviceChunk, PiggybackEntry, PiggybackJoin, PromptScores, StepPlan
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.latency import BatchFeatures, ModelShape, features_of
from tests.latency.samples import with_chunk

WINDOWED = ModelShape(num_layers=6, windows=((0, 2), (5, 4)))


def chunk(index: int, start: int, count: int, *, samples: bool = True) -> DeviceChunk:
    return DeviceChunk(request_id=str(index), token_ids=(1,) * count, start=start, block_ids=(), samples=samples)


def join(index: int, layer: int) -> PiggybackJoin:
    return PiggybackJoin(request_id=str(index), position=9, slot=index, epoch=1, layer=layer)


def entry(index: int) -> PiggybackEntry:
    return PiggybackEntry(request_id=str(index), token_id=1, position=9, slot=index, epoch=1, block_ids=(0,))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), min_size=1, max_size=8))
def test_features_of_a_plan_are_those_of_its_chunks_added_one_by_one(chunks: list[tuple[int, int, bool]]) -> None:
    plan = StepPlan(step_id=0, chunks=tuple(chunk(i, s, c, samples=y) for i, (s, c, y) in enumerate(chunks)))
    added = BatchFeatures()
    for start, count, samples in chunks:
        added = with_chunk(WINDOWED, added, start, count, samples=samples)
    whole = features_of(plan, WINDOWED)
    assert (whole.prefill_load, whole.decode_load) == pytest.approx((added.prefill_load, added.decode_load))
    for name in {field.name for field in dataclasses.fields(BatchFeatures)} - {"prefill_load", "decode_load"}:
        assert getattr(whole, name) == getattr(added, name), name


def test_rows_that_score_a_prompt_become_logits() -> None:
    scores = PromptScores(first_row=1, token_ids=(5, 6), num_top=0)
    plan = StepPlan(step_id=0, chunks=(dataclasses.replace(chunk(0, 7, 3, samples=True), scores=scores),))
    assert features_of(plan, WINDOWED).sampled_rows == 3


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 12))
def test_load_counts_the_keys_that_each_row_sees(start: int, count: int, window: int) -> None:
    shape = ModelShape(num_layers=1, windows=((window, 1),))
    seen = [position + 1 if window == 0 else min(position + 1, window) for position in range(start, start + count)]
    assert shape.keys_seen(start, count) == sum(seen)


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 12))
def test_load_counts_the_keys_of_each_rows_chunk(start: int, count: int, chunk_size: int) -> None:
    shape = ModelShape(num_layers=2, windows=((0, 1),), chunks=((chunk_size, 1),))
    seen = [position + 1 + position % chunk_size + 1 for position in range(start, start + count)]
    assert shape.keys_seen(start, count) == sum(seen) / 2


def test_a_models_shape_counts_what_each_layer_lets_its_queries_see() -> None:
    attention = (
        AttentionSpec(scale=1.0), AttentionSpec(scale=1.0, window=5), AttentionSpec(scale=1.0, chunk=7),
        AttentionSpec(scale=1.0, chunk=7), AttentionSpec(scale=1.0, sinks=(1.0, 2.0), alibi_slopes=(0.5, 0.25)),
    )  # fmt: skip
    spec = ModelSpec(
        num_layers=5, hidden_size=32, num_heads=2, num_kv_heads=2, head_size=16, vocab_size=9, max_model_len=99,
        eos_token_ids=(), dtype_bytes=4, attention=attention,
    )  # fmt: skip
    seen = [position + 1 - layer.first_key(position) for layer in attention for position in range(3, 40)]
    assert ModelShape.of(spec).keys_seen(3, 37) == pytest.approx(sum(seen) / 5)


def test_load_is_the_mean_over_the_layers() -> None:
    assert WINDOWED.keys_seen(9, 1) == pytest.approx((2 * 10 + 4 * 5) / 6)


def test_a_chunk_of_one_row_is_a_decode() -> None:
    features = features_of(StepPlan(step_id=0, chunks=(chunk(0, 7, 1), chunk(1, 0, 3))), WINDOWED)
    assert (features.decode_requests, features.prefill_requests, features.prefill_tokens) == (1, 1, 3)
    assert (features.rows, features.device_rows, features.decode_context) == (4, 4, 7)


def test_piggyback_rows_seats_and_their_layers() -> None:
    plan = StepPlan(
        step_id=0,
        chunks=(chunk(0, 7, 1),),
        entries=(entry(1),),
        joins=(join(2, 3), join(3, 3), join(4, 5)),
        num_piggyback_seats=4,
    )
    features = features_of(plan, WINDOWED)
    assert (features.seats, features.rows, features.piggyback_rows) == (4, 5, 4)
    assert features.piggyback_layers == 3  # 0, 3, 5
    assert features.sampled_rows == 2  # the device row, and the one that joins the last layer
    assert features.host_works
    assert features.dense_layers == 6


def test_without_device_rows_only_the_halves_that_somebody_is_at_run() -> None:
    plan = StepPlan(step_id=0, entries=(entry(1),), joins=(join(2, 3), join(4, 5)), num_piggyback_seats=4)
    # Pre-attention of 0 and 4, post-attention of 3 and 5.
    assert features_of(plan, WINDOWED).dense_layers == 2.0


def test_a_tier_that_works_beside_a_step_without_rows_of_its_own_is_told() -> None:
    plan = StepPlan(step_id=0, chunks=(chunk(0, 7, 1),))
    assert not features_of(plan, WINDOWED).host_works
    assert features_of(plan, WINDOWED, host_works=True).host_works
